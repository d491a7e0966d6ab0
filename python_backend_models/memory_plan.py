"""What fits on a GPU: weights, key-value pool, song state and activations, from the official configs.

`python -m python_backend_models.memory_plan [--gpu 24|40|80|141]` shows the arithmetic and what follows.
Weights, pool and song state are exact: they are counted on networks and state of the real classes without
memory. Activations are counted from shapes. What no formula gives, a process' CUDA context and what the
allocator keeps beyond what is in use, is an allowance; the output names it. None of it was measured.
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from python_backend_models import official
from python_backend_models.checkpoint import COMPONENTS
from python_backend_models.chunking import window_latents, windows
from python_backend_models.contract import (
    CHANNELS,
    CODEBOOKS,
    CONTEXT_RESERVE_TOKENS,
    CONTEXT_TOKENS,
    FRAME_RATE_HZ,
    MAX_SONG_FRAMES,
    WINDOW_FRAMES,
)
from python_backend_models.engine.frame_step import LaneState
from python_backend_models.engine.kv_cache import bytes_per_page, pages_for
from python_backend_models.engine.loading import song_pages
from python_backend_models.engine.talker import ring_frames
from python_backend_models.networks.vocoder import Vocoder
from python_backend_models.settings import TalkerSettings

GB: Final = 1e9
GIB: Final = 2**30
# Total memory as torch reports it: RTX 4090 or L4, A100 40 GB, H100 80 GB, H200.
GPUS: Final = {24: 23.5 * GIB, 40: 39.4 * GIB, 80: 79.1 * GIB, 141: 139.8 * GIB}
# Allowances, not measured: context, loaded kernels and library workspaces of a process; the share of a GPU
# left free; and that activations are there twice, in the graphs' pool and kept by the allocator.
CONTEXT_BYTES: Final = 0.6 * GB
FREE_SHARE: Final = 0.03
ACTIVATION_COPIES: Final = 2
# Tensors of a residual unit that are alive together at its widest: input, snake, convolution, its workspace.
_VOCODER_TENSORS: Final = 4
PROMPT_TOKENS: Final = 300
SONG_LENGTHS_S: Final = (30, 60, 360)
# Of the flow transformer; float32 needs what tf32 needs.
PRECISIONS: Final = ("tf32", "float16")
_BATCHES: Final = (8, 4, 2, 1)
_ENOUGH_SONGS: Final = 8
# The server's 32 threads for calls between models let 24 songs run and leave some; and by its arithmetic (209
# TFLOP for 4 s of sound) no single GPU of today renders more at the speed at which they are heard.
MOST_SONGS: Final = 24
_DTYPE: Final = torch.bfloat16
_F32: Final = torch.float32.itemsize


@functools.cache
def network(folder: str) -> nn.Module:
    """A component of the official size, without memory."""
    component = next(each for each in COMPONENTS if each.folder == folder)
    with torch.device("meta"):
        return component.build(official.CONFIGS[folder])


def weight_bytes(folder: str, *, precision: str) -> int:
    """Memory of a component's weights as they are served.

    `precision` is bfloat16 for the talker's two; for `transformer` it is that of the blocks' products.
    """
    module = network(folder)
    if precision in ("float32", "tf32"):
        return sum(tensor.numel() for tensor in module.parameters()) * _F32
    if folder != "transformer":
        return sum(tensor.numel() for tensor in module.parameters()) * 2
    products = [m for m in module.transformer_blocks.modules() if isinstance(m, nn.Linear)]
    halved = sum(tensor.numel() for product in products for tensor in product.parameters())
    return weight_bytes(folder, precision="float32") - halved * 2


def song_state_bytes() -> int:
    """Memory of one slot: ring of conditioning and codes, page tables and counters."""
    state = LaneState.allocate(
        slots=0,
        hidden=official.CONFIGS["language_model"]["hidden_size"],
        ring_frames=ring_frames(TalkerSettings().run_ahead_windows),
        pages_per_row=pages_for(CONTEXT_TOKENS, TalkerSettings().kv_page_tokens),
        dtype=_DTYPE,
        device="meta",
    )
    return sum(each.nbytes for each in vars(state).values() if isinstance(each, Tensor))


def page_bytes() -> int:
    """Memory of a page of the key-value pool over all layers."""
    return bytes_per_page(official.CONFIGS["language_model"], TalkerSettings().kv_page_tokens, _DTYPE)


def pages_of(seconds: int) -> int:
    """Pages of a song of this length with an ordinary prompt; at most those of the full context."""
    frames = min(seconds * FRAME_RATE_HZ, MAX_SONG_FRAMES)
    tokens = min(PROMPT_TOKENS + frames + CONTEXT_RESERVE_TOKENS, CONTEXT_TOKENS)
    return song_pages(tokens, TalkerSettings().kv_page_tokens)


def prefill_bytes() -> int:
    """Widest moment of a prompt chunk: the gated products of the feed-forward and the residual stream."""
    config = official.CONFIGS["language_model"]
    width = 3 * config["intermediate_size"] + 3 * config["hidden_size"]
    return TalkerSettings().prefill_chunk_tokens * width * _DTYPE.itemsize


def flow_bytes(batch: int, *, precision: str) -> int:
    """Widest moment of a solve: per token the residual, its norm, and the feed-forward's gated products."""
    config: dict[str, Any] = official.CONFIGS["transformer"]
    width, inner = config["num_attention_heads"] * config["attention_head_dim"], config["ff_inner_dim"]
    size = _F32 if precision in ("float32", "tf32") else 2
    per_token = 2 * width * _F32 + (2 * width + 3 * inner) * size
    return 2 * batch * (1 + window_latents(WINDOW_FRAMES)) * per_token


def vocoder_bytes(batch: int) -> int:
    """Widest moment of a decode: some tensors of the last stage, at the longest stretch that is decoded."""
    vocoder = network("vocoder")
    assert isinstance(vocoder, Vocoder)
    width = vocoder.config["decoder_hidden_dim"] >> len(vocoder.config["upsampling_ratios"])
    parts = windows(3 * WINDOW_FRAMES)
    longest = max(part.kept_samples for part in parts) // vocoder.hop_samples + 2 * vocoder.reach_latents
    latents = min(longest, window_latents(WINDOW_FRAMES))
    return _VOCODER_TENSORS * batch * CHANNELS * width * vocoder.hop_samples * latents * _F32


def talker_bytes(songs: int) -> float:
    """The talker's process without its key-value pool."""
    weights = sum(
        weight_bytes(name, precision="bfloat16") for name in ("language_model", "rvq_depth_decoder")
    )
    return CONTEXT_BYTES + weights + (songs + 1) * song_state_bytes() + ACTIVATION_COPIES * prefill_bytes()


def flow_process_bytes(batch: int, *, precision: str) -> float:
    """The process of `dit`."""
    weights = weight_bytes("transformer", precision=precision)
    weights += weight_bytes("condition_encoder", precision="float32")
    return CONTEXT_BYTES + weights + ACTIVATION_COPIES * flow_bytes(batch, precision=precision)


def vocoder_process_bytes(batch: int) -> float:
    """The process of `vocoder`."""
    weights = weight_bytes("vocoder", precision="float32")
    return CONTEXT_BYTES + weights + ACTIVATION_COPIES * vocoder_bytes(batch)


@dataclass(frozen=True)
class Plan:
    """One way to use a GPU.

    Attributes:
        stages: that run on it.
        batch: most windows computed at once; 0 without the acoustic stages.
        songs: places; 0 without the talker.
        pages: of the key-value pool.
        used_bytes: of everything.
    """

    stages: str
    precision: str
    batch: int
    songs: int
    pages: int
    used_bytes: float

    @property
    def kv_tokens(self) -> int:
        return self.pages * TalkerSettings().kv_page_tokens

    @property
    def settings(self) -> str:
        """As an environment of `serve`."""
        named = []
        if self.batch:
            named += [f"MUSIC3_DIT_PRECISION={self.precision}", f"MUSIC3_BATCH_WINDOWS={self.batch}"]
        if self.songs:
            named += [f"MUSIC3_LIVE_SONGS={self.songs}", f"MUSIC3_KV_TOKENS={self.kv_tokens}"]
        return " ".join(named)


def plan(gpu_bytes: float, *, precision: str, talker: bool = True, acoustic: bool = True) -> Plan | None:
    """The best plan for a GPU; None if these stages don't fit.

    The largest batch that leaves room for eight songs of a minute; else the largest that leaves room for one
    of the full context, which the talker insists on.
    """
    room = gpu_bytes * (1 - FREE_SHARE)
    found: Plan | None = None
    for batch in _BATCHES if acoustic else (0,):
        other = (
            flow_process_bytes(batch, precision=precision) + vocoder_process_bytes(batch) if batch else 0.0
        )
        if not talker:
            if other <= room:
                return Plan("dit, vocoder", precision, batch, 0, 0, other)
            continue
        stages = "all" if acoustic else "talker"
        songs, pages = _songs_and_pages(room - other)
        if not songs:
            continue
        used = other + talker_bytes(songs) + (pages + 1) * page_bytes()
        candidate = Plan(stages, precision if acoustic else "-", batch, songs, pages, used)
        if songs >= _ENOUGH_SONGS:
            return candidate
        found = found or candidate
    return found


def _songs_and_pages(room: float) -> tuple[int, int]:
    """Places and pages that fit beside the talker; places for as many songs of a minute as the pages hold."""
    pages = int((room - talker_bytes(MOST_SONGS)) // page_bytes()) - 1
    largest = song_pages(CONTEXT_TOKENS, TalkerSettings().kv_page_tokens)
    if pages < largest:
        return 0, 0
    pages = min(pages, MOST_SONGS * largest)
    return min(MOST_SONGS, pages // pages_of(60)), pages


# ------------------------------------------------------------------ in words


def arithmetic() -> Iterator[str]:
    """How the numbers come about."""
    config = official.CONFIGS["language_model"]
    page_tokens = TalkerSettings().kv_page_tokens
    yield "Weights as served"
    for folder, precision in (
        ("language_model", "bfloat16"),
        ("rvq_depth_decoder", "bfloat16"),
        ("condition_encoder", "float32"),
        ("transformer", "tf32"),
        ("transformer", "float16"),
        ("vocoder", "float32"),
    ):
        values = sum(tensor.numel() for tensor in network(folder).parameters())
        size = weight_bytes(folder, precision=precision)
        yield f"  {folder:<18} {precision:<9} {values:>13,} values  {size / GB:6.2f} GB"
    kept = network("language_model").lm_head.weight
    unused = (config["vocab_size"] - kept.shape[0]) * kept.shape[1] * _DTYPE.itemsize
    yield (
        f"  Of the head, {kept.shape[0]:,} of {config['vocab_size']:,} rows are kept: "
        f"{unused / GB:.2f} GB less. In float16, only products in blocks are."
    )
    yield "Key-value pool"
    yield (
        f"  a token of a row: {config['num_hidden_layers']} layers x 2 x {config['num_key_value_heads']} "
        f"heads x {config['head_dim']} x {_DTYPE.itemsize} B = {page_bytes() // page_tokens / 1024:g} KiB; "
        f"a page of {page_tokens} tokens: {page_bytes() / 1e6:.1f} MB"
    )
    for seconds in SONG_LENGTHS_S:
        tokens = PROMPT_TOKENS + seconds * FRAME_RATE_HZ + CONTEXT_RESERVE_TOKENS
        yield (
            f"  a song of {seconds} s: 2 rows x ceil(({PROMPT_TOKENS} + {seconds * FRAME_RATE_HZ} + "
            f"{CONTEXT_RESERVE_TOKENS} = {tokens}) / {page_tokens}) = {pages_of(seconds)} pages, "
            f"{pages_of(seconds) * page_bytes() / GB:.2f} GB"
        )
    ring = ring_frames(TalkerSettings().run_ahead_windows)
    yield "Song state"
    yield (
        f"  a place: ring of {ring} frames x {CODEBOOKS} x {config['hidden_size']} x {_DTYPE.itemsize} B, "
        f"with codes and tables {song_state_bytes() / 1e6:.1f} MB"
    )
    yield f"Activations, needed {ACTIVATION_COPIES} times: in the graphs' pool, and kept since warm-up"
    yield f"  talker, a prompt chunk: {prefill_bytes() / GB:.2f} GB"
    for precision in PRECISIONS:
        yield f"  dit, a window, {precision}: {flow_bytes(1, precision=precision) / GB:.2f} GB"
    yield f"  vocoder, a window: {vocoder_bytes(1) / GB:.2f} GB"
    yield (
        f"Allowances, not measured: {CONTEXT_BYTES / GB:g} GB of CUDA context and libraries for each of the "
        f"three processes; {FREE_SHARE:.0%} of the GPU stays free"
    )


def plans(gpu: int) -> list[Plan]:
    """The ways to use one GPU of this size; where not all stages fit on one, those for two."""
    size = GPUS[gpu]
    whole = [found for precision in PRECISIONS if (found := plan(size, precision=precision))]
    if whole:
        return whole
    split = [plan(size, precision="-", acoustic=False)]
    split += [plan(size, precision=precision, talker=False) for precision in PRECISIONS]
    return [found for found in split if found]


def lines(gpus: Sequence[int]) -> Iterator[str]:
    """Arithmetic, table, and the settings of its rows."""
    yield from arithmetic()
    yield ""
    found = [(gpu, each) for gpu in gpus for each in plans(gpu)]
    header = ("#", "GPU", "stages", "DiT", "windows", "places", "KV GB", "30 s", "60 s", "6 min", "used GB")
    rows = [header, tuple("-" * len(name) for name in header)]
    for number, (gpu, each) in enumerate(found, start=1):
        pool = ["-"] * 5
        if each.songs:
            at_once = (str(each.pages // pages_of(seconds)) for seconds in SONG_LENGTHS_S)
            pool = [str(each.songs), f"{each.pages * page_bytes() / GB:.1f}", *at_once]
        used = f"{each.used_bytes / GB:.1f} of {GPUS[gpu] / GB:.1f}"
        rows.append(
            (str(number), f"{gpu} GB", each.stages, each.precision, str(each.batch or "-"), *pool, used)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield "windows: computed at once at most. 30 s, 60 s, 6 min: songs whose pages fit at once; others wait."
    yield "Settings, as environment of ./build.sh serve:"
    for number, (_, each) in enumerate(found, start=1):
        yield f"  {number}  {each.settings}"
    if any(each.stages != "all" for _, each in found):
        yield "Where one GPU can't hold all, talker gets one, and dit and vocoder another: docs/scaling.md."
    yield "All of this is computed; nothing was measured."


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m python_backend_models.memory_plan")
    parser.add_argument("--gpu", type=int, choices=GPUS, action="append", help="GB; default: all of these")
    print("\n".join(lines(parser.parse_args(argv).gpu or list(GPUS))))


if __name__ == "__main__":
    main()
