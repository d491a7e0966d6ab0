"""Graph recording of the acoustic engines, tried without a GPU."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from python_backend_models.engine import acoustic
from python_backend_models.engine.acoustic import FlowEngine, FlowResult, FlowWindow, VocoderEngine
from python_backend_models.engine.graphs import GraphedFunction, Recording, TensorFunction
from tests.acoustic_models import make_acoustic
from tests.capture import ForbiddenInGraphs, TraceRecorder


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> tuple[FlowEngine, FlowEngine, TraceRecorder]:
    """An eager engine and one whose solve of full windows is recorded for 1 and 2 windows."""
    eager, recorded = (make_acoustic(seed=21) for _ in range(2))
    plain = FlowEngine(eager.encoder, eager.transformer, device="cpu", steps=3)
    engine = FlowEngine(recorded.encoder, recorded.transformer, device="cpu", steps=3, batch_sizes=(2, 1))
    recorder = TraceRecorder()
    monkeypatch.setattr(engine, "_integrate", GraphedFunction(engine._euler, recorder))
    engine._record_full_windows()
    assert engine._integrate.recorded == 2
    return plain, engine, recorder


def window(frames: int, *, seed: int, **rest: Any) -> FlowWindow:
    hidden = torch.randn(frames, 32, generator=torch.Generator().manual_seed(seed))
    return FlowWindow(hidden, seed, rest.get("index", 0), rest.get("carry"))


def test_a_replayed_solve_equals_the_eager_one(
    engines: tuple[FlowEngine, FlowEngine, TraceRecorder],
) -> None:
    plain, engine, recorder = engines
    (first,) = plain.solve([window(200, seed=1)])
    assert isinstance(first, FlowResult)
    windows = [
        window(200, seed=1),
        window(200, seed=2, index=1, carry=first.carry),
        window(200, seed=3),
        window(90, seed=4),  # not a full window: eager
    ]
    for given in (windows, windows[::-1], windows[1:2]):
        for got, expected in zip(engine.solve(given), plain.solve(given), strict=True):
            assert isinstance(got, FlowResult)
            torch.testing.assert_close(got.latent, expected.latent, atol=1e-6, rtol=0)
            torch.testing.assert_close(got.carry.latent, expected.carry.latent, atol=1e-6, rtol=0)
    assert recorder.replays == 2 + 2 + 1


def test_a_result_outlives_the_next_replay(engines: tuple[FlowEngine, FlowEngine, TraceRecorder]) -> None:
    _, engine, _ = engines
    (first,) = engine.solve([window(200, seed=1)])
    kept = first.latent.clone()
    engine.solve([window(200, seed=2)])
    assert torch.equal(first.latent, kept)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_solve_holds_nothing_a_graph_forbids(precision: str) -> None:
    networks = make_acoustic(seed=22)
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=3, precision=precision)
    generator = torch.Generator().manual_seed(1)
    x, shares, prompt = (
        torch.randn(size, generator=generator) for size in ((2, 689, 4), (2, 689, 16), (2, 172, 4))
    )
    pinned = torch.tensor([False, True])[:, None, None].expand(2, 172, 1)
    engine._rotary_tables(689)
    with torch.inference_mode(), ForbiddenInGraphs():
        engine._euler(x, shares, prompt, pinned)


class Kernels(TorchDispatchMode):
    """Which operations ran, on which shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[torch.Size, ...]]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self.seen.add((str(func), tuple(each.shape for each in tensors)))
        return func(*args, **(kwargs or {}))


def test_the_warm_up_of_a_solve_runs_all_its_kernels_once() -> None:
    networks = make_acoustic(seed=25)
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=7)
    latents = torch.zeros(2, 689, 4), torch.zeros(2, 689, 16), torch.zeros(2, 172, 4)
    pinned = torch.ones(2, 172, 1, dtype=torch.bool)
    engine._rotary_tables(689)
    sets = []
    for run in (engine._first_step, engine._euler):
        with torch.inference_mode(), Kernels() as kernels:
            run(*[each.clone() for each in latents], pinned)
        sets.append(kernels.seen)
    assert sets[0] == sets[1]
    assert len(sets[0]) > 10


def test_a_function_is_warmed_up_by_what_was_given_for_it() -> None:
    warmed = []
    function = GraphedFunction(doubled, TraceRecorder(), warm_up=lambda x: warmed.append(x.shape) or x)
    assert function.record(torch.zeros(3))
    assert warmed == [torch.Size([3])]
    assert function(torch.ones(3)).tolist() == [2, 2, 2]


def test_the_watch_on_forbidden_operations_bites() -> None:
    x = torch.ones(3)
    for forbidden in (
        lambda: x.sum().item(),
        lambda: x.nonzero(),
        lambda: x.to(torch.device("meta")),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: x[x > 0],
    ):
        with pytest.raises(AssertionError, match="CUDA graph"), ForbiddenInGraphs():
            forbidden()


def test_vocoder_replays_the_lengths_of_full_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded = (VocoderEngine(make_acoustic(seed=23).vocoder, device="cpu") for _ in range(2))
    recorder = TraceRecorder()
    monkeypatch.setattr(recorded, "_forward", GraphedFunction(recorded._vocoder.forward, recorder))
    recorded._record_full_windows()
    generator = torch.Generator().manual_seed(2)
    latents = [torch.randn(4, length, generator=generator) for length in (689, 689, 347)]
    crops = [(0, 258 * 512), (86 * 512, 258 * 512), (86 * 512, 0)]
    for got, expected in zip(recorded.decode(latents, crops), plain.decode(latents, crops), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    assert recorder.replays == 2
    with torch.inference_mode(), ForbiddenInGraphs():
        plain._vocoder(latents[2][None])


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_changed_shape_or_type_is_refused() -> None:
    replay, output = TraceRecorder()(doubled, [torch.zeros(3)], doubled)
    recording = Recording([torch.zeros(3)], output, replay)
    for changed in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="recorded for"):
            recording(changed)


def test_other_shapes_run_eagerly() -> None:
    recorder = TraceRecorder()
    function = GraphedFunction(doubled, recorder)
    assert function.record(torch.zeros(3))
    assert function.record(torch.zeros(3))
    assert function(torch.ones(4)).tolist() == [2, 2, 2, 2]
    assert recorder.replays == 0
    assert function(torch.ones(3)).tolist() == [2, 2, 2]
    assert (recorder.replays, function.recorded) == (1, 1)


def test_a_failed_recording_is_logged_and_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    def failing(
        _function: TensorFunction, _inputs: Sequence[Tensor], _warm_up: TensorFunction
    ) -> tuple[Callable[[], object], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    function = GraphedFunction(doubled, failing)
    with caplog.at_level(logging.WARNING):
        assert not function.record(torch.zeros(3))
    assert "not permitted when stream is capturing" in caplog.text
    assert function(torch.ones(3)).tolist() == [2, 2, 2]


def test_without_a_recorder_everything_is_eager() -> None:
    function = GraphedFunction(doubled, None)
    assert not function.record(torch.zeros(3))
    assert function(torch.ones(3)).tolist() == [2, 2, 2]


def test_graphs_are_ignored_on_a_cpu() -> None:
    networks = make_acoustic(seed=24)
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", graphs=True)
    assert engine._integrate.recorded == 0
    assert isinstance(engine._integrate, acoustic.GraphedFunction)
