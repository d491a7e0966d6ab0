"""A song's way through the stages, and the line of songs that wait for one.

Knows no Triton: stages and listeners are protocols, so the same code runs over BLS in the server and over
engines in one process in tests. Songs wait here, before their first call to a stage, because a call that
waits inside Triton holds one of the few threads that songs in progress need to go on.
"""

import collections
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from python_backend_models.prompt import Prompt
from python_backend_models.resample import StreamingResampler

_LOG = logging.getLogger(__name__)
_CANCEL_POLL_S = 0.2
_SONG_KEY_BITS = 63  # random, so that several orchestrators can share a talker


class SongCancelledError(Exception):
    """The client is gone or no longer wants the song."""


class UnavailableError(Exception):
    """The server can't make the song now; the message is for the client."""


@dataclass(frozen=True)
class SongJob:
    """A validated song.

    Attributes:
        name: the client's request id, for the log.
        seed: of the request; the windows' noise uses it as it is.
        draw_seed, lead_in_frames: what the profile makes of it, see `sampling`.
        max_frames: the cap, already fitted to the context.
    """

    name: str
    prompt: Prompt
    seed: int
    draw_seed: int
    lead_in_frames: int
    max_frames: int


@dataclass(frozen=True)
class TalkerWindow:
    """What the talker says of a window; `hidden` is whatever the stages pass on to each other."""

    hidden: Any
    index: int
    end_frame: int
    crop_samples: tuple[int, int]
    finish_reason: str | None


class Stages(Protocol):
    """The calls of one song. Each may raise `UnavailableError`, or anything else for a failure."""

    def start(self, key: int, job: SongJob) -> TalkerWindow: ...

    def next_window(self, key: int) -> TalkerWindow: ...

    def end(self, key: int) -> None: ...

    def solve(self, window: TalkerWindow, seed: int, carry: Any) -> tuple[Any, Any]:
        """The window's latent and the carry for the next one (None goes into a first window)."""
        ...

    def decode(self, latent: Any, crop_samples: tuple[int, int]) -> Tensor:
        """Sound `[2, samples]` at 44.1 kHz."""
        ...


class Listener(Protocol):
    """Where a song's sound goes. Called from one thread at a time."""

    def cancelled(self) -> bool: ...

    def chunk(self, audio: Tensor, *, frames_done: int, job: SongJob, finish_reason: str | None) -> None:
        """One chunk `[samples, 2]` float32 at 32 kHz; the last one has a finish reason."""
        ...

    def close(self, error: Exception | None) -> None:
        """The song is over: exactly once."""
        ...


@dataclass
class SongReport:
    """What is worth logging about a song; times in seconds since it was submitted."""

    job: SongJob
    submitted_s: float
    started_s: float | None = None
    first_audio_s: float | None = None
    ended_s: float | None = None
    frames: int = 0
    outcome: str = "running"


def make_song(job: SongJob, stages: Stages, listener: Listener, report: SongReport) -> None:
    """Take one song through the stages, window by window, and hand out each chunk as it is decoded.

    Raises:
        SongCancelledError: the listener said so between two windows.
        Exception: whatever a stage raised.
    """
    key = secrets.randbits(_SONG_KEY_BITS) or 1
    resampler = StreamingResampler()
    try:
        window = stages.start(key, job)
        carry = None
        while True:
            _check(listener)
            latent, carry = stages.solve(window, job.seed, carry)
            _check(listener)
            waveform = stages.decode(latent, window.crop_samples)
            last = window.finish_reason is not None
            audio = resampler.push(waveform, flush=last).t().contiguous()
            report.frames = window.end_frame
            listener.chunk(audio, frames_done=window.end_frame, job=job, finish_reason=window.finish_reason)
            report.first_audio_s = report.first_audio_s or time.monotonic() - report.submitted_s
            if last:
                return
            _check(listener)
            window = stages.next_window(key)
    finally:
        stages.end(key)


def _check(listener: Listener) -> None:
    if listener.cancelled():
        raise SongCancelledError("the client cancelled the song")


@dataclass
class _Entry:
    job: SongJob
    stages: Stages
    listener: Listener
    report: SongReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = SongReport(self.job, time.monotonic())


class SongLine:
    """First come, first served: a fixed number of songs in the making, a bounded number waiting.

    Args:
        live_songs: worker threads.
        waiting_songs: more are refused.
        on_change: called with (live, waiting) whenever one of them changed.
        on_end: called with the report of every song that was accepted.
    """

    def __init__(
        self,
        *,
        live_songs: int,
        waiting_songs: int,
        on_change: Callable[[int, int], None] = lambda live, waiting: None,
        on_end: Callable[[SongReport], None] = lambda report: None,
    ) -> None:
        self._places = live_songs
        self._waiting_songs = waiting_songs
        self._on_change, self._on_end = on_change, on_end
        self._line: collections.deque[_Entry] = collections.deque()
        self._live = 0
        self._closing = False
        self._changed = threading.Condition()
        names = [f"song-{n}" for n in range(live_songs)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        self._threads.append(threading.Thread(target=self._watch, name="song-watch", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, job: SongJob, stages: Stages, listener: Listener) -> None:
        """Queue a song; its listener hears everything from now on.

        Raises:
            UnavailableError: too many songs wait, or the server is shutting down; the listener heard nothing.
        """
        with self._changed:
            if self._closing:
                raise UnavailableError("the server is shutting down")
            if len(self._line) >= self._waiting_songs + max(0, self._places - self._live):
                raise UnavailableError(
                    f"the queue is full: {self._live} songs run and {len(self._line)} wait; try again later"
                )
            self._line.append(_Entry(job, stages, listener))
            self._notify()

    def close(self, *, timeout_s: float) -> None:
        """Refuse new songs, turn away the waiting ones, and wait for the live ones."""
        with self._changed:
            self._closing = True
            waiting = list(self._line)
            self._line.clear()
            self._notify()
        for entry in waiting:
            self._finish(entry, UnavailableError("the server is shutting down"))
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _notify(self) -> None:
        self._changed.notify_all()
        self._on_change(self._live, len(self._line))

    def _work(self) -> None:
        torch.set_num_threads(1)  # resampling is small; eight songs must not fight over the cores
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._closing)
                if not self._line:
                    return
                entry = self._line.popleft()
                self._live += 1
                self._notify()
            error: Exception | None = None
            try:
                entry.report.started_s = time.monotonic() - entry.report.submitted_s
                _check(entry.listener)
                make_song(entry.job, entry.stages, entry.listener, entry.report)
            except Exception as caught:
                error = caught
            with self._changed:
                self._live -= 1
                self._notify()
            # After the place is free: whoever hears of the song's end finds it so.
            self._finish(entry, error)

    def _watch(self) -> None:
        """Turn away waiting songs whose client is gone, without waiting for their turn."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=_CANCEL_POLL_S):
                    return
                gone = [entry for entry in self._line if entry.listener.cancelled()]
                for entry in gone:
                    self._line.remove(entry)
                if gone:
                    self._notify()
            for entry in gone:
                self._finish(entry, SongCancelledError("the client cancelled the song while it waited"))

    def _finish(self, entry: _Entry, error: Exception | None) -> None:
        report = entry.report
        report.ended_s = time.monotonic() - report.submitted_s
        match error:
            case None:
                report.outcome = "done"
            case SongCancelledError():
                report.outcome = "cancelled"
            case UnavailableError():
                report.outcome = "unavailable"
            case _:
                report.outcome = "failed"
                _LOG.error("song %s failed", entry.job.name, exc_info=error)
        try:
            entry.listener.close(error)
        except Exception:
            _LOG.exception("song %s could not be closed", entry.job.name)
        self._on_end(report)
