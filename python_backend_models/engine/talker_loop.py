"""The talker engine's thread: requests in, windows out, and nothing computed anywhere else.

`start`, `next_window` and `end` only leave a note and return; the thread reads the notes between two steps.
Every `start` and `next_window` gets exactly one reply, also when the song is ended, dropped or unknown, when
the device fails, and when the loop closes. A reply doesn't wait for a window for long: after a few seconds it
says that there is none yet. So whoever asks can find out in between that the song is no longer wanted or that
the server is stopping, however long the song has to wait for pages.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from python_backend_models.engine.talker import Census, SongError, SongPlan, TalkerEngine, WindowResult

_LOG = logging.getLogger(__name__)
# None: no window yet; ask again.
Answer = WindowResult | SongError | None
Reply = Callable[[Answer], None]


@dataclass(frozen=True)
class StepReport:
    """What a step did, and what songs there are after it."""

    census: Census
    frames: int
    prefilled: bool
    seconds: float


@dataclass(frozen=True)
class _Note:
    key: int
    reply: Reply | None = None
    plan: SongPlan | None = None


class TalkerLoop:
    """Runs an engine in a thread of its own.

    Args:
        engine: not touched by anyone else from now on.
        idle_limit_s: a song that waits for nobody's request this long is dropped: its orchestrator is gone.
        answer_within_s: a request that waits longer is told that there is no window yet.
        on_step: called after every step, from the engine's thread.
    """

    def __init__(
        self,
        engine: TalkerEngine,
        *,
        idle_limit_s: float,
        answer_within_s: float,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        self._engine = engine
        self._idle_limit_s, self._answer_within_s = idle_limit_s, answer_within_s
        self._on_step = on_step
        self._notes: queue.SimpleQueue[_Note | None] = queue.SimpleQueue()
        self._replies: dict[int, Reply] = {}
        self._last_asked_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="talker-engine", daemon=True)
        self._thread.start()

    def start(self, key: int, plan: SongPlan, reply: Reply) -> None:
        """Begin a song and ask for its first window."""
        self._notes.put(_Note(key, reply, plan))

    def next_window(self, key: int, reply: Reply) -> None:
        """Ask for a song's next window."""
        self._notes.put(_Note(key, reply))

    def end(self, key: int) -> None:
        """Forget a song, finished or not; an unknown one is no error."""
        self._notes.put(_Note(key))

    def close(self) -> None:
        """Answer whoever waits with an error and stop the thread."""
        self._notes.put(None)
        self._thread.join()

    def _run(self) -> None:
        busy = False
        while self._read_notes(wait=not busy):
            started_s = time.perf_counter()
            try:
                deliveries, busy = self._engine.step()
            except Exception:
                _LOG.exception("the engine failed; its songs end with an error")
                deliveries, busy = self._engine.fail_all(SongError("the talker failed on this song")), False
            seconds = time.perf_counter() - started_s
            for key, result in deliveries:
                self._answer(key, result)
            self._report(seconds)
            self._put_off()
            self._drop_idle()
        for key in list(self._replies):
            self._answer(key, SongError("the talker is shutting down"))
        while not self._notes.empty():
            note = self._notes.get_nowait()
            if note is not None and note.reply is not None:
                _say(note.reply, SongError("the talker is shutting down"))

    def _read_notes(self, *, wait: bool) -> bool:
        """Take in all notes, waiting for one if there is nothing else to do; False to stop."""
        timeout_s = min(self._idle_limit_s, 60.0) if self._last_asked_s else None
        if self._replies:
            oldest_s = min(self._last_asked_s[key] for key in self._replies)
            timeout_s = max(0.0, oldest_s + self._answer_within_s - time.monotonic())
        with contextlib.suppress(queue.Empty):
            note = self._notes.get(timeout=timeout_s) if wait else self._notes.get_nowait()
            while note is not None:
                self._take(note)
                note = self._notes.get_nowait()
            return False
        return True

    def _take(self, note: _Note) -> None:
        if note.reply is None:
            self._engine.release(note.key)
            self._last_asked_s.pop(note.key, None)
            self._answer(note.key, SongError("the song was ended"))
            return
        if note.key in self._replies:
            _say(note.reply, SongError("the song already waits for a window"))
            return
        try:
            if note.plan is not None:
                self._engine.admit(note.key, note.plan)
            self._engine.request_window(note.key)
        except SongError as error:
            _say(note.reply, error)
        except KeyError:
            _say(note.reply, SongError("no such song: it was never started, or was idle for too long"))
        except ValueError as error:
            _say(note.reply, SongError(str(error)))
        else:
            self._replies[note.key] = note.reply
            self._last_asked_s[note.key] = time.monotonic()

    def _answer(self, key: int, result: Answer) -> None:
        reply = self._replies.pop(key, None)
        if reply is not None:
            if key in self._last_asked_s:
                self._last_asked_s[key] = time.monotonic()
            _say(reply, result)

    def _report(self, seconds: float) -> None:
        engine = self._engine
        try:
            self._on_step(
                StepReport(engine.census, engine.frames_in_last_step, engine.prefilled_in_last_step, seconds)
            )
        except Exception:
            _LOG.exception("a step could not be reported")

    def _put_off(self) -> None:
        """Tell those that have waited for long that there is no window yet."""
        due_s = time.monotonic() - self._answer_within_s
        for key in [key for key in self._replies if self._last_asked_s[key] <= due_s]:
            self._engine.withdraw_request(key)
            self._answer(key, None)

    def _drop_idle(self) -> None:
        now_s = time.monotonic()
        idle = [
            key
            for key, asked_s in self._last_asked_s.items()
            if key not in self._replies and now_s - asked_s > self._idle_limit_s
        ]
        for key in idle:
            _LOG.warning("song %d was idle for %.0f s and is dropped", key, self._idle_limit_s)
            self._engine.release(key)
            del self._last_asked_s[key]


def _say(reply: Reply, result: Answer) -> None:
    """Reply; a reply that fails (its asker is gone) is no reason to leave the other songs."""
    try:
        reply(result)
    except Exception:
        _LOG.exception("a song's request could not be answered")
