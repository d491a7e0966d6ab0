"""Ports for servers that a test starts as processes of their own."""

import contextlib
import random
import socket

# Below what Linux gives to clients' sockets (from 32,768): none of them can take a port between its being
# chosen here and the server's binding it, which a tritonserver does seconds later.
_LOWEST, _HIGHEST = 20_000, 32_767
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on. Raises RuntimeError when there are too few."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(_TRIES):
            if len(found) == count:
                return found
            port = random.randint(_LOWEST, _HIGHEST)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    raise RuntimeError(f"no {count} free ports between {_LOWEST} and {_HIGHEST}")
