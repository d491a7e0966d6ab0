"""Reading the stop flags while the device works on: what CUDA does, with copies that come late on purpose."""

import pytest
import torch
from torch import Tensor

from python_backend_models.engine.events import EventReader
from python_backend_models.engine.talker import EmptySongError, Phase, TalkerEngine
from tests.unit.test_talker import collect, joined, make_engine, plan, solo, stop_backbone

NEVER_BY_ITSELF = 10**9


class LateCopy:
    """A copy that holds what was there when it was started, and is done once it was asked `late` times."""

    def __init__(self, source: Tensor, *, late: int) -> None:
        self._source, self._late = source, late
        self._snapshot: Tensor | None = None
        self._asked = self.started = self.waits = 0

    def start(self) -> None:
        self._snapshot = self._source.clone()
        self._asked = 0
        self.started += 1

    def done(self) -> bool:
        self._asked += 1
        return self._asked > self._late

    def wait(self) -> Tensor:
        assert self._snapshot is not None
        self.waits += 1
        return self._snapshot


def with_late_copies(engine: TalkerEngine, *, late: int, interval_frames: int = 4) -> LateCopy:
    events = engine.runner.state.events
    copy = LateCopy(events, late=late)
    engine._events = EventReader(events, interval_frames=interval_frames, copy=copy)
    return copy


def test_a_copy_starts_every_few_frames_and_is_waited_for_when_it_is_late() -> None:
    copy = LateCopy(torch.zeros(2, 2, dtype=torch.int32), late=NEVER_BY_ITSELF)
    reader = EventReader(copy._source, interval_frames=4, copy=copy)
    reads, started = [], []
    for frame in range(1, 21):
        reads.append(bool(reader.advance({5: (0, frame)}, urgent=False)))
        started.append(copy.started)
    # Started at 4, waited for at 4 + 2 * 4, when the next one starts.
    assert started == [0, 0, 0, *[1] * 8, *[2] * 8, 3]
    assert [frame for frame, read in enumerate(reads, 1) if read] == [12, 20]


def test_a_read_is_of_the_frame_at_which_it_was_started() -> None:
    events = torch.full((2, 2), 99, dtype=torch.int32)
    copy = LateCopy(events, late=2)
    reader = EventReader(events, interval_frames=1, copy=copy)
    assert reader.advance({5: (1, 10)}, urgent=False) == {}
    events[1] = 7
    assert reader.advance({5: (1, 11)}, urgent=True) == {5: (10, 99, 99)}
    assert reader.advance({5: (1, 12)}, urgent=True) == {5: (11, 7, 7)}


@pytest.mark.parametrize("late", [0, 3, NEVER_BY_ITSELF])
def test_songs_end_at_their_exact_frame_however_late_it_is_known(late: int) -> None:
    """A song goes on for some frames after its stop; what was drawn after it is not handed out."""
    backbone = stop_backbone(0.9)
    engine = make_engine(backbone=backbone, slots=3)
    copy = with_late_copies(engine, late=late)
    plans = {seed: plan(seed, max_frames=120) for seed in range(8)}
    for key, song in plans.items():
        engine.admit(key, song)
    songs = collect(engine, list(plans))
    for key, song in plans.items():
        codes, hidden, reason = solo(song, backbone=backbone)
        if not len(codes):
            assert isinstance(songs[key], EmptySongError)
            continue
        got_codes, got_hidden = joined(songs[key])
        assert torch.equal(got_codes, codes), key
        torch.testing.assert_close(got_hidden, hidden, rtol=0, atol=1e-5)
        assert songs[key][-1].finish_reason == reason
    assert copy.waits >= len(plans)
    assert engine.census.slots_free == 3


@pytest.mark.parametrize("late", [0, NEVER_BY_ITSELF])
def test_who_waits_for_pages_is_started_by_the_end_that_frees_them(late: int) -> None:
    """Nobody asks for anything when a song that runs ahead comes to its end: the engine goes on by itself."""
    first, second = plan(1, max_frames=250), plan(2, max_frames=250)
    engine = make_engine(pages=80, page_tokens=8)
    with_late_copies(engine, late=late)
    for key, song in ((1, first), (2, second)):
        engine.admit(key, song)
        engine.request_window(key)
    more, delivered = True, []
    while more:
        deliveries, more = engine.step()
        delivered += [key for key, _ in deliveries]
    assert delivered == [1, 2]
    assert {song.phase for song in engine._songs.values()} == {Phase.FINISHED}
