"""Reading the device's per-slot events without stopping it."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy of a tensor to the host that runs while the host goes on."""

    def start(self) -> None:
        """Copy what the tensor holds once the work that is already queued is done."""

    def done(self) -> bool:
        """Whether the copy that was started last is there, without waiting for it."""

    def wait(self) -> Tensor:
        """The copy that was started last, on the CPU; valid until the next start."""


class CudaCopy:
    """Into pinned memory, on the current stream."""

    def __init__(self, source: Tensor) -> None:
        self._source = source
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copied = torch.cuda.Event()

    def start(self) -> None:
        self._host.copy_(self._source, non_blocking=True)
        self._copied.record()

    def done(self) -> bool:
        return self._copied.query()

    def wait(self) -> Tensor:
        self._copied.synchronize()
        return self._host


class EventReader:
    """Copies the events tensor to the host every few frames, asynchronously on CUDA.

    A read says what had happened when it was submitted, so each song's count of frames at that moment travels
    with it. On a CPU every call reads at once.

    Args:
        events: `[slots, 2]` int32 on the device, see `LaneState.events`.
        interval_frames: frames between two copies.
        copy: of the events; None for CUDA's on a CUDA device, and for none elsewhere.
    """

    def __init__(self, events: Tensor, *, interval_frames: int, copy: Copy | None = None) -> None:
        self._events = events
        self._interval = interval_frames
        self._since_copy = 0
        self._copy = CudaCopy(events) if copy is None and events.device.type == "cuda" else copy
        self._in_flight: Mapping[int, tuple[int, int]] | None = None

    def advance(
        self, songs: Mapping[int, tuple[int, int]], *, urgent: bool
    ) -> dict[int, tuple[int, int, int]]:
        """Call once per engine step.

        Args:
            songs: key -> (slot, frames drawn) of the live songs.
            urgent: submit a copy now; with no copy-free work left the caller passes this every time.

        Returns:
            key -> (frames drawn at the time of the read, frame of a stop, frame of a broken value) of the
            read that has completed, or nothing.
        """
        if self._copy is None:
            return self._pair(songs, self._events)
        self._since_copy += 1
        read: dict[int, tuple[int, int, int]] = {}
        late = self._since_copy >= 2 * self._interval
        if self._in_flight is not None and (urgent or late or self._copy.done()):
            # Waiting here when late is what bounds how far the host may enqueue ahead of the device.
            read = self._pair(self._in_flight, self._copy.wait())
            self._in_flight = None
        if self._in_flight is None and songs and (urgent or self._since_copy >= self._interval):
            self._copy.start()
            self._in_flight, self._since_copy = dict(songs), 0
        return read

    @staticmethod
    def _pair(songs: Mapping[int, tuple[int, int]], events: Tensor) -> dict[int, tuple[int, int, int]]:
        rows = events.tolist()
        return {key: (drawn, rows[slot][0], rows[slot][1]) for key, (slot, drawn) in songs.items()}
