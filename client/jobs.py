"""Songs as files: what to ask for and where to put it, one job each, and several in flight.

A job writes to its file as the sound arrives. In a folder of many songs (`resumable`) it writes beside it
first and puts a `.json` next to the finished song, so that a second run makes only what is missing.
"""

import contextlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

from client.audio_files import AudioSink, encoding_for, encoding_in, open_sink
from client.errors import Cancelled, Music3Error, ServerUnavailable
from client.music3_client import Music3Client, SongStream
from client.player import Player, Program
from client.wire import AudioEncoding, Chunk

_FIRST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 30.0


@dataclass(frozen=True)
class Request:
    """What a song is made from."""

    caption: str
    lyrics: str
    seed: int = 0
    max_frames: int | None = None


@dataclass(frozen=True)
class Job:
    """A song to make: its request and its file."""

    name: str
    request: Request
    path: Path
    float_wav: bool = False
    resumable: bool = False

    @property
    def note_path(self) -> Path:
        """Where a resumable job says what its song was made from."""
        return self.path.with_suffix(self.path.suffix + ".json")

    @property
    def audio_encoding(self) -> AudioEncoding:
        """What to ask the server for."""
        return encoding_for(self.path, float_wav=self.float_wav)

    def done(self) -> bool:
        """Whether the song of exactly this request and sample format is there from an earlier run."""
        if not (self.resumable and self.path.exists() and self.note_path.exists()):
            return False
        try:
            note = json.loads(self.note_path.read_text(encoding="utf-8"))
            if not isinstance(note, dict) or note.get("request") != asdict(self.request):
                return False
            # Notes did not always say it; then the file does.
            found = note["audio_encoding"] if "audio_encoding" in note else encoding_in(self.path)
            return found == self.audio_encoding
        except (OSError, ValueError):
            return False


@dataclass
class Outcome:
    """What became of a job. Times are in seconds from the request; `samples` counts sample pairs."""

    job: Job
    frames: int = 0
    samples: int = 0
    sample_rate_hz: int = 0
    first_audio_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str | None = None
    warnings: tuple[str, ...] = ()
    error: Exception | None = None
    skipped: bool = False

    @property
    def audio_s(self) -> float:
        """Seconds of sound in the file."""
        return self.samples / self.sample_rate_hz if self.sample_rate_hz else 0.0

    def summary(self) -> str:
        """One line: frames, samples, rate, time to first audio, total time, real-time factor."""
        speed = f", RTF {self.total_s / self.audio_s:.3f}" if self.audio_s else ""
        return (
            f"{self.job.path}: {self.frames} frames, {self.samples} samples at {self.sample_rate_hz} Hz "
            f"({self.audio_s:.2f} s), first audio after {self.first_audio_s:.2f} s, "
            f"total {self.total_s:.2f} s{speed}, finish reason {self.finish_reason or 'none'}"
        )


class Listener(Protocol):
    """Who is told how jobs go; called from the jobs' threads."""

    def started(self, job: Job) -> None: ...

    def chunk(self, chunk: Chunk, outcome: Outcome) -> None: ...

    def retrying(self, job: Job, error: Music3Error, wait_s: float) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class Runner:
    """Runs jobs on one client, `in_flight` at a time, in order. `retries` is how often a job asks again
    when the server has no place or the connection broke; `program` plays the songs as they come."""

    def __init__(
        self,
        client: Music3Client,
        listener: Listener,
        *,
        in_flight: int = 1,
        retries: int = 0,
        deadline_s: float | None = None,
        program: Program | None = None,
    ) -> None:
        self._client, self._listener = client, listener
        self._in_flight, self._retries, self._deadline_s = in_flight, retries, deadline_s
        self._program = program
        self._stopping = threading.Event()
        self._players: set[Player] = set()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """All jobs' outcomes, in order. KeyboardInterrupt cancels what runs, waits for the files to be
        closed, and goes on up."""
        with ThreadPoolExecutor(self._in_flight, thread_name_prefix="song") as pool:
            futures = [pool.submit(self._run, job) for job in jobs]
            try:
                wait(futures)
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Cancel the songs on their way and start no more."""
        self._stopping.set()
        self._client.cancel()
        for player in list(self._players):
            player.stop()

    def _run(self, job: Job) -> Outcome:
        outcome = Outcome(job)
        if job.done():
            outcome.skipped = True
        else:
            self._listener.started(job)
            self._attempts(job, outcome)
        self._listener.ended(outcome)
        return outcome

    def _attempts(self, job: Job, outcome: Outcome) -> None:
        wait_s = _FIRST_RETRY_S
        for attempt in range(self._retries + 1):
            try:
                outcome.error = None
                self._attempt(job, outcome)
                return
            except (Music3Error, OSError) as error:
                outcome.error = error
                last = attempt == self._retries or not isinstance(error, ServerUnavailable)
                if last or self._stopping.is_set():
                    return
                self._listener.retrying(job, error, wait_s)
            if self._stopping.wait(wait_s):
                return
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    def _attempt(self, job: Job, outcome: Outcome) -> None:
        path = job.path.with_name(f"{job.path.stem}.part{job.path.suffix}") if job.resumable else job.path
        outcome.frames, outcome.samples, outcome.warnings = 0, 0, ()
        with self._client.stream(
            job.request.caption,
            job.request.lyrics,
            seed=job.request.seed,
            max_frames=job.request.max_frames,
            audio_encoding=job.audio_encoding,
            deadline_s=self._deadline_s,
        ) as song:
            # Looked at after the song is known to the client: so `stop` either sees it or is seen here.
            if self._stopping.is_set():
                raise Cancelled("cancelled")
            self._receive(song, path, outcome)
            outcome.total_s = song.progress.elapsed_s
        if job.resumable:
            _keep(outcome, path)

    def _receive(self, song: SongStream, path: Path, outcome: Outcome) -> None:
        with contextlib.ExitStack() as stack:
            sinks: list[AudioSink] = []
            for chunk in song:
                if not sinks:
                    outcome.first_audio_s, outcome.sample_rate_hz = chunk.elapsed_s, chunk.sample_rate_hz
                    sinks = self._open_sinks(path, chunk, stack)
                for sink in sinks:
                    sink.write(chunk.audio)
                outcome.samples += len(chunk.audio)
                outcome.frames, outcome.total_s = chunk.frames_done, chunk.elapsed_s
                outcome.finish_reason, outcome.warnings = chunk.finish_reason, song.progress.warnings
                self._listener.chunk(chunk, outcome)

    def _open_sinks(self, path: Path, chunk: Chunk, stack: contextlib.ExitStack) -> list[AudioSink]:
        file = open_sink(path, sample_rate_hz=chunk.sample_rate_hz, dtype=chunk.audio.dtype)
        stack.callback(file.close)
        if self._program is None:
            return [file]
        player = Player(self._program, sample_rate_hz=chunk.sample_rate_hz)
        self._players.add(player)
        stack.callback(self._close_player, player)
        return [file, player]

    def _close_player(self, player: Player) -> None:
        # A song that failed has fallen silent in mid-word already: what did arrive is still played.
        if self._stopping.is_set():
            player.stop()
        player.close()
        self._players.discard(player)


def _keep(outcome: Outcome, written: Path) -> None:
    """Gives a finished song its name, and then the note that says so."""
    job = outcome.job
    note = {
        "request": asdict(job.request),
        "audio_encoding": job.audio_encoding,
        "frames": outcome.frames,
        "samples": outcome.samples,
        "sample_rate_hz": outcome.sample_rate_hz,
        "finish_reason": outcome.finish_reason,
        "warnings": outcome.warnings,
    }
    job.note_path.unlink(missing_ok=True)
    written.replace(job.path)
    job.note_path.write_text(json.dumps(note, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
