"""Clients that cancel, vanish or run out of time, at every phase of a song: nothing of it stays behind."""

import contextlib
import http.client
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client import DeadlinePassed, Music3Client
from tests.triton.server import ROOT, TritonServer, wait_until
from tests.triton.songs import CAPTION, LYRICS, audit, grown, metrics, sing

LONG = 9000  # frames: never done while a test waits
LONG_LYRICS = "la la\n" * 500


@pytest.fixture(autouse=True)
def _nothing_is_left(server: TritonServer) -> Iterator[None]:
    yield
    audit(server)


def cancelled_since(server: TritonServer, before: dict[str, float], *, songs: int) -> dict[str, float]:
    """Wait until the page tells of so many cancelled songs and of no others; all that changed."""
    name = "music3_songs_total cancelled"
    wait_until(
        lambda: grown(before, metrics(server)).get(name, 0) >= songs,
        timeout_s=60,
        what=f"{songs} cancelled songs",
        poll_s=0.2,
    )
    change = grown(before, audit(server))
    outcomes = {key: value for key, value in change.items() if key.startswith("music3_songs_total")}
    assert outcomes == {name: songs}
    return change


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
    assert change[frames] <= 501  # the first window, the next, one ahead: then it stops


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_cancelled_between_windows(server: TritonServer, client: Music3Client, chunks: int) -> None:
    before = audit(server)
    with client.stream(CAPTION, LYRICS, max_frames=LONG) as song:
        for _ in range(chunks):
            next(song)
    change = cancelled_since(server, before, songs=1)
    assert change["music3_talker_frames_total"] <= 200 + 100 * (chunks + 3)


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


@pytest.mark.parametrize("events", [0, 1])
def test_a_generate_stream_client_that_goes(server: TritonServer, events: int) -> None:
    before = audit(server)
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=120)
    body = {"caption": CAPTION, "lyrics": LYRICS, "audio_encoding": "s16_base64", "max_frames": LONG}
    connection.request("POST", "/v2/models/music3/generate_stream", json.dumps(body))
    if events:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()
    else:
        wait_until(lambda: metrics(server)["music3_live_songs"] == 1, timeout_s=60, what="the song")
    connection.close()
    cancelled_since(server, before, songs=1)


def test_two_hundred_cancelled_songs_leave_nothing_behind(server: TritonServer, client: Music3Client) -> None:
    first = sing(client, seed=9, max_frames=150)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(cancel_soon(client), range(40)))  # so that every pool of the server has its size
        before, held_before = audit(server), held(server)
        list(pool.map(cancel_soon(client), range(200)))
    after, held_after = audit(server), held(server)
    changed = {name: (held_before[name], held_after[name]) for name in held_after}
    assert held_after["rss"] <= 1.05 * held_before["rss"], changed
    assert held_after["shared memory"] <= held_before["shared memory"], changed
    assert held_after["threads"] <= held_before["threads"] + 8, changed  # of the server's own pools
    assert held_after["open files"] <= held_before["open files"] + 8, changed
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


def held(server: TritonServer) -> dict[str, float]:
    """What the server and its stubs hold, all together."""
    return {
        "rss": sum(server.rss_bytes().values()),
        "shared memory": sum(server.shared_memory_bytes().values()),
        "threads": sum(server.threads().values()),
        "open files": sum(server.open_files().values()),
    }
