"""A song's way through the stages: the order of the calls, the checks between them, and what is told to whom.

Knows no Triton: stages and listeners are protocols, so the same code runs over BLS in the server and over
engines in one process in tests. Which songs run when is `song_line`'s business.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from python_backend_models.prompt import Prompt
from python_backend_models.resample import StreamingResampler
from python_backend_models.window_gate import Place, WindowGate

_SONG_KEY_BITS = 63  # random, so that several orchestrators can share a talker
TALKER, DIT, VOCODER = "talker", "dit", "vocoder"
Answer = TypeVar("Answer")


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
        probe: whether it only serves to find out whether songs can be made.
    """

    name: str
    prompt: Prompt
    seed: int
    draw_seed: int
    lead_in_frames: int
    max_frames: int
    probe: bool = False


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

    def start(self, key: int, job: SongJob) -> TalkerWindow | None:
        """Begin the song; its first window, or None if there is none yet: then `next_window` asks again."""
        ...

    def next_window(self, key: int) -> TalkerWindow | None:
        """The song's next window, or None if there is none yet."""
        ...

    def end(self, key: int) -> None:
        """Forget the song; never raises."""
        ...

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
    """What is worth knowing about a song; times in seconds since it was submitted.

    Attributes:
        outcome: done, cancelled, unavailable or failed once the song is over.
        stage_s: time spent waiting for each stage's answers.
        stage_calls: and how many they were.
    """

    job: SongJob
    submitted_s: float
    started_s: float | None = None
    first_audio_s: float | None = None
    ended_s: float | None = None
    frames: int = 0
    samples: int = 0
    outcome: str = "running"
    stage_s: dict[str, float] = field(default_factory=dict)
    stage_calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCall:
    """A call that a song waits for, since when (`time.monotonic`)."""

    stage: str
    since_s: float


class SongRun:
    """One song, from its submission to its end.

    Args:
        gate: gives out places for windows in flight to the flow transformer.
        on_chunk: called after each chunk was handed to the listener.
    """

    def __init__(
        self,
        job: SongJob,
        stages: Stages,
        listener: Listener,
        *,
        gate: WindowGate | None = None,
        on_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        self._gate = gate or WindowGate(1)
        self._place: Place | None = None
        self.job, self.stages, self.listener = job, stages, listener
        self.key = secrets.randbits(_SONG_KEY_BITS) or 1
        self.report = SongReport(job, time.monotonic())
        self.call: StageCall | None = None
        self.abandoned = False
        self._on_chunk = on_chunk

    @property
    def age_s(self) -> float:
        """Seconds since the song was submitted."""
        return time.monotonic() - self.report.submitted_s

    def make(self) -> None:
        """Take the song through the stages, window by window, and hand out each chunk as it is decoded.

        Raises:
            SongCancelledError: the listener said so between two calls.
            Exception: whatever a stage raised.
        """
        self.report.started_s = self.age_s
        self._check()
        try:
            self._make_windows()
        finally:
            # Who abandons a song also ends it: this thread may have been the one that could not.
            if not self.abandoned:
                self._wait_for(TALKER, self.stages.end, self.key)

    def _make_windows(self) -> None:
        job, report, resampler = self.job, self.report, StreamingResampler()
        window = self._window(self.stages.start, self.key, job)
        carry = None
        while True:
            self._check()
            latent, carry = self._solve(window, carry)
            self._check()
            waveform = self._wait_for(VOCODER, self.stages.decode, latent, window.crop_samples)
            last = window.finish_reason is not None
            audio = resampler.push(waveform, flush=last).t().contiguous()
            self._check()
            self.listener.chunk(
                audio, frames_done=window.end_frame, job=job, finish_reason=window.finish_reason
            )
            if report.first_audio_s is None:
                report.first_audio_s = self.age_s
            report.frames, report.samples = window.end_frame, report.samples + len(audio)
            self._on_chunk()
            if last:
                return
            window = self._window(self.stages.next_window, self.key)

    def _window(self, ask: Callable[..., TalkerWindow | None], *arguments: Any) -> TalkerWindow:
        """Ask until there is a window: a song may wait for others' pages for minutes, and be cancelled."""
        window = self._wait_for(TALKER, ask, *arguments)
        while window is None:
            self._check()
            window = self._wait_for(TALKER, self.stages.next_window, self.key)
        return window

    def _solve(self, window: TalkerWindow, carry: Any) -> tuple[Any, Any]:
        first, since_s = carry is None, self.report.submitted_s
        with self._gate.enter(first=first, song_started_s=since_s, check=self._check) as self._place:
            return self._wait_for(DIT, self.stages.solve, window, self.job.seed, carry)

    def abandon(self) -> None:
        """Someone else ends the song, because its thread hangs in a call that may never return."""
        self.abandoned = True
        if self._place:
            self._place.leave()

    def _wait_for(self, stage: str, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a stage, leaving word of it for whoever watches over calls that never return."""
        self.call = call = StageCall(stage, time.monotonic())
        try:
            return function(*arguments)
        finally:
            self.call = None
            spent = self.report.stage_s
            spent[stage] = spent.get(stage, 0.0) + time.monotonic() - call.since_s
            self.report.stage_calls[stage] = self.report.stage_calls.get(stage, 0) + 1

    def _check(self) -> None:
        if self.abandoned:
            raise SongCancelledError("the song was given up")
        if self.listener.cancelled():
            raise SongCancelledError("the client cancelled the song")
