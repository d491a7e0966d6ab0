"""One frame for every lane: guided draws, depth loop, feedback, and the backbone step that prepares the next.

A song's device state lives in a slot; a step names the slots it advances (its lanes) and reads and writes
only device memory: no host value decides anything, so the whole step can be one CUDA graph per number of
lanes. The last slot is a dummy for lanes that pad a bucket.

A step begins with the draw, because the hidden state it draws from is already there (from the prompt or from
the step before); so a song joins by putting its prompt's last hidden state into its slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from python_backend_models import sampling
from python_backend_models.contract import (
    C0_TOKEN_OFFSET,
    CODEBOOKS,
    CONTEXT_TOKENS,
)
from python_backend_models.engine.kv_cache import KVPool, decode_slots
from python_backend_models.networks.backbone import Attend, Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder

# Not cuDNN's: equal inputs were seen to give results one bfloat16 step apart there (vllm-omni 0.30.0).
_DEPTH_ATTENTION: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NEVER: Final = 2**31 - 1
DRAWS_PER_FRAME: Final = CODEBOOKS

# Builds the attention of one step from (flat slots, tables, lengths); all on the device, per row.
AttentionFactory = Callable[[Tensor, Tensor, Tensor], Attend]


@dataclass(frozen=True)
class LaneState:
    """Device state of all slots; every tensor's first axis is the slot, the last slot is the dummy.

    Attributes:
        hidden: post-norm hidden states that the next frame is drawn from, `[slots, 2, hidden]`.
        seeds: draw seeds `[slots]` int64.
        drawn: frames drawn so far `[slots]` int64; the draw position is eight times that.
        tokens: tokens in the cache `[slots]` int64, i.e. the position of the next feedback.
        tables: pages of both rows `[slots, 2, pages]` int32; unused entries point at scratch.
        frames: conditioning of drawn frames in a ring, `[slots, ring, 8 * hidden]`.
        codes: their codes `[slots, ring, 8]` int64.
        events: index of the frame at which a stop was drawn, and at which a value was first not finite,
            `[slots, 2]` int32; `NEVER` until then.
    """

    hidden: Tensor
    seeds: Tensor
    drawn: Tensor
    tokens: Tensor
    tables: Tensor
    frames: Tensor
    codes: Tensor
    events: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        slots: int,
        hidden: int,
        ring_frames: int,
        pages_per_row: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "LaneState":
        """Zeroed state of `slots` slots and the dummy."""

        def zeros(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(slots + 1, *shape, dtype=kind, device=device)

        return cls(
            hidden=zeros(2, hidden, kind=dtype),
            seeds=zeros(),
            drawn=zeros(),
            tokens=zeros(),
            tables=zeros(2, pages_per_row, kind=torch.int32),
            frames=zeros(ring_frames, CODEBOOKS * hidden, kind=dtype),
            codes=zeros(ring_frames, CODEBOOKS),
            events=zeros(2, kind=torch.int32),
        )

    @property
    def dummy_slot(self) -> int:
        return self.seeds.shape[0] - 1


class DepthLoop:
    """The seven residual codes of a frame, guided and seeded."""

    def __init__(self, backbone: Backbone, depth: DepthDecoder) -> None:
        self.backbone, self.depth = backbone, depth

    def __call__(
        self, hidden: Tensor, c0: Tensor, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Walk c1..c7 for both guidance rows; the drawn code is shared.

        Args:
            hidden: backbone states `[songs, 2, hidden]`, conditional row first.
            c0: `[songs]` int64, zero-based.
            seeds, positions: of the frame's draws, `[songs]` int64.

        Returns:
            codes `[songs, 8]` int64; the conditional row's depth states `[songs, 7 * hidden]`; whether every
            logit was finite `[songs]` bool.
        """
        with sdpa_kernel(_DEPTH_ATTENTION):
            return self._walk(hidden, c0, seeds, positions)

    def _walk(
        self, hidden: Tensor, c0: Tensor, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        songs = c0.shape[0]
        noise = sampling.residual_noise(seeds, positions, self.depth.codes)
        cache = self.depth.start()
        embedding = self.backbone.embed(c0 + C0_TOKEN_OFFSET)
        pair = embedding.unsqueeze(1).expand_as(hidden)
        inputs = torch.stack((hidden, pair), dim=2).flatten(0, 1)
        codes, states = [c0], []
        finite = torch.ones_like(c0, dtype=torch.bool)
        for codebook in range(1, CODEBOOKS):
            output = self.depth(inputs, 0 if codebook == 1 else codebook, cache)
            states.append(output.view(songs, 2, -1)[:, 0])
            logits = self.depth.logits(output, codebook).view(songs, 2, -1)
            finite = finite & logits.isfinite().flatten(1).all(dim=1)
            code = sampling.draw_residual(logits[:, 0], logits[:, 1], noise[:, codebook - 1])
            codes.append(code)
            inputs = self.depth.embed(code, codebook).repeat_interleave(2, dim=0).unsqueeze(1)
        return torch.stack(codes, dim=1), torch.cat(states, dim=-1), finite


def compose_feedback(backbone: Backbone, depth: DepthDecoder, codes: Tensor) -> Tensor:
    """The backbone's input for a frame's codes `[songs, 8]`, `[songs, hidden]`.

    `(E[c0] + sum_k A_k[c_k]) / sqrt(8)`, where the sum of the seven is rounded to the weights' dtype once.
    """
    residuals = torch.stack([depth.embed(codes[:, k], k) for k in range(1, CODEBOOKS)], dim=1)
    total = residuals.sum(dim=1, dtype=torch.float32).to(residuals.dtype)
    return (backbone.embed(codes[:, 0] + C0_TOKEN_OFFSET) + total) * CODEBOOKS**-0.5


class FrameStep:
    """Advance the named slots by one frame, entirely on the device.

    Args:
        depth_loop: a `DepthLoop`, or a captured one with the same signature.
        attention: how decode attention is made from the step's slots, tables and lengths.
    """

    def __init__(
        self,
        backbone: Backbone,
        depth: DepthDecoder,
        pool: KVPool,
        state: LaneState,
        *,
        depth_loop: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
        attention: AttentionFactory,
    ) -> None:
        self.backbone, self.depth, self.pool, self.state = backbone, depth, pool, state
        self.depth_loop, self.attention = depth_loop, attention

    def __call__(self, lanes: Tensor, *, attention: AttentionFactory | None = None) -> None:
        """Draw one frame per lane and run the backbone on it.

        Args:
            lanes: slots to advance `[lanes]` int64, no slot twice but the dummy.
            attention: replaces the constructor's for this step.
        """
        state = self.state
        hidden, seeds, drawn = state.hidden[lanes], state.seeds[lanes], state.drawn[lanes]
        positions = drawn * DRAWS_PER_FRAME
        logits = self.backbone.logits(hidden.flatten(0, 1)).unflatten(0, (-1, 2))
        column = sampling.draw_c0(logits[:, 0], logits[:, 1], seeds, positions)
        c0 = (column - 1).clamp_min(0)
        codes, depth_states, finite = self.depth_loop(hidden, c0, seeds, positions)
        finite = finite & logits.isfinite().flatten(1).all(dim=1)
        self._record(lanes, drawn, torch.cat((hidden[:, 0], depth_states), dim=-1), codes)
        self._note_events(lanes, drawn, column == 0, ~finite)
        self._advance(lanes, compose_feedback(self.backbone, self.depth, codes), attention)

    def _record(self, lanes: Tensor, drawn: Tensor, frames: Tensor, codes: Tensor) -> None:
        ring = self.state.frames.shape[1]
        rows = lanes * ring + drawn % ring
        self.state.frames.flatten(0, 1).index_copy_(0, rows, frames)
        self.state.codes.flatten(0, 1).index_copy_(0, rows, codes)

    def _note_events(self, lanes: Tensor, drawn: Tensor, stopped: Tensor, broken: Tensor) -> None:
        happened = torch.stack((stopped, broken), dim=1)
        at = torch.where(happened, drawn.unsqueeze(1), NEVER).to(torch.int32)
        self.state.events.index_copy_(0, lanes, torch.minimum(self.state.events[lanes], at))

    def _advance(self, lanes: Tensor, feedback: Tensor, attention: AttentionFactory | None) -> None:
        state = self.state
        # A song that is stepped past its end writes to scratch; its position must still be a legal one.
        last = min(CONTEXT_TOKENS, state.tables.shape[2] * self.pool.page_tokens) - 1
        tokens = state.tokens[lanes].clamp_max(last)
        tables = state.tables[lanes].flatten(0, 1)
        positions = tokens.repeat_interleave(2)
        slots = decode_slots(self.pool, tables, positions)
        attend = (attention or self.attention)(slots, tables, positions + 1)
        embeddings = feedback.repeat_interleave(2, dim=0).unsqueeze(1)
        hidden = self.backbone(embeddings, positions.unsqueeze(1), attend)
        state.hidden.index_copy_(0, lanes, hidden.view(-1, 2, hidden.shape[-1]))
        state.tokens.index_copy_(0, lanes, tokens + 1)
        # The dummy's lanes attend as far as its token count says: kept at nothing, padding stays cheap.
        state.tokens[state.dummy_slot :].zero_()
        state.drawn.index_copy_(0, lanes, state.drawn[lanes] + 1)
