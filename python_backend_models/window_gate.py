"""Which window goes to the flow transformer next, where more songs ask than it can take.

A BLS call carries no priority, and Triton serves a model's queue in order, so the order is made here, where
every song is seen: only so many windows are in flight, and the rest wait for a place. First windows go ahead
of later ones, because a listener waits for them in silence; among equals the older song goes first. Whoever
has been overtaken a fixed number of times goes before all others, so no window waits for ever.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

_CHECK_S = 0.2  # between two looks at whether a waiting song was cancelled


@dataclass(eq=False)
class _Waiter:
    """A window that waits for a place."""

    first: bool
    song_started_s: float
    overtaken: int = 0


class Place:
    """A window's place in flight; given back once, by whoever comes first."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Give the place back; nothing happens the second time."""
        with self._lock:
            give_back, self._give_back = self._give_back, None
        if give_back:
            give_back()

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class WindowGate:
    """Places for windows in flight, given out by urgency.

    Args:
        places: windows in flight at once. Two full batches keep the device busy: one being solved, one
            waiting in Triton's queue to be batched.
        most_overtaken: later arrivals that may be preferred to a window before it goes ahead of all.
    """

    def __init__(self, places: int, *, most_overtaken: int = 16) -> None:
        if places < 1:
            raise ValueError(f"places is {places}, not at least 1")
        self._free = places
        self._most_overtaken = most_overtaken
        self._waiting: list[_Waiter] = []  # in order of arrival
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Windows that wait for a place."""
        with self._changed:
            return len(self._waiting)

    def enter(
        self,
        *,
        first: bool,
        song_started_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> "Place":
        """Wait for a place.

        Args:
            first: whether it is its song's first window.
            song_started_s: any clock on which an older song has the smaller value.
            check: called now and then while waiting, without any lock; what it raises ends the wait.
        """
        waiter = _Waiter(first, song_started_s)
        with self._changed:
            self._waiting.append(waiter)
        try:
            while not self._passes(waiter):
                check()
        except BaseException:
            with self._changed:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self._changed.notify_all()
            raise
        return Place(self._give_back)

    def _passes(self, waiter: _Waiter) -> bool:
        """Wait a little; whether the waiter got a place."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_next(waiter), _CHECK_S):
                return False
            arrived = self._waiting.index(waiter)
            for earlier in self._waiting[:arrived]:
                earlier.overtaken += 1
            del self._waiting[arrived]
            self._free -= 1
            self._changed.notify_all()
            return True

    def _give_back(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()

    def _is_next(self, waiter: _Waiter) -> bool:
        return self._free > 0 and min(self._waiting, key=self._urgency) is waiter

    def _urgency(self, waiter: _Waiter) -> tuple[bool, bool, float]:
        patient = waiter.overtaken < self._most_overtaken
        return patient, not waiter.first, waiter.song_started_s
