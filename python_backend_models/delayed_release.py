"""Keeps what came with an answer alive for a moment after it was read.

The Python backend before 24.12 forgets the responses of a decoupled call in a thread of its own, without the
interpreter's lock. If that takes the last reference to a tensor, its numpy array is freed without it, and
the interpreter's memory is corrupted: on 24.10 a crash of the process in every few thousand calls, more often
where logging or questions about cancelled clients hold that thread up. So the last reference must be ours.
Newer ones take the lock (python_backend, pull request 390) and lose nothing by this.
"""

import collections
import threading
import time
from collections.abc import Callable

_KEEP_S = 1.0  # that thread is done within milliseconds


class DelayedRelease:
    """Keeps objects for a fixed time. For any thread.

    Args:
        keep_s: how long at least.
        clock: in seconds.
    """

    def __init__(self, *, keep_s: float = _KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._kept: collections.deque[tuple[float, object]] = collections.deque()
        self._lock = threading.Lock()

    def keep(self, kept: object) -> None:
        """Keep an object from now on; older ones are let go."""
        with self._lock:
            self._kept.append((self._clock(), kept))
        self.purge()

    def purge(self) -> None:
        """Let go of what was kept long enough; to be called now and then where nothing new comes."""
        due = []
        with self._lock:
            while self._kept and self._clock() - self._kept[0][0] >= self._keep_s:
                due.append(self._kept.popleft())
        due.clear()  # without the lock: what is let go may run code of its own
