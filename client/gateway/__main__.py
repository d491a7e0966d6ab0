"""Runs a gateway in the foreground. Ctrl-C or SIGTERM lets songs on their way end; a second one does not."""

import asyncio
import functools
import logging
import socket
import sys
from types import FrameType

import uvicorn

from client.gateway import options as gateway_options
from client.gateway.app import make_app
from client.gateway.connection import LimitedProtocol
from client.gateway.options import Options

# A GET carries the lyrics in its first line.
_MAX_HEAD_BYTES = 128 * 1024
_KEEP_ALIVE_S = 75
# Left alone, Linux keeps up to 4 MB of a connection and says that there is room again once a third of it
# is: a listener who takes MP3 as it sounds would look like one who takes nothing for a minute.
_SEND_BUFFER_BYTES = 128 * 1024
_FORCED_POLL_S = 0.1


def main() -> int:
    """The exit code."""
    options = gateway_options.read()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    log = logging.getLogger("gateway")
    if not options.keys and not options.is_local:
        log.warning("no key is set: whoever reaches %s can ask for songs", options.host)
    try:
        listener = _listen(options)
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", options.host, options.port, error)
        return 1
    config = uvicorn.Config(
        make_app(options),
        loop="asyncio",
        http=functools.partial(LimitedProtocol, options=options),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        # Its lines would have the lyrics of every GET in them; delivery.py logs songs.
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(options.drain_s),
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    scheme = "https" if options.tls_certificate else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    log.info("listening on %s://%s:%d/ for songs of %s", scheme, host, listener.getsockname()[1], options.url)
    _Server(config).run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    """uvicorn takes a second Ctrl-C as the order to end at once, but not a second SIGTERM."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drop = asyncio.ensure_future(self._drop_connections_when_forced())
        try:
            await super().shutdown(sockets)
        finally:
            drop.cancel()

    async def _drop_connections_when_forced(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(_FORCED_POLL_S)
        # From Python 3.12 on, a server is not closed before its last connection is.
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _listen(options: Options) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.create_server((options.host, options.port), family=family, backlog=512)
    # Accepted connections inherit both.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    # What is left in the buffers of a reader that takes nothing would otherwise hold its connection for ever:
    # the kernel gives up after this.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = round(2000 * options.stall_limit_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


if __name__ == "__main__":
    sys.exit(main())
