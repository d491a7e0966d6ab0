"""The frame step as a graph, tried without a GPU: see tests/capture.py."""

import logging

import pytest
import torch

from python_backend_models.engine.frame_step import DepthLoop
from python_backend_models.engine.runner import FrameRunner, lane_buckets
from python_backend_models.engine.talker import TalkerEngine, WindowResult, ring_frames
from python_backend_models.networks.backbone import Attend
from tests.capture import ForbiddenInGraphs, TraceRecorder
from tests.small_models import small_backbone, small_depth_decoder
from tests.unit.test_talker import plan

SLOTS = 6


def make_runner(*, graphs: str = "off", recorder: TraceRecorder | None = None) -> FrameRunner:
    """A runner with networks of its own: those that aren't replayed are packed, and can't be traced then."""
    return FrameRunner(
        small_backbone(num_hidden_layers=1),
        small_depth_decoder(num_layers=1),
        slots=SLOTS,
        pages=240,
        page_tokens=16,
        ring_frames=ring_frames(1),
        graphs=graphs,
        recorder=recorder,
    )


def busy_hour(engine: TalkerEngine) -> dict[int, WindowResult]:
    """Songs of 5 to 50 frames that join and leave at different frames, so that every bucket is replayed."""
    for key in range(14):
        engine.admit(key, plan(key, tokens=12 + key, max_frames=5 + 7 * (key % 5) + key))
        engine.request_window(key)
    results: dict[int, WindowResult] = {}
    steps = 0
    while len(results) < 14:
        for key, result in engine.step()[0]:
            assert isinstance(result, WindowResult)
            results[key] = result
            engine.release(key)
        steps += 1
    assert steps >= 50
    return results


@pytest.fixture(scope="module")
def eager_songs() -> dict[int, WindowResult]:
    return busy_hour(TalkerEngine(make_runner()))


def test_buckets() -> None:
    assert lane_buckets(1) == (1,)
    assert lane_buckets(6) == (1, 2, 4, 6)
    assert lane_buckets(64) == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("graphs", ["frame", "depth"])
def test_replayed_songs_equal_eager_ones(graphs: str, eager_songs: dict[int, WindowResult]) -> None:
    """Whatever a step took from the host when it was recorded would be wrong in the replays."""
    recorder = TraceRecorder()
    runner = make_runner(graphs=graphs, recorder=recorder)
    runner.capture()
    assert runner.graphs == graphs
    recorder.replays = 0
    seen_lanes, steps = set(), 0
    step = runner.step

    def counting_step(slots, rows):
        nonlocal steps
        steps += 1
        seen_lanes.add(len(slots))
        step(slots, rows)

    runner.step = counting_step
    replayed = busy_hour(TalkerEngine(runner))
    assert seen_lanes == set(range(1, SLOTS + 1))
    assert recorder.replays == steps >= 50
    # Padding that grew with every step would soon attend over a whole context.
    assert runner.state.tokens[runner.state.dummy_slot] == 0
    for key, eager in eager_songs.items():
        assert torch.equal(replayed[key].codes, eager.codes), key
        torch.testing.assert_close(replayed[key].hidden, eager.hidden, rtol=0, atol=2e-5)


@pytest.mark.parametrize("lanes", lane_buckets(SLOTS))
def test_rows_of_the_check_write_to_places_of_their_own(lanes: int) -> None:
    """Two rows in one place: which one stays there is up to the device, and may differ between two runs."""
    runner = make_runner(graphs="frame", recorder=TraceRecorder())
    runner.capture()
    attention, written = runner._step.attention, []

    def seen(slots: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> Attend:
        written.append(slots.tolist())
        return attention(slots, tables, lengths)

    runner._step.attention = seen
    with torch.inference_mode():
        assert runner._replay_difference(lanes) <= 1e-5
    (rows,) = written
    assert len(set(rows)) == len(rows) == 2 * lanes
    assert runner.pool.free_pages == runner.pool.pages


@pytest.mark.parametrize("lanes", lane_buckets(SLOTS))
def test_a_step_does_nothing_that_a_graph_can_not_hold(lanes: int) -> None:
    runner = make_runner(graphs="frame", recorder=TraceRecorder())
    slots = runner._lanes(range(min(lanes, SLOTS)), lanes)
    inputs = runner._depth_inputs(lanes)
    with torch.inference_mode(), ForbiddenInGraphs():
        runner._frame_function(slots)
        DepthLoop(runner.backbone, runner.depth)(*inputs)


def test_the_forbidding_mode_forbids() -> None:
    with pytest.raises(AssertionError, match="graph"), ForbiddenInGraphs():
        torch.ones(3).sum().item()


@pytest.mark.parametrize("graphs", ["frame", "depth"])
def test_a_replay_that_differs_turns_graphs_off(graphs: str, caplog: pytest.LogCaptureFixture) -> None:
    class WrongRecorder(TraceRecorder):
        """Replays, then spoils what came of it."""

        def __call__(self, function, inputs, warm_up):
            replay, output = super().__call__(function, inputs, warm_up)

            def wrong() -> None:
                replay()
                runner.state.hidden.add_(1)
                if isinstance(output, tuple):
                    output[1].add_(1)

            return wrong, output

    runner = make_runner(graphs=graphs, recorder=WrongRecorder())
    with caplog.at_level(logging.WARNING):
        runner.capture()
    assert runner.graphs == "off"
    assert "differs from the eager one by" in caplog.text
    engine = TalkerEngine(runner)
    engine.admit(1, plan(1, max_frames=5))
    engine.request_window(1)
    while not (delivered := engine.step()[0]):
        pass
    assert isinstance(delivered[0][1], WindowResult)
