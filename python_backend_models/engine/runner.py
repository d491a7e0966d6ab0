"""What the talker engine asks of the device: prompt chunks, frame steps, and frames back.

Owns the networks, the page pool and the slots' state; decides how a frame step is executed (eagerly, or with
the depth loop or the whole frame as a CUDA graph) and which attention serves it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from python_backend_models.contract import CONTEXT_TOKENS
from python_backend_models.engine.frame_step import NEVER, DepthLoop, FrameStep, LaneState
from python_backend_models.engine.kv_cache import (
    SCRATCH_PAGE,
    HostDecodeAttention,
    KVPool,
    MaskedDecodeAttention,
    PagedDecodeAttention,
    PrefillAttention,
    SharedPrefix,
    pages_for,
)
from python_backend_models.networks.backbone import Attend, Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder

RowPages = tuple[Sequence[int], Sequence[int]]


class FrameRunner:
    """Device side of the talker.

    Args:
        slots: songs that can be live at once.
        pages: size of the page pool.
        page_tokens: tokens in a page.
        ring_frames: frames kept per slot.
    """

    def __init__(
        self,
        backbone: Backbone,
        depth: DepthDecoder,
        *,
        slots: int,
        pages: int,
        page_tokens: int,
        ring_frames: int,
    ) -> None:
        embedding = backbone.model.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.backbone, self.depth = backbone, depth
        self.pool = KVPool(
            backbone.config, pages=pages, page_tokens=page_tokens, dtype=self.dtype, device=self.device
        )
        self.prefix = SharedPrefix(self.pool)
        self.state = LaneState.allocate(
            slots=slots,
            hidden=embedding.shape[1],
            ring_frames=ring_frames,
            pages_per_row=pages_for(CONTEXT_TOKENS, page_tokens),
            dtype=self.dtype,
            device=self.device,
        )
        self._step = FrameStep(
            backbone,
            depth,
            self.pool,
            self.state,
            depth_loop=DepthLoop(backbone, depth),
            attention=self._device_attention,
        )

    def prefill(self, token_ids: Sequence[int], pages: Sequence[int], *, first_position: int) -> Tensor:
        """Run a chunk of a row's prompt; its keys and values go to the row's pages.

        Returns:
            the hidden state at the chunk's last token, `[hidden]`.
        """
        ids = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(first_position, first_position + len(token_ids), device=self.device)
        attend = PrefillAttention(self.pool, pages, first_position=first_position, tokens=len(token_ids))
        return self.backbone(self.backbone.embed(ids), positions.unsqueeze(0), attend)[0, -1]

    def hold(self, slot: int, row: int, hidden: Tensor) -> None:
        """Keep a row's last prompt state: the slot's first frame is drawn from it."""
        self.state.hidden[slot, row] = hidden

    def place(self, slot: int, *, seed: int, tokens: int, pages: RowPages) -> None:
        """Reset a slot for a song whose prompt is done."""
        state = self.state
        state.seeds[slot] = seed
        state.tokens[slot] = tokens
        state.drawn[slot] = 0
        state.events[slot] = NEVER
        table = torch.full(state.tables.shape[1:], SCRATCH_PAGE, dtype=torch.int32)
        for row, row_pages in enumerate(pages):
            table[row, : len(row_pages)] = torch.tensor(row_pages, dtype=torch.int32)
        state.tables[slot] = table.to(self.device)

    def step(self, slots: Sequence[int], rows: Sequence[tuple[RowPages, int]]) -> None:
        """Advance slots by one frame.

        Args:
            slots: which.
            rows: per slot its pages and its tokens including this frame's feedback.
        """
        lanes = torch.tensor(slots, device=self.device)
        if self.device.type == "cuda":
            self._step(lanes)
            return
        pages, lengths = zip(*rows, strict=True)

        def attention(flat_slots: Tensor, tables: Tensor, tokens: Tensor) -> Attend:
            return HostDecodeAttention(self.pool, flat_slots, pages, lengths)

        self._step(lanes, attention=attention)

    def collect(self, slot: int, start_frame: int, end_frame: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's drawn frames: conditioning `[frames, 8 * hidden]` and codes `[frames, 8]`."""
        ring = self.state.frames.shape[1]
        rows = (torch.arange(start_frame, end_frame) % ring).to(self.device)
        return self.state.frames[slot].index_select(0, rows), self.state.codes[slot].index_select(0, rows)

    def scrub(self, pages: Sequence[int]) -> None:
        """Zero the pages of a song that went non-finite: a masked NaN is still a NaN once multiplied."""
        affected = torch.tensor([SCRATCH_PAGE, *pages], device=self.device)
        self.pool.keys.index_fill_(1, affected, 0)
        self.pool.values.index_fill_(1, affected, 0)

    def _device_attention(self, slots: Tensor, tables: Tensor, lengths: Tensor) -> Attend:
        if PagedDecodeAttention.available(self.device, self.dtype):
            return PagedDecodeAttention(self.pool, slots, tables, lengths)
        return MaskedDecodeAttention(self.pool, slots, tables, lengths)
