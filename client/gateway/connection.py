"""What a connection may cost before anybody has asked for anything: uvicorn's HTTP/1.1, with two limits.

uvicorn closes a connection that says nothing after an answer, but waits for ever for the rest of a request's
head, the first one's too. Neither costs a key, so enough of them would leave songs no open files.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from client.gateway.options import Options


class LimitedProtocol(H11Protocol):
    """One connection. Closed without an answer: those over the limit, and heads that do not come in time."""

    def __init__(self, *, options: Options, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._options = options
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self._options.max_connections:
            transport.close()
        else:
            self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        """Between requests the time runs from the first byte on, whatever it belongs to: it may be the rest
        of a body that nobody reads. What comes later does not start it anew, so a trickle gains nothing."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._options.head_limit_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
