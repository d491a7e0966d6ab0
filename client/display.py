"""How a command's songs are shown: moving bars on a terminal, plain lines where nobody looks on.

Both write to standard error, so that standard output holds nothing but the summaries.
"""

import sys
import threading
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from client.errors import Cancelled, Music3Error
from client.jobs import Job, Outcome
from client.wire import Chunk


class PlainDisplay:
    """One line per event. `file` is where they go."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file if file is not None else sys.stderr
        self._lock = threading.Lock()

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.flush()

    def started(self, job: Job) -> None:
        """A song was asked for."""
        self.line(f"{job.name}: seed {job.request.seed}, waiting for the first audio")

    def chunk(self, chunk: Chunk, outcome: Outcome) -> None:
        """Audio arrived."""
        for warning in chunk.warnings:
            self.line(f"{outcome.job.name}: warning: {warning}")
        self.line(
            f"{outcome.job.name}: {chunk.frames_done}/{chunk.frame_cap} frames, "
            f"{outcome.audio_s:.1f} s of audio, first audio after {outcome.first_audio_s:.2f} s"
        )

    def retrying(self, job: Job, error: Music3Error, wait_s: float) -> None:
        """A song will be asked for again."""
        self.line(f"{job.name}: {error.message}; asking again in {wait_s:.0f} s")

    def ended(self, outcome: Outcome) -> None:
        """A song is done, was there already, or failed."""
        for line in describe_end(outcome):
            self.line(line)

    def line(self, text: str) -> None:
        """One whole line, also with several songs writing at once."""
        with self._lock:
            print(text, file=self._file, flush=True)


class RichDisplay(PlainDisplay):
    """A bar per song: frames done, seconds of audio, time to first audio."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=self._file, highlight=False),
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "RichDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def started(self, job: Job) -> None:
        """A song was asked for: its bar pulses until a cap is known."""
        if job.name not in self._tasks:
            self._tasks[job.name] = self._progress.add_task(job.name, total=None, state="")
        self._progress.update(self._tasks[job.name], total=None, completed=0, state="waiting for audio")

    def chunk(self, chunk: Chunk, outcome: Outcome) -> None:
        """Audio arrived: the bar moves. A song may stop before its cap."""
        for warning in chunk.warnings:
            self.line(f"{outcome.job.name}: warning: {warning}")
        state = (
            f"{chunk.frames_done}/{chunk.frame_cap} frames  {outcome.audio_s:.1f} s of audio  "
            f"first after {outcome.first_audio_s:.2f} s"
        )
        total = chunk.frames_done if chunk.finish_reason else chunk.frame_cap
        self._progress.update(
            self._tasks[outcome.job.name], total=total, completed=chunk.frames_done, state=state
        )

    def ended(self, outcome: Outcome) -> None:
        """A song is done, was there already, or failed."""
        super().ended(outcome)
        task = self._tasks.get(outcome.job.name)
        if task is not None:
            self._progress.stop_task(task)

    def line(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, markup=False, soft_wrap=True)


def describe_end(outcome: Outcome) -> list[str]:
    """What is said of a song at its end beside its summary: nothing when all went well."""
    job, error = outcome.job, outcome.error
    if outcome.skipped:
        return [f"{job.name}: there already"]
    if error is None:
        return []
    lines = [f"{job.name}: {'' if isinstance(error, Cancelled) else 'failed: '}{error}"]
    if outcome.samples:
        lines.append(
            f"{job.name}: what had arrived was kept: {outcome.frames} frames, {outcome.audio_s:.2f} s"
        )
    return lines


def make_display() -> PlainDisplay:
    """Bars when standard error is a terminal, else lines."""
    return RichDisplay() if sys.stderr.isatty() else PlainDisplay()
