"""`AsyncMusic3Client`: the same songs as `Music3Client`, for asyncio.

One connection, one stream per song. Cancelling the task that iterates over a song cancels the song.
"""

import asyncio
import contextlib
import functools
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from types import TracebackType

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client import wire
from client.errors import Cancelled, ServerUnavailable
from client.wire import AudioEncoding, Chunk, Song, SongProgress, SongReader


class AsyncSongStream(AsyncIterator[Chunk]):
    """A song on its way: `async for chunk in song`. Made by `AsyncMusic3Client.stream`, in a running loop.

    Leaving an `async with` block early, `cancel`, or dropping the song stops it on the server.
    """

    def __init__(
        self, client: "AsyncMusic3Client", call: grpc.aio.UnaryStreamCall, reader: SongReader
    ) -> None:
        self._client, self._call, self._reader = client, call, reader
        self._loop = asyncio.get_running_loop()
        self._cancelled = self._ended = False
        client._songs.add(weakref.ref(self, client._songs.discard))

    @property
    def progress(self) -> SongProgress:
        """Frames, cap, warnings and finish reason of all that has arrived."""
        return self._reader

    async def __anext__(self) -> Chunk:
        try:
            while not self._ended:  # to the stream's own end, see music3_client
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    break
                chunk = self._reader.read(message)
                if chunk is not None:
                    return chunk
        except grpc.aio.AioRpcError as error:
            self._end()
            if self._reader.final and not self._cancelled:
                raise StopAsyncIteration from None
            raise self._reader.error(error.code(), error.details()) from None
        except asyncio.CancelledError:
            self._end()
            # grpc raises this for `cancel` too; only a cancelled task may see it.
            if self._cancelled:
                raise Cancelled("cancelled", frames_done=self._reader.frames_done) from None
            self._call.cancel()
            raise
        except BaseException:
            if self._reader.final:  # see music3_client
                self._client._read_out(self._call)
            else:
                self.cancel()
            self._end()
            raise
        if not self._ended:
            self._end()
            self._reader.end()
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Stop this song; the server frees its place. Iterating over it then raises Cancelled."""
        self._cancelled = True
        self._call.cancel()

    def _end(self) -> None:
        self._ended = True
        self._client._songs.discard(weakref.ref(self))

    def __del__(self) -> None:
        if self._ended:
            return
        act = self._call.cancel
        if self._reader.finish_reason is not None:
            act = functools.partial(self._client._read_out, self._call)
        # Any thread may free a song, but its call is the loop's. Where that is closed, the call is as well.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    async def __aenter__(self) -> "AsyncSongStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if self._reader.finish_reason is None:
            self.cancel()
        else:
            async for _ in self:  # all sound is here: what is left is the stream's end
                pass
        self._end()


class AsyncMusic3Client:
    """A connection to a server of this project's model repository; make it inside a running event loop."""

    def __init__(self, url: str = wire.DEFAULT_URL, *, model: str = wire.DEFAULT_MODEL) -> None:
        self.url, self.model = url, model
        target, secure = wire.split_url(url)
        if secure:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.aio.secure_channel(target, credentials, wire.CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(target, wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._ask = wire.song_method(self._channel)
        self._songs: set[weakref.ref[AsyncSongStream]] = set()  # weak: one that nobody holds any more ends
        self._endings: set[asyncio.Task[None]] = set()

    def stream(
        self,
        caption: str,
        lyrics: str,
        *,
        seed: int = 0,
        max_frames: int | None = None,
        audio_encoding: AudioEncoding = "f32",
        deadline_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncSongStream:
        """Ask for a song, as `Music3Client.stream` does; same options, same errors."""
        request_id = request_id or uuid.uuid4().hex
        request = wire.build_request(
            caption=caption,
            lyrics=lyrics,
            seed=seed,
            max_frames=max_frames,
            audio_encoding=audio_encoding,
            model=self.model,
            request_id=request_id,
        )
        reader = SongReader(
            audio_encoding=audio_encoding, url=self.url, model=self.model, request_id=request_id
        )
        call = self._ask(request, timeout=deadline_s)
        return AsyncSongStream(self, call, reader)

    async def generate(self, caption: str, lyrics: str, **options: object) -> Song:
        """A whole song at once: the chunks of `stream` (same options) put together."""
        async with self.stream(caption, lyrics, **options) as song:
            return wire.join_song([chunk async for chunk in song], song.progress)

    def cancel(self) -> None:
        """Cancel every song of this client that is on its way."""
        for reference in list(self._songs):
            song = reference()
            if song is not None:
                song.cancel()

    async def check_ready(self, *, timeout_s: float = 5.0) -> None:
        """Raises ServerUnavailable unless the server answers and says that the model is ready."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            answer = await self._stub.ModelReady(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            wire.readiness(url=self.url, model=self.model, error=error)
        else:
            wire.readiness(url=self.url, model=self.model, ready=answer.ready)

    async def wait_until_ready(self, timeout_s: float, *, poll_s: float = 0.25) -> None:
        """Wait for a server that is starting. Raises the last ServerUnavailable when time is up."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return await self.check_ready()
            except ServerUnavailable:
                if time.monotonic() + poll_s > deadline_s:
                    raise
                await asyncio.sleep(poll_s)

    async def close(self) -> None:
        """Cancel what is on its way and close the connection."""
        self.cancel()
        await asyncio.sleep(0)  # what songs dropped just now have left for the loop to do
        if self._endings:
            await asyncio.wait(self._endings, timeout=wire.LAST_WORD_S)
        await self._channel.close()

    def _read_out(self, call: grpc.aio.UnaryStreamCall) -> None:
        """Reads what is left of a whole song's stream, in a task of its own."""

        async def read() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass

        ending = asyncio.get_running_loop().create_task(read())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def __aenter__(self) -> "AsyncMusic3Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
