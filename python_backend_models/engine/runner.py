"""What the talker engine asks of the device: prompt chunks, frame steps, and frames back.

Owns the networks, the page pool and the slots' state; decides how a frame step is executed (eagerly, or with
the depth loop or the whole frame as a CUDA graph) and which attention serves it.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from python_backend_models.contract import CONTEXT_TOKENS
from python_backend_models.engine.frame_step import NEVER, DepthLoop, FrameStep, LaneState
from python_backend_models.engine.graphs import CudaRecorder, GraphedFunction, Recorder
from python_backend_models.engine.kv_cache import (
    SCRATCH_PAGE,
    HostDecodeAttention,
    KVPool,
    MaskedDecodeAttention,
    PagedDecodeAttention,
    PrefillAttention,
    SharedPrefix,
    paged_kernel_works,
    pages_for,
)
from python_backend_models.engine.staging import to_device
from python_backend_models.networks.backbone import Attend, Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.networks.layers import pack_linears

_LOG = logging.getLogger(__name__)
RowPages = tuple[Sequence[int], Sequence[int]]
GRAPHS = ("frame", "depth", "off")
# A replay runs the kernels that were recorded, so on a good day it differs from the eager step by nothing.
# Libraries may choose another algorithm for a recording; half a percent of the largest value is beyond that.
_REPLAY_TOLERANCE = 5e-3


class FrameRunner:
    """Device side of the talker.

    Args:
        slots: songs that can be live at once.
        pages: size of the page pool.
        page_tokens: tokens in a page.
        ring_frames: frames kept per slot.
        graphs: what is replayed from a graph: the whole `frame`, the `depth` loop, or nothing (`off`).
        recorder: records graphs; None for CUDA's on a CUDA device, and none elsewhere.
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
        graphs: str = "off",
        recorder: Recorder | None = None,
    ) -> None:
        embedding = backbone.model.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.backbone, self.depth = backbone, depth
        self.pool = KVPool(
            backbone.config, pages=pages, page_tokens=page_tokens, dtype=self.dtype, device=self.device
        )
        self.prefix = SharedPrefix(self.pool)
        self._paged = paged_kernel_works(self.pool, backbone.config["num_attention_heads"])
        self.state = LaneState.allocate(
            slots=slots,
            hidden=embedding.shape[1],
            ring_frames=ring_frames,
            pages_per_row=pages_for(CONTEXT_TOKENS, page_tokens),
            dtype=self.dtype,
            device=self.device,
        )
        if recorder is None and self.device.type == "cuda":
            recorder = CudaRecorder(self.device)
        self.graphs = graphs if recorder is not None else "off"
        if self.graphs == "off":
            pack_linears(backbone)
            pack_linears(depth)
        self.buckets = lane_buckets(slots)
        self._depth_loop = GraphedFunction(
            DepthLoop(backbone, depth), recorder if self.graphs == "depth" else None
        )
        self._step = FrameStep(
            backbone,
            depth,
            self.pool,
            self.state,
            depth_loop=self._depth_loop,
            attention=self._device_attention,
        )
        self._frame = GraphedFunction(self._frame_function, recorder if self.graphs == "frame" else None)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the graphs of every bucket, and compare a replay with the eager step.

        Call once, before there are songs. A replay that differs turns graphs off, with a warning that says by
        how much: slower, never wrong.
        """
        if self.graphs == "off":
            return
        for lanes in self.buckets:
            if self.graphs == "frame":
                self._frame.record(self._lanes([], lanes))
            else:
                self._depth_loop.record(*self._depth_inputs(lanes))
        difference = max(self._replay_difference(lanes) for lanes in self.buckets)
        if difference > _REPLAY_TOLERANCE:
            _LOG.warning(
                "a replayed step differs from the eager one by %.1e of its largest value (at most %.0e is "
                "allowed): CUDA graphs are off",
                difference,
                _REPLAY_TOLERANCE,
            )
            self.turn_graphs_off()
            return
        _LOG.info(
            "CUDA graphs of the %s for %s songs; a replay differs from the eager step by %.1e",
            self.graphs,
            ", ".join(map(str, self.buckets)),
            difference,
        )

    def turn_graphs_off(self) -> None:
        """Run every step eagerly from now on."""
        self.graphs = "off"
        self._depth_loop = self._step.depth_loop = GraphedFunction(DepthLoop(self.backbone, self.depth), None)
        self._frame = GraphedFunction(self._frame_function, None)

    def prefill(self, token_ids: Sequence[int], pages: Sequence[int], *, first_position: int) -> Tensor:
        """Run a chunk of a row's prompt; its keys and values go to the row's pages.

        Returns:
            the hidden state at the chunk's last token, `[hidden]`.
        """
        ids = to_device(token_ids, self.device).unsqueeze(0)
        positions = torch.arange(first_position, first_position + len(token_ids), device=self.device)
        attend = PrefillAttention(
            self.pool, pages, first_position=first_position, tokens=len(token_ids), paged=self._paged
        )
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
        width = state.tables.shape[2]
        rows = [[*row, *[SCRATCH_PAGE] * (width - len(row))] for row in pages]
        state.tables[slot] = to_device([*rows[0], *rows[1]], self.device, dtype=torch.int32).view(2, width)

    def step(self, slots: Sequence[int], rows: Sequence[tuple[RowPages, int]]) -> None:
        """Advance slots by one frame.

        Args:
            slots: which.
            rows: per slot its pages and its tokens including this frame's feedback.
        """
        if self.graphs != "off":
            bucket = next(lanes for lanes in self.buckets if lanes >= len(slots))
            run = self._frame if self.graphs == "frame" else self._step
            run(self._lanes(slots, bucket))
            return
        lanes = self._lanes(slots, len(slots))
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
        if self._paged:
            return PagedDecodeAttention(self.pool, slots, tables, lengths)
        return MaskedDecodeAttention(self.pool, slots, tables, lengths)

    def _lanes(self, slots: Sequence[int], count: int) -> Tensor:
        """Slots padded with the dummy to `count` lanes."""
        return to_device([*slots, *[self.state.dummy_slot] * (count - len(slots))], self.device)

    def _frame_function(self, lanes: Tensor) -> Tensor:
        """The frame step as a function of tensors that returns one; all else happens in the slots' state."""
        self._step(lanes)
        return self.state.events

    def _depth_inputs(self, songs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(songs)
        width = self.state.hidden.shape[2]
        hidden = torch.randn(songs, 2, width, generator=generator, device=self.device).to(self.dtype)
        codes = torch.arange(songs, device=self.device)
        return hidden, codes, codes + 7, codes * 8

    def _replay_difference(self, lanes: int) -> float:
        """Largest difference of a replay from an eager run, relative to the largest value; inf for codes."""
        if self.graphs == "depth":
            inputs = self._depth_inputs(lanes)
            eager, replayed = DepthLoop(self.backbone, self.depth)(*inputs), self._depth_loop(*inputs)
            return _difference((eager[0],), (eager[1],), (replayed[0],), (replayed[1],))
        outcomes = []
        slots = list(range(lanes))
        # Two lists of pages, one per guidance row, and every song at another position in them: if rows wrote
        # to the same place, the device would decide whose value stays, and chance whether two runs agree.
        per_row = pages_for(lanes, self.pool.page_tokens)
        pages = (self.pool.reserve(per_row), self.pool.reserve(per_row))
        for run in (self._frame_function, self._frame):
            for slot in slots:
                self.place(slot, seed=slot, tokens=slot, pages=pages)
            self.state.hidden[:lanes] = self._depth_inputs(lanes)[0]
            run(self._lanes(slots, lanes))
            outcomes.append(
                (
                    (self.state.codes[:lanes, 0].clone(), self.state.events[:lanes].clone()),
                    (self.state.frames[:lanes, 0].clone(), self.state.hidden[:lanes].clone()),
                )
            )
        self.pool.release([*pages[0], *pages[1]])
        for slot in slots:
            self.place(slot, seed=0, tokens=0, pages=([], []))
        (eager_codes, eager_values), (codes, values) = outcomes
        return _difference(eager_codes, eager_values, codes, values)


def lane_buckets(slots: int) -> tuple[int, ...]:
    """Lane counts that graphs are recorded for: powers of two up to the slots, and the slots."""
    powers = [1 << exponent for exponent in range(slots.bit_length()) if 1 << exponent < slots]
    return (*powers, slots)


def _difference(
    codes: Sequence[Tensor], values: Sequence[Tensor], other_codes: Sequence[Tensor], others: Sequence[Tensor]
) -> float:
    if any(not torch.equal(a, b) for a, b in zip(codes, other_codes, strict=True)):
        return float("inf")
    return max(
        ((a.float() - b.float()).abs().max() / a.float().abs().max().clamp_min(1e-6)).item()
        for a, b in zip(values, others, strict=True)
    )
