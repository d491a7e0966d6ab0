"""Readers that leave, stall or are many; a gateway that is told to stop. The songs are a fake server's."""

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests.client.fake_server import FakeServer, Script, one_chunk_then_nothing, song_audio
from tests.gateway.conftest import MakeGateway, StandIn
from tests.gateway.gateway import CAPTION, LYRICS, Gateway
from tests.gateway.scripts import Endless, Gated, nothing, whole
from tests.triton.server import wait_until

IDLE, STREAMING = 50, 8
READ_BYTES_PER_S = 250_000
# Processor time for a second of sound: many times what docs/gateway.md has, as busy cores take longer for the
# same work, and far less than work that is done more often than once for a piece.
MOST_CPU_S = {"pcm": 0.02, "flac": 0.05, "ogg": 0.1, "mp3": 0.25}
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
@pytest.mark.parametrize("script", [nothing, one_chunk_then_nothing], ids=["waiting", "being written"])
def test_a_reader_that_leaves_takes_its_song_with_it(
    stand_in: StandIn, script: Script, fields: dict[str, object]
) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    server.script = script
    connection = begin(gateway, **fields)
    wait_until(lambda: len(server.requests) == 1, timeout_s=10, what="the song's request")
    if script is one_chunk_then_nothing and fields:
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
        gateway = make_gateway(server.url, "--buffer-bytes", str(buffer_bytes), "--stall-limit-s", "5")
        gateway.sing(max_new_tokens=1)
        server.script = endless
        before_bytes, before_files = gateway.rss_bytes(), open_files(gateway)
        reader = begin_raw(gateway, stream=True)
        grown_bytes, held_bytes = 0, 0.0

        def is_over() -> bool:
            nonlocal grown_bytes, held_bytes
            grown_bytes = max(grown_bytes, gateway.rss_bytes() - before_bytes)
            held_bytes = max(held_bytes, gateway.metric("buffered_bytes"))
            return server.cancelled.is_set()

        wait_until(is_over, timeout_s=60, what="the song to be given up")
        # The queue was full, and held no more than it may; gRPC held some more, and then the server waited.
        assert buffer_bytes <= held_bytes <= buffer_bytes + chunk_bytes
        assert grown_bytes < 64 * 2**20
        assert endless.taken_bytes < 64 * 2**20
        server.script = whole
        assert gateway.sing(response_format="pcm").body == song_audio(250, 0).tobytes()
        slow = {"outcome": "slow_reader", "delivery": "audio"}
        wait_until(lambda: gateway.metric("songs_total", **slow) == 1, timeout_s=10, what="the count")
        assert gateway.metric("buffered_bytes") == 0
        # Its connection goes too, although the reader has neither read nor closed it.
        wait_until(lambda: open_files(gateway) <= before_files, timeout_s=20, what="the connection to go")
        reader.close()


def open_files(gateway: Gateway) -> int:
    return sum(1 for _ in Path(f"/proc/{gateway.process.pid}/fd").iterdir())


def test_a_slow_but_steady_reader_gets_its_song(make_gateway: MakeGateway) -> None:
    """The stall limit is for a reader that takes nothing: this one needs longer than it for its song."""
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, "--buffer-bytes", "200000", "--stall-limit-s", "3")
        reader = begin_raw(gateway, stream=True, response_format="pcm", max_new_tokens=300)
        received = bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            piece = reader.recv(20_000)
            assert piece, "the song was cut off"
            received += piece
            time.sleep(len(piece) / READ_BYTES_PER_S)
        # What the connection holds aside, the gateway took this long to hand it over.
        assert (len(received) - 2 * 2**18) / READ_BYTES_PER_S > 3
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
    songs = Gated()
    server.script = songs
    idle = [gateway.connect() for _ in range(IDLE)]
    for connection in idle:
        assert gateway.ask("GET", "/health", connection=connection).status == 200
    fields = {"stream": True, "response_format": "pcm", "max_new_tokens": 500}
    singing = [begin(gateway, seed=seed, **fields) for seed in range(STREAMING)]
    answers = [connection.getresponse() for connection in singing]
    # The sound comes while the song is being written: the rest of none of these is there yet.
    received = [answer.read(1000) for answer in answers]
    # Each idle connection is the same one as before, and is answered while all songs go on.
    for connection in idle:
        kept = connection.sock
        assert gateway.ask("GET", "/v1/models", connection=connection).status == 200
        assert connection.sock is kept
    assert gateway.metric("live_songs") == STREAMING
    songs.open.set()
    for seed, (first, answer) in enumerate(zip(received, answers, strict=True)):
        heard = np.frombuffer(first + answer.read(), "<i2")
        np.testing.assert_array_equal(heard, song_audio(500, seed).reshape(-1))
    for connection in idle:
        assert gateway.ask("GET", "/health", connection=connection).status == 200
        connection.close()


@pytest.mark.parametrize("name", MOST_CPU_S)
def test_a_song_costs_little_processor_time(stand_in: StandIn, name: str) -> None:
    """Of the gateway's process, which is another thing than the time that passes."""
    gateway, frames = stand_in.gateway, 1500
    gateway.sing(response_format=name, stream=True, max_new_tokens=1)
    before_s = gateway.cpu_s()
    assert gateway.sing(response_format=name, stream=True, max_new_tokens=frames).status == 200
    cost_s = (gateway.cpu_s() - before_s) / (frames / 25)
    print(f"\n{name}: {1000 * cost_s:.1f} ms for a second of sound")
    assert cost_s < MOST_CPU_S[name]


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
    with FakeServer(one_chunk_then_nothing) as server:
        gateway = make_gateway(server.url, "--drain-s", "1")
        answer = begin(gateway, stream=True).getresponse()
        assert answer.read1(10)
        os.kill(gateway.process.pid, signal.SIGTERM)
        assert server.cancelled.wait(10)
        gateway.process.wait(10)
        with pytest.raises(http.client.IncompleteRead):
            answer.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_it_at_once(make_gateway: MakeGateway, number: signal.Signals) -> None:
    with FakeServer(one_chunk_then_nothing) as server:
        gateway = make_gateway(server.url)
        answer = begin(gateway, stream=True).getresponse()
        assert answer.read1(10)
        os.kill(gateway.process.pid, number)
        wait_until(lambda: not accepts(gateway), timeout_s=10, what="new connections to be refused")
        assert gateway.process.poll() is None
        os.kill(gateway.process.pid, number)
        gateway.process.wait(20)
        assert server.cancelled.wait(10)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()


def accepts(gateway: Gateway) -> bool:
    try:
        socket.create_connection((gateway.host, gateway.port), timeout=1).close()
    except ConnectionError:
        return False
    return True
