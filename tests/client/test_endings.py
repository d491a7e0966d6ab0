"""Songs that their listener ends: cancelled, left or dropped, by both clients."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from client import AsyncMusic3Client, Cancelled, Chunk, Music3Client
from tests.client.fake_server import (
    FakeServer,
    Message,
    Request,
    Script,
    one_chunk_then_nothing,
    song_audio,
    song_messages,
)


def test_cancel_from_another_thread() -> None:
    with FakeServer(one_chunk_then_nothing) as server, Music3Client(server.url) as client:
        song = client.stream("a", "b")
        next(song)
        threading.Timer(0.2, song.cancel).start()
        with pytest.raises(Cancelled) as raised:
            next(song)
        assert raised.value.frames_done == 100
        assert server.cancelled.wait(60)
        assert list(song) == []


def test_cancel_of_an_asyncio_song_and_of_its_task() -> None:
    async def main(url: str) -> None:
        async with AsyncMusic3Client(url) as client:
            song = client.stream("a", "b")
            await anext(song)
            asyncio.get_running_loop().call_later(0.2, song.cancel)
            with pytest.raises(Cancelled):
                await anext(song)
            with pytest.raises(StopAsyncIteration):
                await anext(song)
            assert await asyncio.to_thread(server.cancelled.wait, 60)
            server.cancelled.clear()
            task = asyncio.create_task(client.generate("a", "b"))
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.cancelled.wait, 60)

    begun = threading.Semaphore(0)

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        begun.release()
        yield from one_chunk_then_nothing(request, context)

    with FakeServer(script) as server:
        asyncio.run(main(server.url))


def test_leaving_a_with_block_cancels() -> None:
    with FakeServer(one_chunk_then_nothing) as server, Music3Client(server.url) as client:
        with client.stream("a", "b") as song:
            next(song)
        assert server.cancelled.wait(60)


Body = Callable[[Chunk], bool]


def leave_sync(url: str, body: Body, after: Callable[[], object]) -> None:
    with Music3Client(url) as client:
        with contextlib.suppress(KeyError):
            for chunk in client.stream("a", "b"):
                if body(chunk):
                    break
        gc.collect()
        after()
        assert client._songs == set()


def leave_async(url: str, body: Body, after: Callable[[], object]) -> None:
    async def main() -> None:
        async with AsyncMusic3Client(url) as client:
            with contextlib.suppress(KeyError):
                async for chunk in client.stream("a", "b"):
                    if body(chunk):
                        break
            gc.collect()
            await asyncio.to_thread(after)
            assert client._songs == set()

    asyncio.run(main())


Leave = Callable[[str, Body, Callable[[], object]], None]
both_leave = pytest.mark.parametrize("leave", [leave_sync, leave_async], ids=["sync", "asyncio"])


def breaking_off(chunk: Chunk) -> bool:
    return True


def failing(chunk: Chunk) -> bool:
    raise KeyError(chunk.frames_done)


@both_leave
@pytest.mark.parametrize("body", [breaking_off, failing])
def test_a_song_that_is_dropped_is_cancelled_while_its_client_lives(leave: Leave, body: Body) -> None:
    seen: list[bool] = []
    with FakeServer(one_chunk_then_nothing) as server:
        leave(server.url, body, lambda: seen.append(server.cancelled.wait(60)))
    assert seen == [True]


def one_short_of_the_end(go_on: threading.Event, ended: threading.Event) -> Script:
    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        *chunks, final = song_messages(request)
        yield from chunks
        assert go_on.wait(60)
        yield final
        ended.set()  # only reached if the client took that

    return script


def until_whole(chunk: Chunk) -> bool:
    return chunk.finish_reason is not None


@both_leave
def test_a_whole_song_that_is_dropped_is_read_to_its_end(leave: Leave) -> None:
    """Triton 2.51 keeps a request for good whose stream is dropped just before its end."""
    go_on, ended = threading.Event(), threading.Event()

    def after() -> None:
        go_on.set()
        assert ended.wait(60)

    with FakeServer(one_short_of_the_end(go_on, ended)) as server:
        leave(server.url, until_whole, after)
        assert not server.cancelled.is_set()


@both_leave
def test_closing_waits_for_the_end_of_a_whole_song_that_was_dropped(leave: Leave) -> None:
    go_on, ended = threading.Event(), threading.Event()
    with FakeServer(one_short_of_the_end(go_on, ended)) as server:
        leave(server.url, until_whole, threading.Timer(0.3, go_on.set).start)
        assert ended.wait(60)
        assert not server.cancelled.is_set()


SYNC_PROGRAM = """
song = Music3Client(url).stream("a", "b")
while next(song).finish_reason is None: pass
"""
ASYNC_PROGRAM = """
async def main():
    global song
    song = AsyncMusic3Client(url).stream("a", "b")
    while (await anext(song)).finish_reason is None: pass
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [SYNC_PROGRAM, ASYNC_PROGRAM], ids=["sync", "asyncio"])
def test_a_program_that_ends_with_a_whole_song_open_waits_for_nothing(program: str) -> None:
    go_on = threading.Event()
    start = "import asyncio, sys; from client import AsyncMusic3Client, Music3Client; url = sys.argv[1]\n"
    with FakeServer(one_short_of_the_end(go_on, threading.Event())) as server:
        arguments = [sys.executable, "-c", start + program, server.url]
        root = Path(__file__).parents[2]
        done = subprocess.run(arguments, cwd=root, capture_output=True, text=True, timeout=50)
        go_on.set()
    assert (done.returncode, done.stderr) == (0, "")


def test_one_cancelled_song_leaves_the_others_on_the_same_connection() -> None:
    go_on = threading.Event()

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        first, *rest = song_messages(request)
        yield first
        assert go_on.wait(60)
        yield from rest

    with FakeServer(script) as server, Music3Client(server.url) as client:
        songs = [client.stream("a", "b", seed=seed, audio_encoding="s16") for seed in range(6)]
        firsts = [next(song) for song in songs]
        songs[2].cancel()
        go_on.set()
        for seed, (song, first) in enumerate(zip(songs, firsts, strict=True)):
            if seed == 2:
                with pytest.raises(Cancelled):
                    next(song)
            else:
                audio = np.concatenate([first.audio, *(chunk.audio for chunk in song)])
                np.testing.assert_array_equal(audio, song_audio(250, seed))
        assert client._songs == set()
