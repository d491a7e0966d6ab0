"""Both clients against a server that is slow, silent, broken or gone; each test runs once per client."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from client import (
    AsyncMusic3Client,
    Cancelled,
    Chunk,
    DeadlinePassed,
    InvalidRequest,
    Music3Client,
    Music3Error,
    ServerError,
    ServerUnavailable,
    Song,
)
from tests.client.fake_server import (
    FakeServer,
    Message,
    Request,
    Script,
    chunk_message,
    empty_message,
    error_message,
    one_chunk_then_nothing,
    read_inputs,
    song_audio,
    song_messages,
)
from tests.client.proxy import Proxy

Collect = Callable[..., list[Chunk]]
Generate = Callable[..., Song]


def collect_sync(url: str, *, into: list[Chunk] | None = None, **options: object) -> list[Chunk]:
    chunks = into if into is not None else []
    with Music3Client(url) as client:
        for chunk in client.stream("caption", "lyrics", **options):
            chunks.append(chunk)
    return chunks


def collect_async(url: str, *, into: list[Chunk] | None = None, **options: object) -> list[Chunk]:
    chunks = into if into is not None else []

    async def main() -> None:
        async with AsyncMusic3Client(url) as client:
            async for chunk in client.stream("caption", "lyrics", **options):
                chunks.append(chunk)

    asyncio.run(main())
    return chunks


class Noticing(list[Chunk]):
    """Chunks for `collect` to fill; `noticed` counts those that the caller has in hands."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed = threading.Semaphore(0)

    def append(self, chunk: Chunk) -> None:
        super().append(chunk)
        self.noticed.release()


@pytest.fixture(params=[collect_sync, collect_async], ids=["sync", "asyncio"])
def collect(request: pytest.FixtureRequest) -> Collect:
    return request.param


def whole(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
    yield from song_messages(request, warnings=("line 2: words dropped",))


@pytest.mark.parametrize("frames", [1, 100, 250])
def test_song_arrives_whole(collect: Collect, frames: int) -> None:
    with FakeServer(whole) as server:
        chunks = collect(server.url, seed=7, max_frames=frames, audio_encoding="s16", request_id="mine")
    np.testing.assert_array_equal(np.concatenate([chunk.audio for chunk in chunks]), song_audio(frames, 7))
    assert [chunk.frames_done for chunk in chunks] == [*range(100, frames, 100), frames]
    assert {chunk.frame_cap for chunk in chunks} == {frames}
    assert {chunk.sample_rate_hz for chunk in chunks} == {32_000}
    assert [chunk.warnings for chunk in chunks] == [("line 2: words dropped",)] + [()] * (len(chunks) - 1)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    elapsed = [chunk.elapsed_s for chunk in chunks]
    assert elapsed == sorted(elapsed)
    (request,) = server.requests
    assert request.id == "mine"
    assert read_inputs(request) == {
        "caption": "caption",
        "lyrics": "lyrics",
        "seed": 7,
        "max_frames": frames,
        "audio_encoding": "s16",
    }
    # Two songs that fail together would end Triton 2.51 with this (a segmentation fault in its gRPC door).
    assert "triton_grpc_error" not in server.metadata[0]


def test_chunks_come_as_they_are_sent_however_slow_the_server(collect: Collect) -> None:
    """MiniMax cli #130: an empty first message, then nothing for long, then the song."""
    arrived = Noticing()

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        yield empty_message(request.id)
        time.sleep(0.5)
        for message in song_messages(request):
            yield message
            # The next chunk leaves only once this one is in the caller's hands: a burst would hang here.
            if message.infer_response.outputs:
                assert arrived.noticed.acquire(timeout=60)

    with FakeServer(script) as server:
        chunks = collect(server.url, into=arrived, max_frames=350, audio_encoding="s16")
    np.testing.assert_array_equal(np.concatenate([chunk.audio for chunk in chunks]), song_audio(350, 0))


def test_empty_audio_in_the_middle_loses_nothing(collect: Collect) -> None:
    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        first, *rest = song_messages(request)
        yield first
        yield chunk_message(request.id, None, encoding="s16", progress=(100, 250))
        yield chunk_message(request.id, np.zeros((0, 2), np.int16), encoding="s16", progress=(100, 250))
        yield from rest

    with FakeServer(script) as server:
        chunks = collect(server.url, max_frames=250, audio_encoding="s16")
    np.testing.assert_array_equal(np.concatenate([chunk.audio for chunk in chunks]), song_audio(250, 0))


def aborting(code: grpc.StatusCode, text: str, *, after_chunks: int = 0) -> Script:
    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        for _, message in zip(range(after_chunks), song_messages(request), strict=False):
            yield message
        context.abort(code, text)

    return script


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest, ""),
        (grpc.StatusCode.UNAVAILABLE, ServerUnavailable, "Ask again"),
        (grpc.StatusCode.CANCELLED, Cancelled, ""),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlinePassed, "deadline_s"),
        (grpc.StatusCode.INTERNAL, ServerError, "log"),
        (grpc.StatusCode.NOT_FOUND, ServerUnavailable, "model_repository"),
        (grpc.StatusCode.UNKNOWN, ServerError, "log"),
    ],
)
@pytest.mark.parametrize("after_chunks", [0, 2])
def test_every_status_has_its_exception(
    collect: Collect, code: grpc.StatusCode, kind: type[Music3Error], advice: str, after_chunks: int
) -> None:
    arrived: list[Chunk] = []
    script = aborting(code, "8 songs run and 3 wait", after_chunks=after_chunks)
    with FakeServer(script) as server, pytest.raises(kind) as raised:
        collect(server.url, into=arrived)
    assert type(raised.value) is kind
    assert len(arrived) == after_chunks
    assert raised.value.frames_done == 100 * after_chunks
    assert advice in raised.value.advice
    if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
        assert "8 songs run and 3 wait" in str(raised.value)


def test_refusals_keep_their_status_whenever_they_come() -> None:
    """The refusal may come before the request has left; gRPC's asyncio streams then lose its status."""
    unlike: list[Music3Error] = []

    def sing(client: Music3Client) -> None:
        with pytest.raises(Music3Error) as raised:
            client.generate("caption", "lyrics")
        unlike.extend([raised.value] * (type(raised.value) is not ServerUnavailable))

    async def sing_async(client: AsyncMusic3Client) -> None:
        with pytest.raises(Music3Error) as raised:
            await client.generate("caption", "lyrics")
        unlike.extend([raised.value] * (type(raised.value) is not ServerUnavailable))

    async def main(url: str) -> None:
        async with AsyncMusic3Client(url) as client:
            for _ in range(200):
                await sing_async(client)

    with FakeServer(whole) as server:
        server.refusal = (grpc.StatusCode.UNAVAILABLE, "8 songs run and 3 wait")
        with Music3Client(server.url) as client:
            for _ in range(200):
                sing(client)
        asyncio.run(main(server.url))
    assert not unlike


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.01, 0.03])
def test_a_server_that_goes_away_is_unavailable_to_songs_of_any_age(delay_s: float) -> None:
    """Songs asked for before it goes, while it goes, and after."""
    amid: list[Music3Error | None] = []
    after: list[Music3Error | None] = []

    def slowly(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        for message in song_messages(request, hop=10):
            time.sleep(0.002)
            yield message

    async def sing(client: AsyncMusic3Client, ends: list[Music3Error | None]) -> None:
        try:
            await client.generate("caption", "lyrics", max_frames=250)
            ends.append(None)
        except Music3Error as error:
            ends.append(error)

    async def main() -> None:
        for _ in range(8):
            with FakeServer(slowly) as server:
                async with AsyncMusic3Client(server.url) as client, asyncio.TaskGroup() as songs:
                    await client.wait_until_ready(10)  # its port may be one that was refused before
                    for _ in range(3):
                        songs.create_task(sing(client, amid))
                    await asyncio.sleep(delay_s)
                    stopping = songs.create_task(asyncio.to_thread(server.stop))
                    songs.create_task(sing(client, amid))
                    await stopping
                    await sing(client, after)

    asyncio.run(main())
    assert len(amid) == 32
    assert [type(end) for end in after] == [ServerUnavailable] * 8
    # None: a song of the old server that was done in time. CANCELLED is what the server's side says of a song
    # that it gives up, where those words overtake the connection's end.
    assert {type(end) for end in amid} <= {type(None), ServerUnavailable, Cancelled}
    assert all(end.advice for end in (*amid, *after) if isinstance(end, ServerUnavailable))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        # The server's own refusals and failures.
        ("lyrics: blank; it is required and must have something other than spaces", InvalidRequest),
        ("caption: 'cancelled, not ready' is nothing but markup, no text is left", InvalidRequest),
        ("max_frames: 9001 is out of range; allowed: 1 to 9000", InvalidRequest),
        ("'temperature': this model cannot honour such a parameter; remove it", InvalidRequest),
        ("the queue is full; try again later (8 songs run and 256 wait)", ServerUnavailable),
        ("vocoder: not available, the server is starting, stopping or broken", ServerUnavailable),
        ("the client cancelled the song while it waited", Cancelled),
        ("the song was given up", Cancelled),
        ("talker: failed on this song; the server's log says why", ServerError),
        ("the song failed; the server's log says why", ServerError),
        # The same with the status named.
        ("INVALID_ARG: the queue is full", InvalidRequest),
        ("UNAVAILABLE: lyrics", ServerUnavailable),
        ("[CANCELLED]: lyrics", Cancelled),
        ("INTERNAL: lyrics: blank", ServerError),
        # Triton 2.51's.
        ("[request id: 1] unexpected shape for input 'lyrics' for model 'music3'. Expected", InvalidRequest),
        ("[request id: 1] unexpected inference input 'voice' for model 'music3'", InvalidRequest),
        ("[request id: 1] expected number of inputs between 2 and 5 but got 1 inputs", InvalidRequest),
        ("Request for unknown model: 'music3' is not found", ServerUnavailable),
        ("[request id: 1] Exceeds maximum queue size", ServerUnavailable),
        ("Server is not ready", ServerUnavailable),
        ("the stub died", ServerError),
        ("OOPS: what is this", ServerError),
    ],
)
def test_error_text_without_a_status(collect: Collect, text: str, kind: type[Music3Error]) -> None:
    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        yield from list(song_messages(request))[:1]
        yield error_message(request.id, text)

    with FakeServer(script) as server, pytest.raises(kind) as raised:
        collect(server.url, max_frames=250)
    assert type(raised.value) is kind
    assert text.split(": ")[-1] in str(raised.value)
    assert raised.value.frames_done == 100


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_stream_that_just_ends_is_not_a_song(collect: Collect, chunks: int) -> None:
    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        for _, message in zip(range(chunks), song_messages(request), strict=False):
            yield message

    with FakeServer(script) as server, pytest.raises(ServerError, match="ended the stream early"):
        collect(server.url, max_frames=301)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_connection_that_breaks_amid_a_song_says_to_ask_again(collect: Collect, reset: bool) -> None:
    arrived = Noticing()

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        yield from list(song_messages(request))[:2]
        for _ in range(2):
            assert arrived.noticed.acquire(timeout=60)
        proxy.cut(reset=reset)
        while context.is_active():
            time.sleep(0.02)

    with FakeServer(script) as server, Proxy(server.url) as proxy:
        with pytest.raises(ServerUnavailable) as raised:
            collect(proxy.url, into=arrived)
        assert server.cancelled.wait(60)
    assert raised.value.message.startswith(f"the connection to {proxy.url} broke after 200 frames (")
    assert raised.value.advice == "Ask again: the same caption, lyrics and seed give the same song."
    assert raised.value.frames_done == 200
    assert len(arrived) == 2


def test_nobody_there_says_what_to_check(collect: Collect) -> None:
    with FakeServer(whole) as server:
        url = server.url
    with pytest.raises(ServerUnavailable, match="gRPC port") as raised:
        collect(url)
    assert url in raised.value.message


def test_deadline_ends_the_song_on_both_sides(collect: Collect) -> None:
    with FakeServer(one_chunk_then_nothing) as server:
        with pytest.raises(DeadlinePassed) as raised:
            collect(server.url, deadline_s=3)  # of which the first chunk takes a hundredth
        assert server.cancelled.wait(60)
    assert raised.value.frames_done == 100


def test_generate_joins_the_chunks() -> None:
    async def ask(url: str) -> list[Song]:
        async with AsyncMusic3Client(url) as client:
            return await asyncio.gather(
                *(client.generate("a", "b", seed=seed, audio_encoding="s16") for seed in range(8))
            )

    with FakeServer(whole) as server:
        with Music3Client(server.url) as client:
            songs = [client.generate("a", "b", seed=0, audio_encoding="s16")]
        songs += asyncio.run(ask(server.url))
    for seed, song in zip([0, *range(8)], songs, strict=True):
        np.testing.assert_array_equal(song.audio, song_audio(250, seed))
        assert (song.frames, song.sample_rate_hz, song.finish_reason) == (250, 32_000, "length")
        assert song.warnings == ("line 2: words dropped",)
        assert 0 < song.first_audio_s <= song.total_s


def test_readiness_is_waited_for() -> None:
    async def wait(url: str) -> None:
        async with AsyncMusic3Client(url) as client:
            await client.wait_until_ready(10)

    with FakeServer(whole, ready=False) as server, Music3Client(server.url) as client:
        with pytest.raises(ServerUnavailable, match="not ready"):
            client.wait_until_ready(0.3, poll_s=0.05)
        threading.Timer(0.3, setattr, (server, "ready", True)).start()
        client.wait_until_ready(10, poll_s=0.05)
        asyncio.run(wait(server.url))
