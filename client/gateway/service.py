"""What all requests of a gateway share: its one connection to the server, its options, its places."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Final

from client.async_client import AsyncMusic3Client
from client.errors import ServerUnavailable
from client.gateway.errors import ApiError
from client.gateway.metrics import Metrics
from client.gateway.options import Options

# /health may be asked by anybody, often: the server is asked at most this often.
_READY_KEPT_S: Final = 1.0


class Service:
    """Made inside the running event loop, as its gRPC client is."""

    def __init__(self, options: Options, metrics: Metrics) -> None:
        self.options, self.metrics = options, metrics
        self.client = AsyncMusic3Client(options.url, model=options.model)
        self.live_songs = 0
        self._ready, self._ready_at_s = False, float("-inf")
        self._check: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One of the gateway's places for a song. Raises ApiError 429 when all are taken."""
        if self.live_songs >= self.options.max_songs:
            raise ApiError(
                429, f"{self.live_songs} songs are on their way here, which is the most; try again later"
            )
        self.live_songs += 1
        self.metrics.live.set(self.live_songs)
        try:
            yield
        finally:
            self.live_songs -= 1
            self.metrics.live.set(self.live_songs)

    async def is_ready(self) -> bool:
        """Whether the server says that the model is ready."""
        if self._check is None and time.monotonic() - self._ready_at_s > _READY_KEPT_S:
            self._check = asyncio.create_task(self._ask_server())
        if self._check is not None:
            # Many who ask together ask the server once; one who leaves takes no answer from the others.
            await asyncio.shield(self._check)
        return self._ready

    async def _ask_server(self) -> None:
        try:
            await self.client.check_ready()
            self._ready = True
        except ServerUnavailable:
            self._ready = False
        finally:
            self._ready_at_s = time.monotonic()
            self._check = None
