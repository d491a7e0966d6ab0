"""Choices of the acoustic stages that only a GPU can decide: cuDNN for the convolutions, and compilation.

Part of `bench gpu`. Every row is one way to compute the same full window, without CUDA graphs where a graph
would freeze the choice at load.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from python_backend_models.chunking import window_latents, windows
from python_backend_models.contract import WINDOW_FRAMES
from python_backend_models.engine.acoustic import FlowEngine, FlowWindow, VocoderEngine
from python_backend_models.networks.condition_encoder import ConditionEncoder
from python_backend_models.networks.flow_transformer import FlowTransformer
from python_backend_models.networks.vocoder import Vocoder

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

PRECISION = "float16"
BATCHES = (1, 8)
# cuDNN on or off, and whether it tries its algorithms for each shape or trusts its rules.
CUDNN = {"cuDNN by its rules": (True, False), "cuDNN, searched": (True, True), "no cuDNN": (False, False)}
_COMPILE_S, _ROW_S = 60.0, 8.0


@contextlib.contextmanager
def cudnn(enabled: bool, benchmark: bool) -> Iterator[None]:
    """Set cuDNN's switches for a while."""
    switches = torch.backends.cudnn
    before = switches.enabled, switches.benchmark
    switches.enabled, switches.benchmark = enabled, benchmark
    try:
        yield
    finally:
        switches.enabled, switches.benchmark = before


def choices(bench: "Bench") -> list[dict[str, Any]]:
    """Seconds per full window of each way, by batch."""
    rows: list[dict[str, Any]] = []
    for compiled in (False, True):
        rows += vocoder_rows(bench, compiled=compiled)
        if compiled:
            rows += flow_rows(bench)
    return rows


def vocoder_rows(bench: "Bench", *, compiled: bool) -> list[dict[str, Any]]:
    """The vocoder: each cuDNN choice, or compiled."""
    what = "vocoder, snakes compiled" if compiled else "vocoder"
    if not bench.affords(what, _COMPILE_S if compiled else _ROW_S):
        return []
    engine = VocoderEngine(
        bench.random(Vocoder, "vocoder", torch.float32),
        device=bench.device,
        precision=PRECISION,
        graphs=False,
        batch_sizes=(8, 4, 2, 1),
        compiled=compiled,
    )
    channels = bench.configs["vocoder"]["latent_channels"]
    latent = torch.randn(channels, window_latents(WINDOW_FRAMES), device=bench.device)
    crops = windows(2 * WINDOW_FRAMES)[1].crop_samples
    rows = []
    for name, switches in list(CUDNN.items())[: 1 if compiled else None]:
        with cudnn(*switches):
            rows += measured(
                bench, f"{what}, {name}", lambda n: sound(engine.decode([latent] * n, [crops] * n))
            )
    return rows


def flow_rows(bench: "Bench") -> list[dict[str, Any]]:
    """The flow transformer, compiled and in CUDA graphs; without compilation it is in the main table."""
    what = "flow, compiled"
    if not bench.affords(what, 2 * _COMPILE_S):
        return []
    engine = FlowEngine(
        bench.random(ConditionEncoder, "condition_encoder", torch.float32),
        bench.random(FlowTransformer, "transformer", torch.float32),
        device=bench.device,
        precision=PRECISION,
        batch_sizes=(8, 1),
        compiled=True,
    )
    width = bench.configs["condition_encoder"]["condition_hidden_dim"] * 8
    hidden = torch.randn(WINDOW_FRAMES, width, device=bench.device)
    given = [FlowWindow(hidden, seed, 0, None) for seed in range(max(BATCHES))]
    return measured(bench, what, lambda n: sound(engine.solve(given[:n])))


def sound(results: list[Any]) -> list[Any]:
    """The results, none of which may be an error.

    Raises:
        ValueError, ArithmeticError: the one among the results.
    """
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def measured(bench: "Bench", what: str, run: Any) -> list[dict[str, Any]]:
    """A row for each batch size that there is time for."""
    return [
        {
            "what": what,
            "precision": PRECISION,
            "batch": batch,
            "s_per_window": bench.seconds(lambda n=batch: run(n), repeats=2) / batch,
        }
        for batch in BATCHES
        if bench.affords(f"{what}, batch {batch}", _ROW_S)
    ]
