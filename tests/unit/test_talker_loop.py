"""The engine's thread: every request gets exactly one reply, whatever happens to the song or the engine."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from python_backend_models.engine.talker import CapacityError, SongError, TalkerEngine, WindowResult
from python_backend_models.engine.talker_loop import Answer, StepReport, TalkerLoop
from tests.unit.test_talker import joined, make_engine, plan, solo

MakeLoop = Callable[..., TalkerLoop]


@pytest.fixture
def make_loop() -> Iterator[MakeLoop]:
    loops: list[TalkerLoop] = []

    def make(engine: TalkerEngine | None = None, **options: object) -> TalkerLoop:
        defaults = {"idle_limit_s": 60.0, "answer_within_s": 300.0}
        loops.append(TalkerLoop(engine or make_engine(), **(defaults | options)))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


class Asker:
    """Collects replies; fails if it gets more than were asked for."""

    def __init__(self) -> None:
        self.results: queue.Queue[Answer] = queue.Queue()

    def __call__(self, result: Answer) -> None:
        self.results.put(result)

    def next(self) -> Answer:
        return self.results.get(timeout=300)

    def window(self) -> WindowResult:
        result = self.next()
        assert isinstance(result, WindowResult), result
        return result

    def error(self) -> SongError:
        result = self.next()
        assert isinstance(result, SongError), result
        return result

    def silent(self) -> bool:
        return self.results.empty()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_windows_come_one_for_each_request_and_equal_the_plain_loop(make_loop: MakeLoop) -> None:
    song = plan(4, max_frames=201)
    loop, asker = make_loop(), Asker()
    loop.start(1, song, asker)
    windows = [asker.window()]
    time.sleep(0.2)
    assert asker.silent()
    loop.next_window(1, asker)
    windows.append(asker.window())
    assert windows[-1].finish_reason == "length"
    codes, _, _ = solo(song, seed=4)
    assert torch.equal(joined(windows)[0], codes)


def test_an_ended_song_answers_who_waits_and_frees_its_place(make_loop: MakeLoop) -> None:
    engine = make_engine(slots=1)
    pages = engine.census.pages_free
    loop, first, second = make_loop(engine), Asker(), Asker()
    loop.start(1, plan(1, max_frames=2000), first)
    loop.start(2, plan(2, max_frames=3), second)
    loop.end(1)
    assert "ended" in str(first.error())
    assert second.window().finish_reason == "length"
    loop.end(2)
    loop.end(3)  # never heard of: no error
    until(lambda: engine.census.slots_free == 1)
    # What is left in use are the shared pages of the twins' prompt.
    until(lambda: engine.census.pages_free >= pages - 5)
    assert first.silent()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda loop, asker: loop.next_window(9, asker), "no such song"),
        (lambda loop, asker: loop.start(9, plan(1, tokens=3), asker), "prompts"),
        (lambda loop, asker: loop.start(9, plan(1, max_frames=0), asker), "cap"),
        (lambda loop, asker: loop.start(9, plan(1, max_frames=9000), asker), "pages"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    make_loop: MakeLoop, ask: Callable[[TalkerLoop, Asker], None], words: str
) -> None:
    loop, asker = make_loop(make_engine(pages=60)), Asker()
    ask(loop, asker)
    error = asker.error()
    assert words in str(error)
    assert isinstance(error, CapacityError) == (words == "pages")
    loop.start(1, plan(1, max_frames=2), asker)
    asker.window()


def test_a_second_request_for_the_same_window_and_a_second_start_are_refused(make_loop: MakeLoop) -> None:
    loop, first, second = make_loop(make_engine(slots=1)), Asker(), Asker()
    loop.start(1, plan(1, max_frames=500), first)
    loop.next_window(1, second)
    assert "already waits" in str(second.error())
    first.window()
    loop.start(1, plan(1, max_frames=500), second)
    assert "already here" in str(second.error())
    loop.next_window(1, first)
    first.window()


def test_an_engine_that_fails_ends_its_songs_and_goes_on_with_the_next(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    step, failing = engine.runner.step, threading.Event()

    def fail(*arguments: object) -> None:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("the device is unwell")
        step(*arguments)

    monkeypatch.setattr(engine.runner, "step", fail)
    loop, askers = make_loop(engine), [Asker(), Asker()]
    for key, asker in enumerate(askers):
        loop.start(key, plan(key, max_frames=1000), asker)
    for asker in askers:
        asker.window()
    failing.set()
    for key, asker in enumerate(askers):
        # A window that was finished before the failure may still come.
        for _ in range(3):
            loop.next_window(key, asker)
            if isinstance(reply := asker.next(), SongError):
                break
        assert "failed" in str(reply)
        loop.end(key)
    after = Asker()
    loop.start(7, plan(7, max_frames=2), after)
    assert after.window().finish_reason == "length"


def test_a_prompt_that_fails_ends_its_own_song_only(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    prefill = engine.runner.prefill

    def fail(tokens: list[int], *arguments: object, **options: int) -> torch.Tensor:
        if len(tokens) > 200:
            raise torch.OutOfMemoryError("no room for that prompt")
        return prefill(tokens, *arguments, **options)

    monkeypatch.setattr(engine.runner, "prefill", fail)
    loop, fine, unlucky = make_loop(engine), Asker(), Asker()
    loop.start(1, plan(1, max_frames=60), fine)
    loop.start(2, plan(2, tokens=300, max_frames=60), unlucky)
    assert "prompt" in str(unlucky.error())
    window = fine.window()
    codes, _, _ = solo(plan(1, max_frames=60), seed=1)
    assert torch.equal(window.codes, codes)
    loop.end(2)
    until(lambda: engine.census.slots_free == 7)


def test_a_reply_that_fails_harms_nobody(make_loop: MakeLoop) -> None:
    def gone(result: Answer) -> None:
        raise RuntimeError("the asker is gone")

    loop, fine = make_loop(), Asker()
    loop.start(1, plan(1, max_frames=2), gone)
    loop.next_window(8, gone)
    loop.start(2, plan(2, max_frames=3), fine)
    assert fine.window().finish_reason == "length"


def test_a_song_nobody_asks_for_is_dropped_and_says_so_later(make_loop: MakeLoop) -> None:
    engine = make_engine(slots=2)
    loop, idle, other = make_loop(engine, idle_limit_s=0.3), Asker(), Asker()
    loop.start(1, plan(1, max_frames=500), idle)
    idle.window()
    until(lambda: engine.census.slots_free == 2)
    loop.next_window(1, other)
    assert "idle for too long" in str(other.error())


def test_a_song_that_is_waited_for_is_not_idle(make_loop: MakeLoop) -> None:
    engine = make_engine(slots=1)
    loop, first, waiting = make_loop(engine, idle_limit_s=0.3), Asker(), Asker()
    loop.start(1, plan(1, max_frames=1000), first)
    first.window()
    loop.start(2, plan(2, max_frames=2), waiting)
    # The first song is dropped as idle, which gives the second, older than the limit by then, its turn.
    assert waiting.window().finish_reason == "length"


def ask_again(loop: TalkerLoop, key: int, asker: Asker) -> tuple[WindowResult, int]:
    """The next window of a song that was asked for, and how often it had to be asked for again."""
    again = 0
    while (answer := asker.next()) is None:
        loop.next_window(key, asker)
        again += 1
    assert isinstance(answer, WindowResult), answer
    return answer, again


def test_a_song_that_waits_for_a_place_hears_so_and_keeps_its_turn(make_loop: MakeLoop) -> None:
    engine = make_engine(slots=1)
    loop = make_loop(engine, answer_within_s=0.05)
    first, second, third = Asker(), Asker(), Asker()
    loop.start(1, plan(1, max_frames=1000), first)
    ask_again(loop, 1, first)
    loop.start(2, plan(2, max_frames=3), second)
    loop.start(3, plan(3, max_frames=2), third)
    assert second.next() is None
    assert third.next() is None
    loop.next_window(3, third)  # asks first, and yet comes after the second
    assert third.next() is None
    loop.next_window(2, second)
    loop.next_window(3, third)
    loop.end(1)
    window, _ = ask_again(loop, 2, second)
    assert window.codes.tolist() == solo(plan(2, max_frames=3), seed=2)[0].tolist()
    assert engine.census.waiting == 1
    loop.end(2)
    assert ask_again(loop, 3, third)[0].codes.tolist() == solo(plan(3, max_frames=2), seed=3)[0].tolist()


def test_asking_in_vain_changes_no_window(make_loop: MakeLoop) -> None:
    loop, asker = make_loop(answer_within_s=0.001), Asker()
    loop.start(1, plan(1, max_frames=250), asker)
    windows, asked = [], 0
    while not windows or windows[-1].finish_reason is None:
        if windows:
            loop.next_window(1, asker)
        window, again = ask_again(loop, 1, asker)
        windows.append(window)
        asked += again
    assert asked > 2  # or the test shows nothing
    assert [window.window.index for window in windows] == list(range(len(windows)))
    codes, _ = joined(windows)
    assert codes.tolist() == solo(plan(1, max_frames=250), seed=1)[0].tolist()
    assert asker.silent()


def test_a_song_that_was_put_off_can_be_ended_and_can_fail(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slots=1)
    loop, first, second = make_loop(engine, answer_within_s=0.02), Asker(), Asker()
    loop.start(1, plan(1, max_frames=1000), first)
    ask_again(loop, 1, first)
    loop.start(2, plan(2, max_frames=3), second)
    assert second.next() is None
    loop.end(2)
    loop.next_window(2, second)
    assert "no such song" in str(second.error())
    loop.start(3, plan(3, max_frames=3), second)
    assert second.next() is None
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    loop.next_window(3, second)
    assert "failed on this song" in str(second.error())


def test_closing_answers_everyone() -> None:
    engine = make_engine(slots=1)
    loop = TalkerLoop(engine, idle_limit_s=60, answer_within_s=60)
    askers = [Asker(), Asker()]
    for key, asker in enumerate(askers):
        loop.start(key, plan(key, max_frames=1000), asker)
    loop.close()
    replies = [asker.next() for asker in askers]
    assert any("shutting down" in str(reply) for reply in replies)
    late = Asker()
    loop.start(5, plan(5), late)
    loop.close()  # a second time does nothing
    assert all(asker.silent() for asker in askers)


def test_steps_are_reported_with_what_they_did(make_loop: MakeLoop) -> None:
    reports: list[StepReport] = []
    loop, asker = make_loop(on_step=reports.append), Asker()
    loop.start(1, plan(1, max_frames=5), asker)
    asker.window()
    until(lambda: sum(report.frames for report in reports) == 5)
    assert sum(report.prefilled for report in reports) >= 2
    assert all(report.seconds > 0 for report in reports)
    loop.end(1)
    until(lambda: reports[-1].census.live == 0)


def test_the_engine_computes_on_as_many_threads_as_its_stage_was_given(make_loop: MakeLoop) -> None:
    engine, threads = make_engine(), []
    step = engine.step

    def counting() -> tuple[list[tuple[int, WindowResult | SongError]], bool]:
        threads.append(torch.get_num_threads())
        return step()

    engine.step = counting  # type: ignore[method-assign]
    torch.set_num_threads(2)
    try:
        loop, asker = make_loop(engine), Asker()
        loop.start(1, plan(4, max_frames=2), asker)
        asker.window()
    finally:
        torch.set_num_threads(1)
    assert set(threads) == {2}
