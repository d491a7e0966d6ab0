"""The line of songs: who runs, who waits, who is turned away, and who watches over calls that never return.

Songs wait here, before their first call to a stage, because a call that waits inside Triton holds one of the
few threads that songs in progress need to go on. Each place is a thread. A thread whose call is lost, because
the stage's process died, can't be woken: its song is answered, its place gets a new thread, and it ends by
itself if the call ever returns.
"""

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from python_backend_models.orchestrator import (
    Listener,
    SongCancelledError,
    SongJob,
    SongReport,
    SongRun,
    StageCall,
    Stages,
    UnavailableError,
)
from python_backend_models.window_gate import WindowGate

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
# A call that began before a stub died may yet be answered by another stub of that stage: so long it is given.
_LOST_AFTER_S = 2.0
# Sound that came out this recently shows that all stages work, so a probe needs no song of its own.
_FRESH_S = 10.0
PROBE_ANSWER = "alive"


@dataclass(frozen=True)
class LineCensus:
    """Songs that run, songs that wait, and whether new ones are taken."""

    live: int
    waiting: int
    open: bool


class SongLine:
    """First come, first served: a fixed number of songs in the making, a bounded number waiting.

    Args:
        live_songs: places.
        waiting_songs: more are refused.
        windows_in_flight: windows with the flow transformer at once, see `WindowGate`.
        stage_limit_s: a call of a song that takes longer is given up.
        died_s: when (`time.monotonic`) a process of a stage was last found dead.
        on_tick: called about five times a second with the census.
        on_end: called with the report of every song that was accepted, just before its listener is closed.
        on_lost: called with the stage of every call that was given up.
    """

    def __init__(
        self,
        *,
        live_songs: int,
        waiting_songs: int,
        windows_in_flight: int = 16,
        stage_limit_s: float = 300.0,
        died_s: Callable[[str], float | None] = lambda stage: None,
        on_tick: Callable[[LineCensus], None] = lambda census: None,
        on_end: Callable[[SongReport], None] = lambda report: None,
        on_lost: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._places, self._waiting_songs = live_songs, waiting_songs
        self._gate = WindowGate(windows_in_flight)
        self._stage_limit_s, self._died_s = stage_limit_s, died_s
        self._on_tick, self._on_end, self._on_lost = on_tick, on_end, on_lost
        self._waiting: collections.deque[SongRun] = collections.deque()
        self._live: dict[int, SongRun] = {}
        self._probes: list[SongRun] = []
        self._sound_at_s: float | None = None
        self._refusal: str | None = None
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="song-watch", daemon=True)
        self._watcher.start()
        for _ in range(live_songs):
            self._add_worker()

    # ---------------------------------------------------------------- songs in

    @property
    def census(self) -> LineCensus:
        with self._changed:
            return LineCensus(len(self._live), len(self._waiting), self._refusal is None)

    def submit(self, job: SongJob, stages: Stages, listener: Listener) -> None:
        """Queue a song; its listener hears everything from now on.

        Raises:
            UnavailableError: too many songs wait, or no new ones are taken; the listener heard nothing.
        """
        self._enqueue(SongRun(job, stages, listener, gate=self._gate, on_chunk=self._heard))

    def probe(self, job: SongJob, stages: Stages, listener: Listener) -> None:
        """Answer whether songs can be made, at a cost and delay that don't grow with the load.

        If sound came out lately, that is the answer: an empty chunk with the finish reason `alive`. If no
        song runs, `job` is made. Otherwise the next sound of any song, or the end of all, decides.

        Raises:
            UnavailableError: no new songs are taken.
        """
        run = SongRun(job, stages, listener, gate=self._gate, on_chunk=self._heard)
        with self._changed:
            self._check_open()
            self._probes.append(run)
        self._answer_probes()

    def _enqueue(self, run: SongRun) -> None:
        with self._changed:
            self._check_open()
            free = max(0, self._places - len(self._live))
            if len(self._waiting) >= self._waiting_songs + free:
                raise self._counted(UnavailableError("the queue is full; try again later"))
            self._waiting.append(run)
            self._changed.notify()

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise self._counted(UnavailableError(self._refusal))

    def _counted(self, error: UnavailableError) -> UnavailableError:
        return UnavailableError(f"{error} ({len(self._live)} songs run and {len(self._waiting)} wait)")

    # ------------------------------------------------------------- open and closed

    def refuse(self, reason: str) -> None:
        """Take no new songs, for this reason, and turn away those that wait; songs that run go on."""
        with self._changed:
            self._refusal = reason
            waiting = [*self._waiting, *self._probes]
            self._waiting.clear()
            self._probes.clear()
        for run in waiting:
            self._finish(run, UnavailableError(reason))

    def reopen(self) -> None:
        """Take new songs again, unless the line is closed."""
        with self._changed:
            if not self._closed.is_set():
                self._refusal = None

    def close(self, *, timeout_s: float) -> None:
        """Refuse new songs, turn away the waiting ones, wait for the live ones, give up those that remain."""
        reason = "the server is shutting down"
        self._closed.set()
        self.refuse(reason)
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._live, timeout_s)
            remaining = list(self._live.values())
        for run in remaining:
            self._give_up(run, UnavailableError(reason), replace=False)
        self._watcher.join(timeout_s)

    # -------------------------------------------------------------------- places

    def _add_worker(self) -> None:
        threading.Thread(target=self._work, name="song", daemon=True).start()

    def _work(self) -> None:
        torch.set_num_threads(1)  # resampling is small; eight songs must not fight over the cores
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
                if not self._waiting:
                    return
                run = self._waiting.popleft()
                self._live[run.key] = run
            error: Exception | None = None
            try:
                run.make()
            except Exception as caught:
                error = caught
            # The place is free before the listener hears of the end: whoever hears it finds it so.
            if not self._leave(run):
                return  # given up meanwhile; another thread has this place
            self._finish(run, error)

    def _leave(self, run: SongRun) -> bool:
        with self._changed:
            found = self._live.pop(run.key, None) is not None
            self._changed.notify_all()
            return found

    def _give_up(self, run: SongRun, error: UnavailableError, *, replace: bool) -> None:
        """End a song in its thread's stead."""
        if not self._leave(run):
            return  # it ended by itself just now
        run.abandon()  # only now: until it left the line, ending it was its thread's duty
        if replace:
            self._add_worker()
        # In a thread of its own: with a dead talker this call, too, may never return.
        threading.Thread(target=run.stages.end, args=(run.key,), name="song-end", daemon=True).start()
        self._finish(run, error)

    def _finish(self, run: SongRun, error: Exception | None) -> None:
        report = run.report
        report.ended_s = run.age_s
        match error:
            case None:
                report.outcome = "done"
            case SongCancelledError():
                report.outcome = "cancelled"
            case UnavailableError():
                report.outcome = "unavailable"
                with self._changed:
                    error = self._counted(error)
            case _:
                report.outcome = "failed"
                _LOG.error("song %s failed", run.job.name, exc_info=error)
        if report.outcome in ("unavailable", "failed"):
            self._sound_at_s = None  # what was heard before says nothing any more
        # Counted before the client hears of it: whoever asks after that finds the song in the numbers.
        try:
            self._on_end(report)
        except Exception:
            _LOG.exception("song %s could not be counted", run.job.name)
        try:
            run.listener.close(error)
        except Exception:
            _LOG.exception("song %s could not be closed", run.job.name)

    # ------------------------------------------------------------------ watch

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_S):
            try:
                self._turn_away_cancelled()
                self._give_up_lost()
                self._answer_probes()
                self._on_tick(self.census)
            except Exception:
                _LOG.exception("the watch over songs failed and goes on")

    def _turn_away_cancelled(self) -> None:
        """End waiting songs whose client is gone, without waiting for their turn."""
        with self._changed:
            waiting = list(self._waiting)
        # Without the lock: each is a question to the server's process.
        for run in [run for run in waiting if run.listener.cancelled()]:
            with self._changed:
                if run not in self._waiting:
                    continue
                self._waiting.remove(run)
            self._finish(run, SongCancelledError("the client cancelled the song while it waited"))

    def _give_up_lost(self) -> None:
        with self._changed:
            live = list(self._live.values())
        for run in live:
            call = run.call
            reason = call and self._lost(call)
            if call and reason and run.call is call:
                _LOG.error("song %s: %s; it is given up", run.job.name, reason)
                self._on_lost(call.stage)
                self._give_up(run, UnavailableError(reason), replace=True)

    def _lost(self, call: StageCall) -> str | None:
        now_s, died_s = time.monotonic(), self._died_s(call.stage)
        if died_s is not None and call.since_s <= died_s and now_s - died_s > _LOST_AFTER_S:
            return f"{call.stage}: its process died"
        if now_s - call.since_s > self._stage_limit_s:
            return f"{call.stage}: no answer within {self._stage_limit_s:g} s"
        return None

    # ----------------------------------------------------------------- probes

    def _heard(self) -> None:
        self._sound_at_s = time.monotonic()

    def _answer_probes(self) -> None:
        with self._changed:
            probes, idle = list(self._probes), not self._live and not self._waiting
            heard = self._sound_at_s is not None and time.monotonic() - self._sound_at_s < _FRESH_S
        for run in probes:
            error: Exception | None = None
            taken = False
            try:
                gone = not heard and run.listener.cancelled()
                if not (heard or idle or gone):
                    continue
                if not (taken := self._take_probe(run)):
                    continue
                if gone:
                    error = SongCancelledError("the client no longer waits for the probe's answer")
                elif heard:
                    run.listener.chunk(
                        torch.empty(0, 2), frames_done=0, job=run.job, finish_reason=PROBE_ANSWER
                    )
                else:
                    self._enqueue(run)
                    continue
            except Exception as caught:  # this probe's own end: the others still get their answers
                error, taken = caught, taken or self._take_probe(run)
            if taken:
                self._finish(run, error)

    def _take_probe(self, run: SongRun) -> bool:
        """Take a probe out of those that wait; False if another thread answers it."""
        with self._changed:
            found = run in self._probes
            if found:
                self._probes.remove(run)
            return found
