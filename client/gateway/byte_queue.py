"""What is between a song and its reader: bytes in order, never more than a limit and one piece."""

import asyncio
import collections
from collections.abc import Callable

from client.gateway.waiting import within


class ByteQueue:
    """One producer, one consumer, one event loop. `on_change` hears by how many bytes it grew or shrank."""

    def __init__(
        self, limit_bytes: int, *, on_change: Callable[[int], None] = lambda grown_bytes: None
    ) -> None:
        self.held_bytes = 0
        self._limit_bytes, self._on_change = limit_bytes, on_change
        self._pieces: collections.deque[bytes] = collections.deque()
        self._closed = False
        self._error: Exception | None = None
        self._something, self._room = asyncio.Event(), asyncio.Event()

    async def put(self, piece: bytes) -> None:
        """Appends a piece, once the queue holds less than its limit: until then, the song waits."""
        while self.held_bytes >= self._limit_bytes:
            self._room.clear()
            await self._room.wait()
        self._pieces.append(piece)
        self._change(len(piece))
        self._something.set()

    def close(self, error: Exception | None = None) -> None:
        """No more pieces. The consumer gets what is there, then `error` or the end."""
        self._closed, self._error = True, error
        self._something.set()

    async def get(self, *, timeout_s: float | None = None) -> bytes | None:
        """The next piece; None at the end. Raises the error it was closed with, and asyncio.TimeoutError."""
        if not self._pieces and not self._closed:
            self._something.clear()
            await within(self._something.wait(), timeout_s)
        if self._pieces:
            piece = self._pieces.popleft()
            self._change(-len(piece))
            self._room.set()
            return piece
        if self._error is not None:
            raise self._error
        return None

    def discard(self) -> None:
        """Forget what is held."""
        self._pieces.clear()
        self._change(-self.held_bytes)

    def _change(self, grown_bytes: int) -> None:
        self.held_bytes += grown_bytes
        self._on_change(grown_bytes)
