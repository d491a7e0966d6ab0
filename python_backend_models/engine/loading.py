"""From a stage's settings and a checkpoint folder to its engine."""

import logging
import time

import torch

from python_backend_models import checkpoint
from python_backend_models.contract import (
    CONTEXT_TOKENS,
    FRAME_RATE_HZ,
    MAX_SONG_FRAMES,
)
from python_backend_models.engine.acoustic import BATCH_SIZES, FlowEngine, VocoderEngine
from python_backend_models.engine.kv_cache import bytes_per_page, pages_for
from python_backend_models.engine.runner import FrameRunner
from python_backend_models.engine.talker import TalkerEngine, ring_frames
from python_backend_models.settings import DitSettings, SettingsError, TalkerSettings, VocoderSettings

_LOG = logging.getLogger(__name__)
_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
_ROWS = 2
_EXAMPLE_PROMPT_TOKENS = 300


def load_talker(settings: TalkerSettings, device: torch.device) -> TalkerEngine:
    """Backbone, depth decoder and page pool on the device.

    Raises:
        CheckpointError: see `checkpoint.load`.
        SettingsError: the pool can't hold one song of the full context.
    """
    started_s = time.monotonic()
    root, dtype = settings.checkpoint_path, _DTYPES[settings.precision]
    backbone = checkpoint.load(root, checkpoint.BACKBONE, device=device, dtype=dtype)
    depth = checkpoint.load(root, checkpoint.DEPTH_DECODER, device=device, dtype=dtype)
    runner = FrameRunner(
        backbone,
        depth,
        slots=settings.live_songs,
        pages=pool_pages(settings, backbone.config, backbone.model.embed_tokens.weight.dtype, device),
        page_tokens=settings.kv_page_tokens,
        ring_frames=ring_frames(settings.run_ahead_windows),
        graphs=settings.graphs,
    )
    runner.capture()
    pages, page_tokens = runner.pool.pages, settings.kv_page_tokens
    _LOG.info(
        "talker: loaded on %s in %.1f s; %s weights; %d pages of %d tokens, i.e. %d songs of 30 s or %d of "
        "six minutes at once (prompts of %d tokens), with places for %d",
        device,
        time.monotonic() - started_s,
        str(backbone.model.embed_tokens.weight.dtype).removeprefix("torch."),
        pages,
        page_tokens,
        pages // song_pages(_EXAMPLE_PROMPT_TOKENS + 30 * FRAME_RATE_HZ, page_tokens),
        pages // song_pages(_EXAMPLE_PROMPT_TOKENS + MAX_SONG_FRAMES, page_tokens),
        _EXAMPLE_PROMPT_TOKENS,
        settings.live_songs,
    )
    return TalkerEngine(
        runner,
        run_ahead_windows=settings.run_ahead_windows,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        read_interval_frames=settings.read_interval_frames if device.type == "cuda" else 1,
    )


def song_pages(tokens: int, page_tokens: int) -> int:
    """Pages that both rows of a song of this many tokens take, unshared."""
    return _ROWS * pages_for(tokens, page_tokens)


def pool_pages(settings: TalkerSettings, config: dict, dtype: torch.dtype, device: torch.device) -> int:
    """Size of the page pool: what was set, or what memory allows and the places can use.

    Raises:
        SettingsError: it couldn't hold one song of the full context.
    """
    page_tokens = settings.kv_page_tokens
    largest = song_pages(CONTEXT_TOKENS, page_tokens)
    page_bytes = bytes_per_page(config, page_tokens, dtype)
    if settings.kv_tokens:
        pages, source = pages_for(settings.kv_tokens, page_tokens), f"kv_tokens is {settings.kv_tokens}"
    else:
        free = free_memory_bytes(device)
        pages = int(free * settings.kv_memory_fraction) // page_bytes
        source = f"{free / 2**30:.1f} GiB are free on {device}"
    if pages < largest:
        raise SettingsError(
            f"talker: the key-value pool must hold a song of {CONTEXT_TOKENS} tokens in two rows, "
            f"{largest} pages of {page_bytes / 2**20:.1f} MiB, but {source}: {pages} pages. "
            "Set kv_tokens or kv_memory_fraction higher, or free memory"
        )
    return pages if settings.kv_tokens else min(pages, settings.live_songs * largest)


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or the system's available memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123  not a file in a project
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def batch_sizes(device: torch.device, most: int) -> tuple[int, ...]:
    """How many windows an engine on this device computes together: its usual sizes, none above `most`."""
    return tuple(size for size in BATCH_SIZES[device.type] if size <= most)


def load_flow(settings: DitSettings, device: torch.device) -> FlowEngine:
    """Condition encoder and flow transformer on the device.

    Raises:
        CheckpointError: see `checkpoint.load`.
        ValueError: the device can't honour the precision or the attention kernel.
    """
    root = settings.checkpoint_path
    return FlowEngine(
        checkpoint.load(root, checkpoint.CONDITION_ENCODER, device=device),
        checkpoint.load(root, checkpoint.FLOW_TRANSFORMER, device=device),
        device=device,
        precision=settings.precision,
        attention=settings.attention,
        graphs=settings.graphs == "on",
        batch_sizes=batch_sizes(device, settings.batch_windows),
        compiled=settings.compiled == "on",
    )


def load_vocoder(settings: VocoderSettings, device: torch.device) -> VocoderEngine:
    """The vocoder on the device; raises as `load_flow`."""
    return VocoderEngine(
        checkpoint.load(settings.checkpoint_path, checkpoint.VOCODER, device=device),
        device=device,
        precision=settings.precision,
        graphs=settings.graphs == "on",
        batch_sizes=batch_sizes(device, settings.batch_windows),
        compiled=settings.compiled == "on",
    )
