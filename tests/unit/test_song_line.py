"""The line of songs: order, limits, exactly one end for every song, and calls that never return."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from python_backend_models.orchestrator import SongCancelledError, SongReport, UnavailableError
from python_backend_models.song_line import PROBE_ANSWER, LineCensus, SongLine
from tests.unit.test_orchestrator import FakeListener, FakeStages, job

MakeLine = Callable[..., SongLine]


@pytest.fixture
def make_line() -> Iterator[MakeLine]:
    lines: list[SongLine] = []

    def make(**options: object) -> SongLine:
        lines.append(SongLine(**({"live_songs": 1, "waiting_songs": 10} | options)))
        return lines[-1]

    yield make
    for line in lines:
        line.close(timeout_s=0.5)


class Gate:
    """Stops chosen calls until it is opened."""

    def __init__(self, *calls: str) -> None:
        self.calls, self.opened, self.reached = calls, threading.Event(), threading.Semaphore(0)

    def __call__(self, call: str) -> None:
        if call in self.calls:
            self.reached.release()
            assert self.opened.wait(30)

    def wait(self, songs: int = 1) -> None:
        for _ in range(songs):
            assert self.reached.acquire(timeout=120)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def counts(line: SongLine) -> tuple[int, int]:
    return line.census.live, line.census.waiting


def submit(
    line: SongLine, gate: Callable[[str], None] = lambda call: None, **options: int
) -> tuple[FakeStages, FakeListener]:
    stages, listener = FakeStages(before=gate), FakeListener(**options)
    line.submit(job(frames=1), stages, listener)
    return stages, listener


def song_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "song"}


def test_songs_start_in_the_order_in_which_they_came(make_line: MakeLine) -> None:
    started: list[int] = []
    gate, line = Gate("start"), make_line(live_songs=1)
    listeners = []
    for number in range(8):

        def begin(call: str, number: int = number) -> None:
            if call == "start":
                started.append(number)
            gate(call)

        listeners.append(submit(line, begin)[1])
    gate.wait()
    assert started == [0]
    assert counts(line) == (1, 7)
    gate.opened.set()
    until(lambda: all(listener.closed for listener in listeners))
    assert started == list(range(8))
    assert [listener.closed for listener in listeners] == [[None]] * 8
    assert counts(line) == (0, 0)


def test_more_than_may_wait_are_refused_with_the_numbers(make_line: MakeLine) -> None:
    gate, line = Gate("start"), make_line(live_songs=2, waiting_songs=3)
    accepted = [submit(line, gate) for _ in range(5)]
    gate.wait(2)
    listener = FakeListener()
    with pytest.raises(UnavailableError, match=r"full.*\(2 songs run and 3 wait\)"):
        line.submit(job(), FakeStages(), listener)
    assert listener.closed == []
    gate.opened.set()
    until(lambda: all(each.closed for _, each in accepted))
    submit(line)


def test_no_waiting_allowed_still_lets_songs_run(make_line: MakeLine) -> None:
    gate, line = Gate("start"), make_line(live_songs=2, waiting_songs=0)
    for _ in range(2):
        submit(line, gate)  # at once: the places are free, though no thread has taken a song yet
    with pytest.raises(UnavailableError):
        submit(line)
    gate.opened.set()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnavailableError("dit: gone"), "unavailable"),
        (SongCancelledError("cancelled"), "cancelled"),
        (ValueError("bug"), "failed"),
    ],
)
def test_a_song_that_fails_ends_once_and_the_next_one_is_fine(
    make_line: MakeLine, error: Exception, outcome: str
) -> None:
    reports: list[SongReport] = []
    line = make_line(on_end=reports.append)

    def explode(call: str) -> None:
        if call == "solve":
            raise error

    stages, listener = submit(line, explode)
    until(lambda: len(reports) == 1)
    assert reports[0].outcome == outcome
    assert stages.calls == ["start", "solve", "end"]
    (closed,) = listener.closed
    assert type(closed) is type(error)
    assert str(error) in str(closed)
    if outcome == "unavailable":
        assert "songs run" in str(closed)
    _, after = submit(line)
    until(lambda: after.closed == [None])


def test_a_listener_that_fails_to_close_costs_no_place(make_line: MakeLine) -> None:
    class Broken(FakeListener):
        def close(self, error: Exception | None) -> None:
            super().close(error)
            raise RuntimeError("gone")

    reports: list[SongReport] = []
    line = make_line(on_end=reports.append)
    for _ in range(3):
        line.submit(job(frames=1), FakeStages(), Broken())
    until(lambda: len(reports) == 3)
    assert counts(line) == (0, 0)


def test_a_song_that_cannot_be_counted_ends_all_the_same_and_costs_no_place(make_line: MakeLine) -> None:
    def broken(report: SongReport) -> None:
        raise RuntimeError("no numbers")

    line = make_line(on_end=broken)
    for _ in range(3):
        _, listener = submit(line)
        until(lambda listener=listener: listener.closed == [None])
    assert counts(line) == (0, 0)


def test_a_song_is_counted_before_its_listener_hears_of_the_end(make_line: MakeLine) -> None:
    heard: list[str] = []

    class Hearing(FakeListener):
        def close(self, error: Exception | None) -> None:
            heard.append("closed")
            super().close(error)

    line = make_line(on_end=lambda report: heard.append(report.outcome))
    line.submit(job(frames=1), FakeStages(), Hearing())
    until(lambda: len(heard) == 2)
    assert heard == ["done", "closed"]


def test_a_waiting_song_whose_client_left_goes_before_its_turn(make_line: MakeLine) -> None:
    gate, line = Gate("start"), make_line()
    submit(line, gate)
    gate.wait()
    stages, listener = submit(line, gone_after=0)
    until(lambda: listener.closed)
    assert isinstance(listener.closed[0], SongCancelledError)
    assert stages.calls == []
    assert counts(line) == (1, 0)
    gate.opened.set()


# ------------------------------------------------------------------ lost calls


def test_a_call_to_a_stage_that_died_is_given_up_and_its_place_is_free_again(make_line: MakeLine) -> None:
    died: dict[str, float] = {}
    lost: list[str] = []
    reports: list[SongReport] = []
    gate = Gate("solve")
    others = song_threads()  # of earlier tests' lines, some still ending
    line = make_line(died_s=died.get, on_lost=lost.append, on_end=reports.append)
    stages, listener = submit(line, gate)
    gate.wait()
    time.sleep(0.05)
    died["dit"] = time.monotonic()
    until(lambda: listener.closed)
    (error,) = listener.closed
    assert isinstance(error, UnavailableError)
    assert "dit: its process died" in str(error)
    assert lost == ["dit"]
    until(lambda: stages.calls == ["start", "solve", "end"])
    # The place works while the lost thread still hangs.
    _, after = submit(line)
    until(lambda: after.closed == [None])
    assert len(song_threads() - others) == 2
    gate.opened.set()  # the call returns after all: nobody hears of it twice, and the thread goes
    until(lambda: len(song_threads() - others) == 1)
    assert len(listener.closed) == 1
    assert listener.chunks == []
    assert stages.calls == ["start", "solve", "end"]
    assert [report.outcome for report in reports] == ["unavailable", "done"]


def test_a_call_that_began_after_the_death_is_left_alone(make_line: MakeLine) -> None:
    gate = Gate("solve")
    line = make_line(died_s=lambda stage: time.monotonic() - 5 if stage == "dit" else None)
    # Died five seconds ago, whenever asked: every call is younger than that.
    _, listener = submit(line, gate)
    gate.wait()
    time.sleep(0.6)
    assert listener.closed == []
    gate.opened.set()
    until(lambda: listener.closed == [None])


def test_another_stages_death_costs_a_song_nothing(make_line: MakeLine) -> None:
    gate = Gate("solve")
    line = make_line(died_s=lambda stage: time.monotonic() - 2.5 if stage == "vocoder" else None)
    _, listener = submit(line, gate)
    gate.wait()
    time.sleep(0.6)
    gate.opened.set()
    until(lambda: listener.closed == [None])


def test_a_call_over_the_limit_is_given_up(make_line: MakeLine) -> None:
    gate, line = Gate("start"), make_line(stage_limit_s=0.3)
    _, listener = submit(line, gate)
    until(lambda: listener.closed)
    assert "talker: no answer within 0.3 s" in str(listener.closed[0])
    gate.opened.set()


def test_a_song_may_wait_for_the_talkers_pages_longer_than_any_call_may_take(make_line: MakeLine) -> None:
    stages = FakeStages(before=lambda call: time.sleep(0.1), not_yet=40)
    listener = FakeListener()
    make_line(stage_limit_s=3).submit(job(frames=1), stages, listener)
    until(lambda: listener.closed)
    assert listener.closed == [None]
    assert stages.calls.count("next") == 40


# ------------------------------------------------------------- open and closed


def test_draining_refuses_turns_away_and_lets_live_songs_finish(make_line: MakeLine) -> None:
    gate, line = Gate("solve"), make_line()
    _, live = submit(line, gate)
    gate.wait()
    _, waiting = submit(line)
    line.refuse("draining")
    assert "draining" in str(waiting.closed[0])
    assert isinstance(waiting.closed[0], UnavailableError)
    for offer in (line.submit, line.probe):
        with pytest.raises(UnavailableError, match=r"draining \(1 songs run and 0 wait\)"):
            offer(job(), FakeStages(), FakeListener())
    assert line.census == LineCensus(live=1, waiting=0, open=False)
    gate.opened.set()
    until(lambda: live.closed == [None])
    line.reopen()
    _, again = submit(line)
    until(lambda: again.closed == [None])


def test_closing_waits_for_live_songs_and_gives_up_the_rest() -> None:
    others = song_threads()
    gate, line = Gate("solve"), SongLine(live_songs=2, waiting_songs=5)
    stages, stuck = submit(line, gate)
    _, stuck_too = submit(line, gate)
    gate.wait(2)
    _, waiting = submit(line)
    line.close(timeout_s=0.3)
    for listener in (stuck, stuck_too, waiting):
        (error,) = listener.closed
        assert isinstance(error, UnavailableError)
        assert "shutting down" in str(error)
    with pytest.raises(UnavailableError):
        submit(line)
    line.reopen()
    with pytest.raises(UnavailableError):
        submit(line)
    until(lambda: "end" in stages.calls)
    gate.opened.set()
    until(lambda: song_threads() <= others)


def test_every_thread_is_gone_after_close() -> None:
    others = set(threading.enumerate())
    line = SongLine(live_songs=5, waiting_songs=0)
    assert len(set(threading.enumerate()) - others) == 6
    line.close(timeout_s=5)
    until(lambda: set(threading.enumerate()) <= others)


def test_ticks_tell_the_census_and_survive_an_error(make_line: MakeLine) -> None:
    seen: list[LineCensus] = []

    def tick(census: LineCensus) -> None:
        seen.append(census)
        raise RuntimeError("no metrics today")

    gate, line = Gate("start"), make_line(on_tick=tick)
    submit(line, gate)
    submit(line, gate)
    until(lambda: LineCensus(1, 1, True) in seen[1:])
    gate.opened.set()


# --------------------------------------------------------------------- probes


def probe(line: SongLine, **options: int) -> tuple[FakeStages, FakeListener]:
    stages, listener = FakeStages(), FakeListener(**options)
    line.probe(job("probe", frames=1, probe=True), stages, listener)
    return stages, listener


def test_a_probe_of_an_idle_line_makes_its_song(make_line: MakeLine) -> None:
    stages, listener = probe(make_line())
    until(lambda: listener.closed == [None])
    assert stages.calls == ["start", "solve", "decode", "end"]
    assert [reason for _, _, reason in listener.chunks] == ["length"]


def test_a_probe_of_a_busy_line_takes_any_songs_sound_for_an_answer(make_line: MakeLine) -> None:
    gate, line = Gate("decode"), make_line()
    submit(line, gate)
    _, queued = submit(line, gate)
    gate.wait()
    stages, listener = probe(line)
    time.sleep(0.5)
    assert listener.closed == []
    gate.opened.set()
    until(lambda: listener.closed == [None])
    assert stages.calls == []
    assert listener.chunks == [(0, 0, PROBE_ANSWER)]
    until(lambda: queued.closed)


def test_sound_before_a_failure_is_no_answer(make_line: MakeLine) -> None:
    line = make_line()
    _, fine = submit(line)
    until(lambda: fine.closed)

    def explode(call: str) -> None:
        raise UnavailableError("talker: gone")

    _, failed = submit(line, explode)
    until(lambda: failed.closed)
    stages, listener = probe(line)
    until(lambda: listener.closed == [None])
    assert "decode" in stages.calls


def test_a_probe_nobody_waits_for_is_dropped(make_line: MakeLine) -> None:
    gate, line = Gate("decode"), make_line()
    submit(line, gate)
    gate.wait()
    _, listener = probe(line, gone_after=0)
    until(lambda: listener.closed)
    assert isinstance(listener.closed[0], SongCancelledError)
    gate.opened.set()


class Mute(FakeListener):
    """A client that can't be sent anything, or can't even be asked about."""

    def __init__(self, *, asked: bool = True) -> None:
        super().__init__()
        self.asked = asked

    def cancelled(self) -> bool:
        if not self.asked:
            raise RuntimeError("no answer")
        return False

    def chunk(self, *_: object, **__: object) -> None:
        raise RuntimeError("no shared memory")


@pytest.mark.parametrize("asked", [True, False])
def test_a_probe_that_can_not_be_answered_ends_and_harms_no_other(make_line: MakeLine, asked: bool) -> None:
    gate, line = Gate("decode"), make_line()
    submit(line, gate)
    gate.wait()
    mute = Mute(asked=asked)
    line.probe(job("mute", frames=1, probe=True), FakeStages(), mute)
    _, listener = probe(line)
    gate.opened.set()
    until(lambda: listener.closed and mute.closed)
    assert listener.closed == [None]
    assert listener.chunks == [(0, 0, PROBE_ANSWER)]
    assert len(mute.closed) == 1
    assert isinstance(mute.closed[0], RuntimeError)


def test_songs_do_not_fight_over_cores(make_line: MakeLine) -> None:
    threads: list[int] = []
    torch.set_num_threads(3)
    try:
        _, listener = submit(make_line(), lambda call: threads.append(torch.get_num_threads()))
        until(lambda: listener.closed)
    finally:
        torch.set_num_threads(1)
    assert set(threads) == {1}
