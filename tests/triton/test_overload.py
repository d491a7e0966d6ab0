"""More clients than places, and the two ways to end a server: a drain, and SIGTERM with songs running."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from client import Cancelled, Music3Client, Music3Error, ServerUnavailable, Song
from tests.triton.conftest import EXIT_WITHIN_S, MakeServer
from tests.triton.server import ROOT, TritonServer, is_alive, wait_until
from tests.triton.songs import (
    CAPTION,
    LYRICS,
    audit,
    check_held,
    fresh_metrics,
    grown,
    held,
    metrics,
    outcomes,
    sing,
    together,
    warm_up,
)

PLACES = 8
LONG = 9000  # frames: never done while a test waits
OUTLIVES = 1500  # frames: not done before a command beside it has started and been heard
NUMBERS = re.compile(r"\((\d+) songs run and (\d+) wait\)$")


def numbers_in(error: object) -> tuple[int, int]:
    """Songs that run and songs that wait, as an UNAVAILABLE error tells."""
    assert type(error) is ServerUnavailable, error
    found = NUMBERS.search(error.message)
    assert found, error.message
    return int(found[1]), int(found[2])


def until_census(server: TritonServer, *, live: int, waiting: int) -> None:
    """Wait until the page says that so many songs run and wait."""

    def right() -> bool:
        now = metrics(server)
        return (now["music3_live_songs"], now["music3_waiting_songs"]) == (live, waiting)

    wait_until(right, timeout_s=120, what=f"{live} live and {waiting} waiting songs")


def end_of(song: Iterator[object]) -> Music3Error | None:
    """How a song's stream ends."""
    try:
        for _ in song:
            pass
    except Music3Error as error:
        return error
    return None


def in_threads(tasks: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    return threads


def test_a_hundred_clients_at_once_on_default_settings(server: TritonServer, client: Music3Client) -> None:
    before = audit(server)
    alone = [sing(client, seed=seed, max_frames=2) for seed in range(3)]

    def one(seed: int) -> Song:
        with Music3Client(server.grpc_url) as own:
            return sing(own, seed=seed, max_frames=2, deadline_s=240)

    made = together([lambda seed=seed: one(seed % 3) for seed in range(100)])
    # 8 places and 256 in line: none may be turned away.
    assert [error for error in made if isinstance(error, Music3Error)] == []
    for seed, song in enumerate(made):
        np.testing.assert_allclose(song.audio, alone[seed % 3].audio, rtol=0, atol=1e-4)
    change = grown(before, audit(server))
    assert outcomes(change) == {"done": 103}


def test_five_hundred_songs_of_which_a_hundred_are_cancelled_are_all_accounted_for(
    server: TritonServer, client: Music3Client
) -> None:
    first = sing(client, seed=9, max_frames=3).audio
    rounds(server, client, songs=40, cancelled=10)  # so that every pool of the server has its size
    before, held_before = audit(server), held(server)
    for _ in range(2):
        rounds(server, client, songs=200, cancelled=50 - PLACES)
    change = grown(before, audit(server))
    assert outcomes(change) == {"done": 400, "cancelled": 100}
    check_held(held_before, held(server))
    np.testing.assert_array_equal(sing(client, seed=9, max_frames=3).audio, first)


def rounds(server: TritonServer, client: Music3Client, *, songs: int, cancelled: int) -> None:
    """Many at once: songs of one frame, and among them songs that are cancelled while all wait in line.

    The songs in the places are cancelled as well. They keep the line as it is until everybody has come, so
    that no cancel overtakes its own request, or comes when its song is over.
    """
    with contextlib.ExitStack() as places:
        for seed in range(PLACES):
            places.enter_context(client.stream(CAPTION, LYRICS, seed=seed, max_frames=LONG))
        until_census(server, live=PLACES, waiting=0)
        kept, given_up = [], []
        for number in range(songs + cancelled):
            if number % (songs // cancelled + 1) == 0 and len(given_up) < cancelled:
                given_up.append(client.stream(CAPTION, LYRICS, seed=number, max_frames=LONG))
            else:
                kept.append(client.stream(CAPTION, LYRICS, seed=number, max_frames=1))
        assert (len(kept), len(given_up)) == (songs, cancelled)
        until_census(server, live=PLACES, waiting=songs + cancelled)
        for song in given_up:
            song.cancel()
        until_census(server, live=PLACES, waiting=songs)
    for song in kept:
        (chunk,) = song
        assert (chunk.frames_done, chunk.finish_reason) == (1, "length")
    for song in given_up:
        assert type(end_of(song)) is Cancelled


def test_a_long_prompt_stalls_no_song_that_runs(make_server: MakeServer) -> None:
    """Its chunks and the frames of the song that runs take turns, by the talker's own account of its steps.

    Time in steps with a frame, plus time in steps with a chunk, less time in steps of any kind: that is the
    time in steps with both, the same sums of the same steps, however fast they were.
    """
    chunk_tokens = 32
    running = make_server(
        environment={
            "MUSIC3_PREFILL_CHUNK_TOKENS": str(chunk_tokens),
            "MUSIC3_RUN_AHEAD_WINDOWS": "16",  # so that the song doesn't pause for its own sound meanwhile
        }
    )
    frames, chunks = "music3_talker_frames_total", "music3_talker_prefill_steps_total"
    with Music3Client(running.grpc_url) as client:
        before = audit(running)
        with client.stream(CAPTION, LYRICS, max_frames=LONG):
            wait_until(lambda: metrics(running)[frames] > before[frames], timeout_s=60, what="frames")
            alone = fresh_metrics(running)
            assert sing(client, lyrics="la la\n" * 800, max_frames=1).frames == 1
            change = grown(alone, fresh_metrics(running))
    assert change[chunks] >= 4800 / chunk_tokens
    assert change[frames] >= 4800 / chunk_tokens
    framing_s, prefilling_s, busy_s = (
        change[f"music3_talker_{kind}_seconds_total"] for kind in ("step", "prefill", "busy")
    )
    # All of it; but a page that is read while its numbers come in may miss some steps of one of the sums.
    assert framing_s + prefilling_s - busy_s > 0.5 * prefilling_s
    audit(running)


# --------------------------------------------------------- a server with one place and a line of three


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(
        checkpoint=tiny_checkpoint,
        log_path=tmp_path_factory.mktemp("small") / "server.log",
        environment={"MUSIC3_LIVE_SONGS": "1", "MUSIC3_WAITING_SONGS": "3"},
    ) as running:
        warm_up(running, slots=1)
        yield running
        assert running.terminate(timeout_s=EXIT_WITHIN_S) == 0, "a request was left behind"


@pytest.fixture
def own(small: TritonServer) -> Iterator[Music3Client]:
    with Music3Client(small.grpc_url) as connected:
        yield connected
    audit(small, slots=1)


def test_four_times_more_clients_than_there_is_room_for(small: TritonServer, own: Music3Client) -> None:
    before = audit(small, slots=1)
    made = together([lambda seed=seed: sing(own, seed=seed, max_frames=60) for seed in range(16)])
    songs = [each for each in made if isinstance(each, Song)]
    refused = [each for each in made if isinstance(each, Music3Error)]
    assert len(songs) >= 4
    assert {song.frames for song in songs} == {60}
    assert refused
    for error in refused:
        live, waiting = numbers_in(error)
        assert error.message.startswith("the queue is full; try again later")
        assert live <= 1
        assert live + waiting == 4
    change = grown(before, audit(small, slots=1))
    assert change["music3_songs_total done"] == len(songs)
    assert change["music3_songs_total unavailable"] == len(refused)


def test_first_come_first_served(small: TritonServer, own: Music3Client) -> None:
    names = [f"number-{number}" for number in range(3)]
    with own.stream(CAPTION, LYRICS, max_frames=LONG):
        until_census(small, live=1, waiting=0)
        threads = []
        for number, name in enumerate(names):
            threads += in_threads([lambda name=name: sing(own, max_frames=1, request_id=name)])
            until_census(small, live=1, waiting=number + 1)
        for _ in range(3):
            with pytest.raises(ServerUnavailable) as refusal:
                sing(own, max_frames=1)
            assert numbers_in(refusal.value) == (1, 3)
    for thread in threads:
        thread.join(60)
    audit(small, slots=1)
    # One place is one thread: its songs end in the order in which they had it.
    assert re.findall(r"song (number-\d): done", small.log_text()) == names


def test_a_drain_lets_the_song_end_refuses_others_and_can_be_undone(
    small: TritonServer, own: Music3Client
) -> None:
    command = [sys.executable, "-m", "python_backend_models.control", "drain", "--pid", str(small.pid)]
    with own.stream(CAPTION, LYRICS, max_frames=OUTLIVES) as song:
        chunks = [next(song)]
        waiting = own.stream(CAPTION, LYRICS, max_frames=1)
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as drain:
            wait_until(lambda: not metrics(small)["music3_accepting"], timeout_s=60, what="the drain")
            for refused in (waiting, own.stream(CAPTION, LYRICS, max_frames=1)):
                error = end_of(refused)
                assert numbers_in(error)[0] <= 1
                assert error is not None
                assert error.message.startswith("the server is draining")
            chunks += list(song)
            said = drain.communicate(timeout=120)[1]
        assert drain.returncode == 0, said
        assert "is drained" in said
    assert (chunks[-1].frames_done, chunks[-1].finish_reason) == (OUTLIVES, "length")
    audit(small, slots=1, draining=True)
    assert small.running
    subprocess.run([*command, "--undo"], cwd=ROOT, check=True, timeout=60)
    wait_until(lambda: bool(metrics(small)["music3_accepting"]), timeout_s=60, what="songs taken again")
    assert sing(own, max_frames=1).frames == 1


# ---------------------------------------------------- two places, and pages for one long song and a half

NARROW = {"MUSIC3_LIVE_SONGS": "2", "MUSIC3_KV_TOKENS": "30000", "MUSIC3_ANSWER_WITHIN_S": "0.5"}


def until_one_waits_for_pages(server: TritonServer) -> None:
    wait_until(
        lambda: metrics(server)["music3_talker_waiting_songs"] == 1, timeout_s=60, what="a song without pages"
    )


def test_a_song_that_waits_for_pages_can_be_cancelled_and_holds_up_nobody(make_server: MakeServer) -> None:
    running = make_server(environment=NARROW)
    with (
        Music3Client(running.grpc_url) as client,
        client.stream(CAPTION, LYRICS, max_frames=LONG) as long,
    ):
        next(long)
        waiting = client.stream(CAPTION, LYRICS, max_frames=LONG)
        until_one_waits_for_pages(running)
        waiting.cancel()
        assert type(end_of(waiting)) is Cancelled
        # Its place is free while the other one still has most of the pages.
        until_census(running, live=1, waiting=0)
        assert sing(client, max_frames=2).frames == 2
        # And one that is patient gets the pages in the end.
        with client.stream(CAPTION, LYRICS, max_frames=LONG, deadline_s=400) as patient:
            until_one_waits_for_pages(running)
            long.cancel()
            assert next(patient).frames_done == 200
    audit(running, slots=2)


# ------------------------------------------------------------------------------------- SIGTERM


def test_sigterm_ends_a_song_that_waits_for_pages(make_server: MakeServer) -> None:
    running = make_server(environment=NARROW)
    with Music3Client(running.grpc_url) as client:
        songs = [client.stream(CAPTION, LYRICS, max_frames=LONG)]
        next(songs[0])
        songs += [client.stream(CAPTION, LYRICS, max_frames=LONG)]
        until_one_waits_for_pages(running)
        ends: list[Music3Error | None] = []
        threads = in_threads([lambda song=song: ends.append(end_of(song)) for song in songs])
        assert running.terminate(timeout_s=25) == 0  # by itself, not out of time
        for thread in threads:
            thread.join(20)
    assert [type(end) for end in ends] == [ServerUnavailable] * 2


def test_sigterm_ends_running_and_waiting_songs_and_the_process(make_server: MakeServer) -> None:
    exit_timeout_s = 60
    running = make_server(
        environment={"MUSIC3_LIVE_SONGS": "2"}, arguments=["--exit-timeout-secs", str(exit_timeout_s)]
    )
    pids = running.pids()
    with Music3Client(running.grpc_url) as client:
        songs = [client.stream(CAPTION, LYRICS, seed=seed, max_frames=LONG) for seed in range(2)]
        for song in songs:
            next(song)
        songs += [client.stream(CAPTION, LYRICS, seed=seed, max_frames=LONG) for seed in range(3)]
        until_census(running, live=2, waiting=3)
        ends: dict[int, Music3Error | None] = {}
        threads = in_threads(
            [lambda n=n, song=song: ends.update({n: end_of(song)}) for n, song in enumerate(songs)]
        )
        # Code 0 is an end by itself: out of time, Triton 2.51 exits with 1.
        assert running.terminate(timeout_s=exit_timeout_s - 10) == 0
        for thread in threads:
            thread.join(20)
    assert set(ends) == set(range(5))
    for error in ends.values():
        assert type(error) is ServerUnavailable, error
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=20, what="the stubs to be gone")
