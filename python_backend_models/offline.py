"""A whole song in plain sequence: prompt, every frame, then window by window to sound.

Shares the networks and the draws with the server, and nothing of its scheduling: no pages, slots, threads or
batches. It is what the server is tested against, and a way to make a song without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from python_backend_models import checkpoint, chunking, sampling
from python_backend_models.engine.acoustic import FlowEngine, FlowWindow, VocoderEngine
from python_backend_models.engine.frame_step import DRAWS_PER_FRAME, DepthLoop, compose_feedback
from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.networks.layers import pack_linears
from python_backend_models.prompt import PromptBuilder, frame_budget
from python_backend_models.resample import StreamingResampler


@dataclass(frozen=True)
class OfflineModels:
    """Everything a song needs, loaded."""

    prompts: PromptBuilder
    backbone: Backbone
    depth: DepthDecoder
    flow: FlowEngine
    vocoder: VocoderEngine


@dataclass(frozen=True)
class OfflineSong:
    """A finished song.

    Attributes:
        codes: `[frames, 8]` int64.
        hidden: conditioning `[frames, 8 * hidden]` bfloat16, as it travels between the stages.
        chunks: sound at 32 kHz per window, each `[samples, 2]` float32.
        finish_reason: `stop` or `length`.
    """

    codes: Tensor
    hidden: Tensor
    chunks: list[Tensor]
    finish_reason: str

    @property
    def audio(self) -> Tensor:
        """The whole song `[samples, 2]` float32 at 32 kHz."""
        return torch.cat(self.chunks)


def load_models(
    root: Path,
    *,
    device: str = "cpu",
    profile: str = "vllm-omni",
    talker_dtype: torch.dtype | None = None,
) -> OfflineModels:
    """Load a checkpoint folder.

    Raises:
        CheckpointError: see `checkpoint.load`.
    """
    return OfflineModels(
        prompts=PromptBuilder(root / "tokenizer" / "tokenizer.json", profile=profile),
        backbone=checkpoint.load(root, checkpoint.BACKBONE, device=device, dtype=talker_dtype),
        depth=checkpoint.load(root, checkpoint.DEPTH_DECODER, device=device, dtype=talker_dtype),
        flow=FlowEngine(
            checkpoint.load(root, checkpoint.CONDITION_ENCODER, device=device),
            checkpoint.load(root, checkpoint.FLOW_TRANSFORMER, device=device),
            device=device,
        ),
        vocoder=VocoderEngine(checkpoint.load(root, checkpoint.VOCODER, device=device), device=device),
    )


def make_song(
    models: OfflineModels,
    caption: str,
    lyrics: str,
    *,
    seed: int = 0,
    max_frames: int | None = None,
    profile: str = "vllm-omni",
) -> OfflineSong:
    """Make a whole song; arguments as in the request.

    Raises:
        InvalidRequestError: the prompt or the cap doesn't fit.
        RuntimeError: the model ended the song before its first frame, or a window went non-finite.
    """
    prompt = models.prompts.build(caption, lyrics)
    codes, hidden, finish_reason = write_frames(
        models.backbone,
        models.depth,
        prompt.ids,
        prompt.unconditional_ids,
        seed=seed,
        max_frames=frame_budget(len(prompt.ids), max_frames),
        profile=profile,
    )
    if not len(codes):
        raise RuntimeError("the model ended the song before its first frame; try another seed")
    hidden = hidden.to(torch.bfloat16)
    chunks = render(models, hidden, seed=seed)
    return OfflineSong(codes=codes, hidden=hidden, chunks=chunks, finish_reason=finish_reason)


@torch.inference_mode()
def write_frames(
    backbone: Backbone,
    depth: DepthDecoder,
    prompt: Sequence[int],
    twin: Sequence[int],
    *,
    seed: int,
    max_frames: int,
    profile: str = "vllm-omni",
) -> tuple[Tensor, Tensor, str]:
    """The autoregressive half: codes `[frames, 8]`, conditioning `[frames, 8 * hidden]`, finish reason.

    On a CPU the networks' projections are packed, see `networks.layers.Linear`.
    """
    pack_linears(backbone)
    pack_linears(depth)
    device = backbone.model.embed_tokens.weight.device
    lead_in_frames = sampling.lead_in_frames(profile)
    seeds = torch.tensor([sampling.ar_draw_seed(seed, profile=profile)], device=device)
    depth_loop = DepthLoop(backbone, depth)
    rows, states = [], []
    for ids in (prompt, twin):
        row = _DenseAttention(len(backbone.model.layers))
        tokens = torch.tensor([list(ids)], device=device)
        positions = torch.arange(len(ids), device=device).unsqueeze(0)
        states.append(backbone(backbone.embed(tokens), positions, row)[:, -1])
        rows.append(row)
    attend, hidden = _DenseAttention.stacked(rows), torch.cat(states)
    codes: list[Tensor] = []
    frames: list[Tensor] = []
    while len(codes) < lead_in_frames + max_frames:
        position = torch.tensor([DRAWS_PER_FRAME * len(codes)], device=device)
        logits = backbone.logits(hidden)
        column = sampling.draw_c0(logits[:1], logits[1:], seeds, position)
        if column.item() == 0:
            return *_emitted(codes, frames, lead_in_frames, depth), "stop"
        frame_codes, depth_states, _ = depth_loop(hidden.unsqueeze(0), column - 1, seeds, position)
        frames.append(torch.cat((hidden[:1], depth_states), dim=-1))
        codes.append(frame_codes)
        feedback = compose_feedback(backbone, depth, frame_codes).expand(2, 1, -1)
        now = torch.full((2, 1), len(prompt) + len(codes) - 1, device=device)
        hidden = backbone(feedback, now, attend)[:, -1]
    return *_emitted(codes, frames, lead_in_frames, depth), "length"


def render(models: OfflineModels, hidden: Tensor, *, seed: int) -> list[Tensor]:
    """The acoustic half, window by window: 32 kHz chunks `[samples, 2]`, one per window.

    Args:
        hidden: conditioning `[frames, 8 * hidden]`.

    Raises:
        Exception: what the flow or vocoder engine reports for a window.
    """
    resampler = StreamingResampler()
    carry, chunks = None, []
    for window in chunking.windows(len(hidden)):
        span = hidden[window.start_frame : window.end_frame]
        solved = _unwrap(models.flow.solve([FlowWindow(span, seed, window.index, carry)]))
        waveform = _unwrap(models.vocoder.decode([solved.latent], [window.crop_samples]))
        chunks.append(resampler.push(waveform, flush=window.is_last).t().contiguous())
        carry = solved.carry
    return chunks


Result = TypeVar("Result")


def _unwrap(results: Sequence[Result | Exception]) -> Result:
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


def _emitted(
    codes: list[Tensor], frames: list[Tensor], lead_in_frames: int, depth: DepthDecoder
) -> tuple[Tensor, Tensor]:
    kept_codes, kept_frames = codes[lead_in_frames:], frames[lead_in_frames:]
    if not kept_codes:
        width = depth.config["num_codebooks"] * depth.config["hidden_size"]
        return torch.empty(0, depth.config["num_codebooks"], dtype=torch.int64), torch.empty(0, width)
    return torch.cat(kept_codes), torch.cat(kept_frames)


class _DenseAttention:
    """Plain growing keys and values of two rows, attended to in one piece."""

    def __init__(self, layers: int) -> None:
        self._stored: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @classmethod
    def stacked(cls, rows: Sequence["_DenseAttention"]) -> "_DenseAttention":
        """Equally long rows as one batch."""
        both = cls(0)
        layers = zip(*(row._stored for row in rows), strict=True)
        both._stored = [tuple(torch.cat(parts) for parts in zip(*layer, strict=True)) for layer in layers]
        return both

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        stored = self._stored[layer]
        if stored is not None:
            keys, values = (
                torch.cat((old, new), dim=1) for old, new in zip(stored, (keys, values), strict=True)
            )
        self._stored[layer] = (keys, values)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if queries.shape[1] > 1:
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
            )
            return attended.transpose(1, 2)
        grouped = queries.squeeze(1).unflatten(1, (keys.shape[1], -1))
        return F.scaled_dot_product_attention(grouped, keys, values).flatten(1, 2).unsqueeze(1)
