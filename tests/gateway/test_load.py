"""Readers that leave, stall or are many; a gateway that is told to stop. The songs are a fake server's."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.client.fake_server import FakeServer, Script, song_audio
from tests.gateway.conftest import MakeGateway, StandIn
from tests.gateway.gateway import CAPTION, LYRICS, Answer, Gateway
from tests.gateway.scripts import Endless, Gated, nothing, one_chunk, paced, whole
from tests.triton.server import wait_until

IDLE, STREAMING = 50, 8
DELIVERIES = ({}, {"stream": True}, {"stream": True, "response_format": "mp3"}, {"stream_format": "sse"})


def begin(gateway: Gateway, **fields: object) -> http.client.HTTPConnection:
    """A song that is asked for; nothing of its answer is read."""
    connection = gateway.connect()
    body = json.dumps({"input": LYRICS, "instructions": CAPTION, **fields})
    connection.request("POST", "/v1/audio/speech", body=body)
    return connection


def begin_raw(gateway: Gateway, **fields: object) -> socket.socket:
    """The same on a socket that holds little, so that what is not read stays with the gateway."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    reader.connect((gateway.host, gateway.port))
    body = json.dumps({"input": LYRICS, "instructions": CAPTION, **fields}).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {gateway.host}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader.sendall(head.encode() + body)
    return reader


@pytest.mark.parametrize("fields", DELIVERIES, ids=str)
@pytest.mark.parametrize("script", [nothing, one_chunk], ids=["waiting", "being written"])
def test_a_reader_that_leaves_takes_its_song_with_it(
    stand_in: StandIn, script: Script, fields: dict[str, object]
) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    server.script = script
    connection = begin(gateway, **fields)
    wait_until(lambda: len(server.requests) == 1, timeout_s=10, what="the song's request")
    if script is one_chunk and fields:
        assert connection.getresponse().read1(10)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert server.cancelled.wait(10)
    line = f"song {server.requests[0].id}: client_gone"
    wait_until(lambda: line in gateway.log(), timeout_s=10, what="the song's line")


def test_a_slow_reader_does_not_grow_memory(make_gateway: MakeGateway) -> None:
    """Backpressure: the song is as fast as it is taken, and it never ends."""
    endless = Endless()
    buffer_bytes, chunk_bytes = 2**20, 100 * 1280 * 4
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, "--buffer-bytes", str(buffer_bytes), "--stall-limit-s", "3")
        gateway.sing(max_new_tokens=1)
        server.script = endless
        before_bytes, before_files = gateway.rss_bytes(), open_files(gateway)
        reader = begin_raw(gateway, stream=True)
        grown_bytes, held_bytes = 0, 0.0
        while not server.cancelled.is_set():
            grown_bytes = max(grown_bytes, gateway.rss_bytes() - before_bytes)
            held_bytes = max(held_bytes, gateway.metric("buffered_bytes"))
            time.sleep(0.1)
        # The queue was full, and held no more than it may; gRPC held some more, and then the server waited.
        assert buffer_bytes <= held_bytes <= buffer_bytes + chunk_bytes
        assert grown_bytes < 64 * 2**20
        assert endless.taken_bytes < 64 * 2**20
        server.script = whole
        assert gateway.sing(response_format="pcm").body == song_audio(250, 0).tobytes()
        assert gateway.metric("songs_total", outcome="slow_reader", delivery="audio") == 1
        assert gateway.metric("buffered_bytes") == 0
        # Its connection goes too, although the reader has neither read nor closed it.
        wait_until(lambda: open_files(gateway) <= before_files, timeout_s=20, what="the connection to go")
        reader.close()


def open_files(gateway: Gateway) -> int:
    return sum(1 for _ in Path(f"/proc/{gateway.process.pid}/fd").iterdir())


def test_a_slow_but_steady_reader_gets_its_song(make_gateway: MakeGateway) -> None:
    """The stall limit is for a reader that takes nothing: this one needs longer than it for its song."""
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, "--buffer-bytes", "200000", "--stall-limit-s", "1")
        reader = begin_raw(gateway, stream=True, response_format="pcm", max_new_tokens=300)
        received = bytearray()
        begun_s = time.monotonic()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            piece = reader.recv(150_000)
            assert piece, "the song was cut off"
            received += piece
            time.sleep(0.05)
        assert time.monotonic() - begun_s > 1.5
        reader.close()
    assert unchunked(bytes(received).split(b"\r\n\r\n", 1)[1]) == song_audio(300, 0).tobytes()


def unchunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    content = b""
    while True:
        size, body = body.split(b"\r\n", 1)
        length = int(size, 16)
        if not length:
            return content
        content, body = content + body[:length], body[length + 2 :]


def test_idle_and_streaming_connections_do_not_disturb_each_other(stand_in: StandIn) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    server.script = paced(0.3)
    idle = [gateway.connect() for _ in range(IDLE)]
    for connection in idle:
        assert gateway.ask("GET", "/health", connection=connection).status == 200
    answers: dict[int, Answer] = {}

    def stream(seed: int) -> None:
        answers[seed] = gateway.sing(seed=seed, stream=True, response_format="pcm", max_new_tokens=500)

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(STREAMING)]
    for thread in threads:
        thread.start()
    latencies_s = []
    # Each idle connection is the same one as before, and is answered while the songs go on.
    for connection in idle:
        begun_s = time.monotonic()
        kept = connection.sock
        assert gateway.ask("GET", "/v1/models", connection=connection).status == 200
        assert connection.sock is kept
        latencies_s.append(time.monotonic() - begun_s)
    for thread in threads:
        thread.join()
    for seed, answer in answers.items():
        np.testing.assert_array_equal(np.frombuffer(answer.body, "<i2"), song_audio(500, seed).reshape(-1))
        # Five windows, 0.3 s apart: the sound came while the song was being written, not at its end.
        first_s, last_s = answer.arrivals[0][0], answer.arrivals[-1][0]
        assert last_s - first_s > 0.6
    print(f"\nslowest of {IDLE} idle connections while {STREAMING} stream: {1000 * max(latencies_s):.0f} ms")
    for connection in idle:
        assert gateway.ask("GET", "/health", connection=connection).status == 200
        connection.close()


def test_stopping_lets_songs_end(make_gateway: MakeGateway) -> None:
    songs = Gated()
    with FakeServer(songs) as server:
        gateway = make_gateway(server.url)
        idle = gateway.connect()
        gateway.ask("GET", "/health", connection=idle)
        answer = begin(gateway, stream=True, response_format="pcm").getresponse()
        received = answer.read(1000)
        os.kill(gateway.process.pid, signal.SIGTERM)
        wait_until(lambda: not accepts(gateway), timeout_s=10, what="new connections to be refused")
        assert gateway.process.poll() is None
        songs.open.set()
        received += answer.read()
        assert received == song_audio(250, 0).tobytes()
        gateway.process.wait(10)
        assert not server.cancelled.is_set()


def test_stopping_gives_up_songs_that_take_too_long(make_gateway: MakeGateway) -> None:
    with FakeServer(one_chunk) as server:
        gateway = make_gateway(server.url, "--drain-s", "1")
        answer = begin(gateway, stream=True).getresponse()
        assert answer.read1(10)
        os.kill(gateway.process.pid, signal.SIGTERM)
        assert server.cancelled.wait(10)
        gateway.process.wait(10)
        with pytest.raises(http.client.IncompleteRead):
            answer.read()


def accepts(gateway: Gateway) -> bool:
    try:
        socket.create_connection((gateway.host, gateway.port), timeout=1).close()
    except ConnectionError:
        return False
    return True
