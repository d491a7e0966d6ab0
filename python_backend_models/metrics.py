"""What the stages count, and how it reaches the server's metrics page.

Counting is a few additions under a lock in the stage's process; a thread publishes what changed now and then,
because each update of a Triton metric is a message to the server's process, too slow for a frame step.
Histograms are counters `_bucket{le}`, `_sum` and `_count`, which PromQL takes for one: not every Triton has
custom histograms. Every series carries the model instance's name in `instance_name`.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from python_backend_models.contract import OUTPUT_RATE_HZ
from python_backend_models.orchestrator import SongReport

_LOG = logging.getLogger(__name__)
_CLOSE_WITHIN_S = 2.0
_INFINITE = "+Inf"

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FACTORS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Family:
    """One name on the metrics page."""

    name: str
    kind: str  # counter or gauge
    meaning: str


class Series(Protocol):
    """One labelled value on the page."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


Sink = Callable[[Family, Mapping[str, str]], Series]


class Board:
    """All numbers of one model instance.

    Args:
        heartbeat: name of a counter of the rounds in which these numbers reached the page.
    """

    def __init__(self, *, heartbeat: str) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}
        self._values: dict[tuple[str, Labels], float] = {}
        self._asked: dict[str, Callable[[], float]] = {}
        self.heartbeat = heartbeat
        self.counter(heartbeat, "rounds in which this stage's numbers reached this page; still: they are old")

    def counter(self, name: str, meaning: str, *, label: str = "", values: Sequence[str] = ()) -> None:
        """Declare something that only grows; with a label, one series for each of `values`."""
        self._declare(Family(name, "counter", meaning), label, values)

    def gauge(self, name: str, meaning: str) -> None:
        """Declare something that goes up and down."""
        self._declare(Family(name, "gauge", meaning), "", ())

    def histogram(self, name: str, meaning: str, *, bounds: Sequence[float]) -> None:
        """Declare a distribution; `bounds` are its buckets' upper ends."""
        steps = [*(f"{bound:g}" for bound in bounds), _INFINITE]
        self.counter(f"{name}_bucket", f"{meaning}: how many were at most le", label="le", values=steps)
        self.counter(f"{name}_sum", f"{meaning}: sum")
        self.counter(f"{name}_count", f"{meaning}: count")

    def _declare(self, family: Family, label: str, values: Sequence[str]) -> None:
        if family.name in self._families:
            raise ValueError(f"{family.name} is declared twice")
        self._families[family.name] = family
        for value in values or ("",):
            self._values[family.name, _labels(label, value)] = 0.0

    def add(self, name: str, amount: float = 1.0, **label: str) -> None:
        """Count. Raises KeyError for a series that was not declared."""
        with self._lock:
            self._values[name, tuple(label.items())] += amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge. Raises KeyError for one that was not declared."""
        with self._lock:
            self._values[name, ()] += value - self._values[name, ()]

    def ask(self, name: str, value: Callable[[], float]) -> None:
        """Have a gauge's value asked for whenever the numbers are read. Raises KeyError as `set`."""
        self.set(name, value())
        self._asked[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            for bucket, labels in self._values:
                if bucket == f"{name}_bucket" and value <= float(labels[0][1]):
                    self._values[bucket, labels] += 1
            self._values[f"{name}_sum", ()] += value
            self._values[f"{name}_count", ()] += 1

    def read(self) -> dict[tuple[Family, Labels], float]:
        """A copy of every value."""
        for name, value in list(self._asked.items()):
            self.set(name, value())
        with self._lock:
            return {(self._families[name], labels): value for (name, labels), value in self._values.items()}

    def read_heartbeat(self) -> dict[tuple[Family, Labels], float]:
        """The heartbeat alone."""
        with self._lock:
            return {(self._families[self.heartbeat], ()): self._values[self.heartbeat, ()]}


def _labels(label: str, value: str) -> Labels:
    return ((label, value),) if label else ()


class Publisher:
    """Brings a board's numbers to the page until it is closed.

    Args:
        sink: makes a series of the page; None where there is no page, then nothing is done.
        instance_name: of the model instance.
        every_s: time from one round to the next.
    """

    def __init__(self, board: Board, sink: Sink | None, *, instance_name: str, every_s: float) -> None:
        self._board, self._every_s = board, every_s
        self._sink = sink  # kept: it holds Triton's families, which must outlive their series
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._published: dict[tuple[Family, Labels], float] = {}
        self._series: dict[tuple[Family, Labels], Series] = {}
        self._thread: threading.Thread | None = None
        if sink is None:
            return
        for family, labels in board.read():
            self._series[family, labels] = sink(family, dict(labels) | {"instance_name": instance_name})
            self._published[family, labels] = 0.0
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Bring over what changed, the heartbeat last."""
        with self._turn:
            self._bring(self._board.read())
            self._board.add(self._board.heartbeat)
            self._bring(self._board.read_heartbeat())

    def _bring(self, values: Mapping[tuple[Family, Labels], float]) -> None:
        for key, value in values.items():
            change = value - self._published[key]
            if not change:
                continue
            if key[0].kind == "gauge":
                self._series[key].set(value)
            else:
                self._series[key].increment(change)
            self._published[key] = value

    def close(self) -> None:
        """Stop; the last changes may be missing from the page, which goes away with the server."""
        self._closed.set()
        if self._thread is not None:
            # Not for ever: a message to a server that is going away may never be answered.
            self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.publish()
            except Exception:
                _LOG.exception("metrics are not published any more")
                return


# ------------------------------------------------------------------ what is counted where

OUTCOMES = ("done", "cancelled", "refused", "unavailable", "failed")
STAGES = ("talker", "dit", "vocoder")


def music3_board() -> Board:
    """Of the front door."""
    board = Board(heartbeat="music3_published_total")
    board.gauge("music3_live_songs", "songs in the making")
    board.gauge("music3_waiting_songs", "songs that wait for a place")
    board.gauge("music3_places", "songs that can be in the making at once")
    board.gauge("music3_accepting", "1 while new songs are accepted, 0 while the server drains")
    board.counter("music3_songs_total", "songs by what came of them", label="outcome", values=OUTCOMES)
    board.counter("music3_frames_total", "frames (25 a second) whose sound was sent")
    board.counter("music3_audio_seconds_total", "seconds of sound sent")
    board.histogram("music3_queue_seconds", "wait for a place", bounds=SECONDS)
    board.histogram("music3_first_audio_seconds", "from request to first sound", bounds=SECONDS)
    board.histogram("music3_song_seconds", "from request to end, songs that were done", bounds=SECONDS)
    board.histogram("music3_realtime_factor", "making time over length, songs that were done", bounds=FACTORS)
    board.counter("music3_stage_seconds_total", "time songs waited for a stage", label="stage", values=STAGES)
    board.counter("music3_stage_calls_total", "calls to a stage", label="stage", values=STAGES)
    board.counter("music3_lost_calls_total", "calls that were given up", label="stage", values=STAGES)
    return board


def talker_board() -> Board:
    """Of the autoregressive stage."""
    board = Board(heartbeat="music3_talker_published_total")
    board.gauge("music3_talker_live_songs", "songs that hold a slot")
    board.gauge("music3_talker_waiting_songs", "songs that wait for a slot or for pages")
    board.gauge("music3_talker_slots", "slots there are")
    board.gauge("music3_talker_free_slots", "slots that no song holds")
    board.gauge("music3_talker_pages", "key-value pages there are")
    board.gauge("music3_talker_free_pages", "key-value pages that no song holds")
    board.gauge("music3_talker_shared_pages", "pages that songs would hold in copies if they were not shared")
    board.counter("music3_talker_steps_total", "frame steps")
    board.counter("music3_talker_step_seconds_total", "time in frame steps")
    board.counter("music3_talker_busy_seconds_total", "time in steps of any kind")
    board.counter("music3_talker_frames_total", "frames drawn, of all songs")
    board.counter("music3_talker_prefill_steps_total", "steps that worked on a prompt too")
    board.counter("music3_talker_prefill_seconds_total", "time in steps that worked on a prompt too")
    return board


def acoustic_board(stage: str) -> Board:
    """Of `dit` or `vocoder`."""
    board = Board(heartbeat=f"music3_{stage}_published_total")
    board.counter(f"music3_{stage}_batches_total", "batches that Triton formed")
    board.counter(f"music3_{stage}_windows_total", "windows in them")
    board.counter(f"music3_{stage}_failed_windows_total", "windows that were answered with an error")
    board.counter(f"music3_{stage}_batch_seconds_total", "time computing them")
    return board


# ------------------------------------------------------------------ and how


def count_batch(board: Board, stage: str, windows: int, failed: int, seconds: float) -> None:
    """Count one batch of `dit` or `vocoder`."""
    board.add(f"music3_{stage}_batches_total")
    board.add(f"music3_{stage}_windows_total", windows)
    board.add(f"music3_{stage}_failed_windows_total", failed)
    board.add(f"music3_{stage}_batch_seconds_total", seconds)


def count_step(
    board: Board, census: Mapping[str, int], *, frames: int, prefilled: bool, seconds: float
) -> None:
    """Count one step of the talker; `census` is its engine's."""
    gauges = {
        "live_songs": "live",
        "waiting_songs": "waiting",
        "free_slots": "slots_free",
        "free_pages": "pages_free",
        "shared_pages": "pages_shared",
    }
    for gauge, count in gauges.items():
        board.set(f"music3_talker_{gauge}", census[count])
    if frames or prefilled:
        board.add("music3_talker_busy_seconds_total", seconds)
    if prefilled:
        board.add("music3_talker_prefill_steps_total")
        board.add("music3_talker_prefill_seconds_total", seconds)
    if frames:
        board.add("music3_talker_steps_total")
        board.add("music3_talker_frames_total", frames)
        board.add("music3_talker_step_seconds_total", seconds)


def count_song(board: Board, report: SongReport) -> None:
    """Count one song that is over."""
    board.add("music3_songs_total", outcome=report.outcome)
    board.add("music3_frames_total", report.frames)
    board.add("music3_audio_seconds_total", report.samples / OUTPUT_RATE_HZ)
    for stage, seconds in report.stage_s.items():
        board.add("music3_stage_seconds_total", seconds, stage=stage)
        board.add("music3_stage_calls_total", report.stage_calls[stage], stage=stage)
    if report.started_s is not None:
        board.observe("music3_queue_seconds", report.started_s)
    if report.first_audio_s is not None:
        board.observe("music3_first_audio_seconds", report.first_audio_s)
    if report.outcome == "done" and report.samples:
        board.observe("music3_song_seconds", report.ended_s)
        making_s = report.ended_s - report.started_s
        board.observe("music3_realtime_factor", making_s * OUTPUT_RATE_HZ / report.samples)
