"""The gate's order, its fairness, and that places are never lost."""

import random
import threading
import time

import pytest

from python_backend_models.window_gate import WindowGate


class Line:
    """Windows that wait at a gate whose only place is taken, and the order in which they then pass."""

    def __init__(self, gate: WindowGate) -> None:
        self.gate = gate
        self.passed: list[str] = []
        self.threads: list[threading.Thread] = []

    def add(self, name: str, *, first: bool, song_started_s: float) -> None:
        def run() -> None:
            with self.gate.enter(first=first, song_started_s=song_started_s):
                self.passed.append(name)

        thread = threading.Thread(target=run)
        waiting = self.gate.waiting
        thread.start()
        self.threads.append(thread)
        while self.gate.waiting == waiting:
            time.sleep(0.001)

    def finish(self) -> list[str]:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        return self.passed


def test_first_windows_go_ahead_and_older_songs_before_younger_ones() -> None:
    gate = WindowGate(1)
    line = Line(gate)
    with gate.enter(first=True, song_started_s=0):
        line.add("later window, song of 3 s", first=False, song_started_s=3)
        line.add("first window, song of 9 s", first=True, song_started_s=9)
        line.add("later window, song of 1 s", first=False, song_started_s=1)
        line.add("first window, song of 5 s", first=True, song_started_s=5)
    assert line.finish() == [
        "first window, song of 5 s",
        "first window, song of 9 s",
        "later window, song of 1 s",
        "later window, song of 3 s",
    ]


def test_an_overtaken_window_goes_next_after_its_share_of_patience() -> None:
    gate = WindowGate(1, most_overtaken=3)
    line = Line(gate)
    with gate.enter(first=True, song_started_s=0):
        line.add("patient", first=False, song_started_s=0)
        for number in range(6):
            line.add(f"first {number}", first=True, song_started_s=number)
    assert line.finish() == ["first 0", "first 1", "first 2", "patient", "first 3", "first 4", "first 5"]


def test_a_cancelled_wait_leaves_no_trace() -> None:
    gate = WindowGate(1)

    def cancelled() -> None:
        raise KeyError("gone")

    with gate.enter(first=True, song_started_s=0), pytest.raises(KeyError):  # noqa: SIM117
        with gate.enter(first=True, song_started_s=1, check=cancelled):
            pytest.fail("there was no place")
    assert gate.waiting == 0
    with gate.enter(first=False, song_started_s=2):
        pass


def test_a_failing_window_gives_its_place_back() -> None:
    gate = WindowGate(2)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), gate.enter(first=True, song_started_s=0):
            raise ZeroDivisionError
    with gate.enter(first=True, song_started_s=0), gate.enter(first=True, song_started_s=0):
        assert gate.waiting == 0


def test_contention_never_exceeds_the_places_and_everyone_passes() -> None:
    gate, places = WindowGate(3, most_overtaken=4), 3
    inside, most, passed = 0, 0, 0
    lock = threading.Lock()
    rng = random.Random(4)

    def song(started_s: float, pauses: list[float]) -> None:
        nonlocal inside, most, passed
        for number, pause in enumerate(pauses):
            with gate.enter(first=number == 0, song_started_s=started_s):
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(pause)
                with lock:
                    inside -= 1
                    passed += 1

    threads = [
        threading.Thread(target=song, args=(started, [rng.random() / 500 for _ in range(10)]))
        for started in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert passed == 240
    assert most == places
    assert gate.waiting == 0


def test_a_place_is_given_back_once() -> None:
    """A song that is given up leaves its place while its thread still hangs in the call."""
    gate = WindowGate(1)
    place = gate.enter(first=True, song_started_s=0)
    place.leave()
    with gate.enter(first=True, song_started_s=1):
        place.leave()
        line = Line(gate)
        line.add("next", first=True, song_started_s=2)
        assert line.passed == []
    assert line.finish() == ["next"]


def test_no_places_are_refused() -> None:
    with pytest.raises(ValueError, match="places is 0"):
        WindowGate(0)
