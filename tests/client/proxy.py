"""A TCP proxy in front of a server, whose connections a test can cut in the middle of a song."""

import selectors
import socket
import struct
import threading


class Proxy:
    """Carries bytes between `url` and `target` (both host:port) until it is cut."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._wish, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._carry, name="proxy")

    def cut(self, *, reset: bool = False) -> None:
        """End all connections at once, and take no more. With `reset` as a crashed machine's router would."""
        self._wish.send(b"r" if reset else b"c")

    def _carry(self) -> None:
        """In one thread, as a socket that another thread reads isn't closed until that returns."""
        peers: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, self._wake):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake in ready:
                    break
                for each in ready:
                    if each is self._listener:
                        here, there = each.accept()[0], socket.create_connection(self._target)
                        peers |= {here: there, there: here}
                        selector.register(here, selectors.EVENT_READ)
                        selector.register(there, selectors.EVENT_READ)
                    elif data := each.recv(65536):
                        peers[each].sendall(data)
                    else:  # ended by one side: so for the other
                        peers[each].shutdown(socket.SHUT_WR)
                        selector.unregister(each)
        if self._wake.recv(1) == b"r":
            for each in peers:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for each in (*peers, self._listener):
            each.close()

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()
        self._thread.join()
        self._wish.close()
        self._wake.close()
