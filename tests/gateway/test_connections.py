"""Connections before anybody has asked for anything: heads that do not come, and more of them than may be."""

import contextlib
import http.client
import json
import socket
import threading

import pytest

from tests.client.fake_server import FakeServer, song_audio
from tests.gateway.conftest import MakeGateway
from tests.gateway.gateway import CAPTION, LYRICS, Gateway
from tests.gateway.scripts import Gated, whole
from tests.triton.server import wait_until

HALF_HEAD = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nX-Long: "
# A limit that a test which does send its heads keeps on a busy machine, too.
HEAD_LIMIT = ("--head-limit-s", "3")


def connect(gateway: Gateway, sent: bytes = b"") -> socket.socket:
    reader = socket.create_connection((gateway.host, gateway.port), timeout=60)
    reader.sendall(sent)
    return reader


def is_closed(reader: socket.socket) -> bool:
    """Waits for the gateway's next word, which must be that it has closed the connection."""
    try:
        return reader.recv(1000) == b""
    except ConnectionResetError:
        return True


def trickle(reader: socket.socket, stop: threading.Event) -> None:
    """A byte now and then, until told to stop or until nobody takes them."""
    with contextlib.suppress(OSError):
        while not stop.wait(0.1):
            reader.sendall(b"x")


@pytest.mark.parametrize("sent", [b"", HALF_HEAD], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_costs_the_connection(make_gateway: MakeGateway, sent: bytes) -> None:
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, *HEAD_LIMIT)
        assert is_closed(connect(gateway, sent))
        assert gateway.sing(max_new_tokens=1).status == 200


def test_a_head_that_trickles_in_costs_the_connection(make_gateway: MakeGateway) -> None:
    with FakeServer(whole) as server:
        gateway, stop = make_gateway(server.url, *HEAD_LIMIT), threading.Event()
        reader = connect(gateway, HALF_HEAD)
        thread = threading.Thread(target=trickle, args=(reader, stop))
        thread.start()
        try:
            assert is_closed(reader)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("rest", [b"GET /hea", b"x"], ids=["half a head", "a part of an unread body"])
def test_so_it_is_after_an_answer(make_gateway: MakeGateway, rest: bytes) -> None:
    """The body that the first request announces is of no use to its route, and is not waited for."""
    length = 0 if rest.startswith(b"GET") else 1000
    head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, *HEAD_LIMIT)
        reader = connect(gateway, head)
        received = b""
        while b"owned_by" not in received:
            received += reader.recv(10_000)
        reader.sendall(rest)
        assert is_closed(reader)


def test_requests_that_came_in_time_are_left_alone(make_gateway: MakeGateway) -> None:
    """A song that takes longer, a body that does, and an idle connection that has asked before."""
    songs = Gated()
    with FakeServer(songs) as server:
        gateway = make_gateway(server.url, *HEAD_LIMIT)
        idle, singing, sending = (gateway.connect() for _ in range(3))
        assert gateway.ask("GET", "/health", connection=idle).status == 200
        kept = idle.sock
        body = json.dumps({"input": LYRICS, "instructions": CAPTION, "response_format": "pcm"}).encode()
        streamed = json.dumps(json.loads(body) | {"stream": True}).encode()
        singing.request("POST", "/v1/audio/speech", body=streamed)
        song = singing.getresponse()
        received = song.read(1000)
        sending.putrequest("POST", "/v1/audio/speech")
        sending.putheader("Content-Length", str(len(body)))
        sending.endheaders(body[:10])
        # One that came after all of these has had its time.
        assert is_closed(connect(gateway))
        songs.open.set()
        sending.send(body[10:])
        assert sending.getresponse().read() == song_audio(250, 0).tobytes()
        assert received + song.read() == song_audio(250, 0).tobytes()
        assert gateway.ask("GET", "/health", connection=idle).status == 200
        assert idle.sock is kept


def test_more_connections_than_may_be_are_closed(make_gateway: MakeGateway) -> None:
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, "--max-connections", "3")
        asked = gateway.connect()
        assert gateway.ask("GET", "/health", connection=asked).status == 200
        held = [connect(gateway) for _ in range(2)]
        assert is_closed(connect(gateway))
        assert gateway.ask("GET", "/health", connection=asked).status == 200
        held[0].close()
        wait_until(lambda: answers(gateway), timeout_s=10, what="a place for a connection")
        held[1].close()


def answers(gateway: Gateway) -> bool:
    connection = gateway.connect()
    try:
        return gateway.ask("GET", "/health", connection=connection).status == 200
    except (ConnectionError, http.client.HTTPException):
        return False
    finally:
        connection.close()
