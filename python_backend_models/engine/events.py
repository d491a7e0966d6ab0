"""Reading the device's per-slot events without stopping it."""

from collections.abc import Mapping

import torch
from torch import Tensor


class EventReader:
    """Copies the events tensor to the host every few frames, asynchronously on CUDA.

    A read says what had happened when it was submitted, so each song's count of frames at that moment travels
    with it. On a CPU every call reads at once.

    Args:
        events: `[slots, 2]` int32 on the device, see `LaneState.events`.
        interval_frames: frames between two copies.
    """

    def __init__(self, events: Tensor, *, interval_frames: int) -> None:
        self._events = events
        self._interval = interval_frames
        self._since_copy = 0
        self._asynchronous = events.device.type == "cuda"
        self._in_flight: Mapping[int, tuple[int, int]] | None = None
        if self._asynchronous:
            self._host = torch.empty(events.shape, dtype=events.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()

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
        if not self._asynchronous:
            return self._pair(songs, self._events)
        self._since_copy += 1
        read: dict[int, tuple[int, int, int]] = {}
        late = self._since_copy >= 2 * self._interval
        if self._in_flight is not None and (urgent or late or self._copied.query()):
            # Waiting here when late is what bounds how far the host may enqueue ahead of the device.
            self._copied.synchronize()
            read = self._pair(self._in_flight, self._host)
            self._in_flight = None
        if self._in_flight is None and songs and (urgent or self._since_copy >= self._interval):
            self._host.copy_(self._events, non_blocking=True)
            self._copied.record()
            self._in_flight, self._since_copy = dict(songs), 0
        return read

    @staticmethod
    def _pair(songs: Mapping[int, tuple[int, int]], events: Tensor) -> dict[int, tuple[int, int, int]]:
        rows = events.tolist()
        return {key: (drawn, rows[slot][0], rows[slot][1]) for key, (slot, drawn) in songs.items()}
