"""Clients that cancel, vanish or run out of time, at every phase of a song: nothing of it stays behind."""

import contextlib
import http.client
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client import DeadlinePassed, Music3Client
from tests.triton.server import ROOT, TritonServer, wait_until
from tests.triton.songs import (
    CAPTION,
    LYRICS,
    audit,
    cancelled_since,
    check_held,
    fill_places,
    grown,
    held,
    metrics,
    sing,
)

LONG = 9000  # frames: never done while a test waits
# A song stops two or three windows after its cancel; but a busy machine may let the server sing on for some
# while, before the client gets to it. Far from all it must be.
FAR_FROM_ALL = LONG // 3
LONG_LYRICS = "la la\n" * 500
TRIES = 20


def test_cancelled_while_waiting_for_a_place(server: TritonServer, client: Music3Client) -> None:
    before = audit(server)
    with contextlib.ExitStack() as stack:
        for seed in range(8):
            stack.enter_context(client.stream(CAPTION, LYRICS, seed=seed, max_frames=LONG))
        wait_until(lambda: metrics(server)["music3_live_songs"] == 8, timeout_s=60, what="eight songs")
        waiting = [client.stream(CAPTION, LYRICS, max_frames=LONG) for _ in range(5)]
        wait_until(lambda: metrics(server)["music3_waiting_songs"] == 5, timeout_s=60, what="five in line")
        for song in waiting:
            song.cancel()
        # They leave the line at once, not when their turn would come.
        wait_until(lambda: metrics(server)["music3_waiting_songs"] == 0, timeout_s=60, what="an empty line")
        assert metrics(server)["music3_live_songs"] == 8
    cancelled_since(server, before, songs=13)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
def test_cancelled_in_the_prompt(server: TritonServer, client: Music3Client, after_s: float) -> None:
    before = audit(server)
    songs = [client.stream(CAPTION, LONG_LYRICS, seed=seed, max_frames=2000) for seed in range(3)]
    wait_until(lambda: metrics(server)["music3_live_songs"] > 0, timeout_s=60, what="a song")
    time.sleep(after_s)
    for song in songs:
        song.cancel()
    cancelled_since(server, before, songs=3)


def test_cancelled_while_the_first_window_is_written(server: TritonServer, client: Music3Client) -> None:
    before = audit(server)
    song = client.stream(CAPTION, LYRICS, max_frames=LONG)
    frames = "music3_talker_frames_total"
    wait_until(lambda: metrics(server)[frames] > before[frames], timeout_s=60, what="frames")
    song.cancel()
    change = cancelled_since(server, before, songs=1)
    assert change[frames] <= FAR_FROM_ALL


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_cancelled_between_windows(server: TritonServer, client: Music3Client, chunks: int) -> None:
    before = audit(server)
    with client.stream(CAPTION, LYRICS, max_frames=LONG) as song:
        for _ in range(chunks):
            next(song)
    change = cancelled_since(server, before, songs=1)
    assert change["music3_talker_frames_total"] <= FAR_FROM_ALL


def test_cancelled_while_its_window_is_in_the_dit(server: TritonServer, client: Music3Client) -> None:
    """The window comes out of the dit, and nobody asks the vocoder for its sound."""
    frames, solved, decoded = (
        f"music3_{name}_total" for name in ("talker_frames", "dit_windows", "vocoder_windows")
    )
    for _ in range(TRIES):
        before = audit(server)
        song = client.stream(CAPTION, LYRICS, max_frames=LONG)
        # With the 200th frame the first window goes to the dit, which takes longer than the page to tell it.
        wait_until(
            lambda before=before: metrics(server)[frames] >= before[frames] + 200,
            timeout_s=120,
            what="a window",
            poll_s=0.01,
        )
        song.cancel()
        change = cancelled_since(server, before, songs=1)
        if change.get(solved, 0) == change.get(decoded, 0) + 1:
            return
    pytest.fail(f"none of {TRIES} cancels fell into the dit's time")


VANISHING = """
import sys
from client import Music3Client
song = Music3Client(sys.argv[1]).stream(sys.argv[2], sys.argv[3], max_frames=9000)
next(song)
print("sound", flush=True)
for _ in song:
    pass
"""


def test_a_client_killed_with_9(server: TritonServer) -> None:
    before = audit(server)
    command = [sys.executable, "-c", VANISHING, server.grpc_url, CAPTION, LYRICS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"sound\n"
        process.send_signal(signal.SIGKILL)
    cancelled_since(server, before, songs=1)


def test_a_deadline_that_passes(server: TritonServer, client: Music3Client) -> None:
    before = audit(server)
    with pytest.raises(DeadlinePassed):
        sing(client, max_frames=LONG, deadline_s=1.5)
    cancelled_since(server, before, songs=1)


def ask_over_http(server: TritonServer) -> http.client.HTTPConnection:
    """A connection over which a song was asked for."""
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=240)
    body = {"caption": CAPTION, "lyrics": LYRICS, "audio_encoding": "s16_base64", "max_frames": LONG}
    connection.request("POST", "/v2/models/music3/generate_stream", json.dumps(body))
    return connection


def until_song(server: TritonServer) -> None:
    wait_until(lambda: metrics(server)["music3_live_songs"] == 1, timeout_s=60, what="the song")


def until_frames(server: TritonServer) -> None:
    now = metrics(server)["music3_talker_frames_total"]
    wait_until(
        lambda: metrics(server)["music3_talker_frames_total"] > now, timeout_s=60, what="the song's frames"
    )


@pytest.mark.parametrize("until", [until_song, until_frames])
def test_a_generate_stream_client_that_goes_before_any_sound(
    server: TritonServer, until: Callable[[TritonServer], None]
) -> None:
    before = audit(server)
    connection = ask_over_http(server)
    until(server)
    connection.close()
    cancelled_since(server, before, songs=1)


@pytest.mark.parametrize("events", [1, 2, 3])
def test_a_generate_stream_client_that_goes_between_windows(server: TritonServer, events: int) -> None:
    before = audit(server)
    connection = ask_over_http(server)
    answer = connection.getresponse()
    heard = 0
    while heard < events:
        heard += answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    change = cancelled_since(server, before, songs=1)
    assert change["music3_talker_frames_total"] <= FAR_FROM_ALL


def test_generate_stream_clients_that_go_while_they_wait_for_a_place(
    server: TritonServer, client: Music3Client
) -> None:
    before = audit(server)
    with contextlib.ExitStack() as stack:
        for seed in range(8):
            stack.enter_context(client.stream(CAPTION, LYRICS, seed=seed, max_frames=LONG))
        wait_until(lambda: metrics(server)["music3_live_songs"] == 8, timeout_s=60, what="eight songs")
        waiting = [ask_over_http(server) for _ in range(3)]
        wait_until(lambda: metrics(server)["music3_waiting_songs"] == 3, timeout_s=60, what="three in line")
        for connection in waiting:
            connection.close()
    # Triton may notice that they are gone only when it has something to tell them.
    cancelled_since(server, before, songs=11)


def test_two_hundred_cancelled_songs_leave_nothing_behind(server: TritonServer, client: Music3Client) -> None:
    first = sing(client, seed=9, max_frames=150)
    fill_places(client)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(cancel_soon(client), range(40)))  # so that every pool of the server has its size
        before, held_before = audit(server), held(server)
        list(pool.map(cancel_soon(client), range(200)))
    after, held_after = audit(server), held(server)
    check_held(held_before, held_after)
    assert after["music3_talker_free_pages"] == before["music3_talker_free_pages"]
    assert "music3_songs_total done" not in grown(before, after)
    np.testing.assert_array_equal(sing(client, seed=9, max_frames=150).audio, first.audio)


def cancel_soon(client: Music3Client) -> Callable[[int], None]:
    """Asks for a song that can't be done so soon, and cancels it at a moment that its number decides."""

    def run(number: int) -> None:
        draw = random.Random(number)
        lyrics = LONG_LYRICS if draw.random() < 0.1 else LYRICS
        with client.stream(CAPTION, lyrics, seed=number, max_frames=2000):
            time.sleep(draw.choice([0.0, 0.02, 0.1, 0.3]))

    return run
