"""`Music3Client`: songs as iterators of chunks, over gRPC.

All songs of a client share one connection, and each has a stream of its own on it: Triton cancels a whole
stream at a time, so this is what lets one song be cancelled and the others go on. Calls are thread-safe.
"""

import contextlib
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client import wire
from client.errors import Cancelled, ServerUnavailable
from client.wire import AudioEncoding, Chunk, Song, SongProgress, SongReader


class SongStream(Iterator[Chunk]):
    """A song on its way: iterate over it for its chunks. Made by `Music3Client.stream`.

    Leaving a `with` block early, or `cancel`, stops the song on the server. So does dropping the song, as a
    `break` out of `for chunk in client.stream(...)` does, once Python frees it; `with` says when.
    `progress` says what has arrived so far.
    """

    def __init__(self, client: "Music3Client", call: grpc.Call, reader: SongReader) -> None:
        self._client, self._call, self._reader = client, call, reader
        self._cancelled = self._ended = False
        client._songs.add(weakref.ref(self, client._songs.discard))

    @property
    def progress(self) -> SongProgress:
        """Frames, cap, warnings and finish reason of all that has arrived."""
        return self._reader

    def __next__(self) -> Chunk:
        try:
            # To the stream's own end, though the final response says that no more comes: a stream that is
            # dropped just then keeps its request in the server for good (Triton 2.51), which then can't exit.
            while not self._ended:
                message = next(self._call, None)
                if message is None:
                    break
                chunk = self._reader.read(message)
                if chunk is not None:
                    return chunk
        except grpc.RpcError as error:
            self._end()
            if self._reader.final and not self._cancelled:
                raise StopIteration from None
            if self._cancelled:
                raise Cancelled("cancelled", frames_done=self._reader.frames_done) from None
            raise self._reader.error(error.code(), error.details()) from None
        except BaseException:
            if self._reader.final:  # an error ended the song; its stream is read to the end like any other
                self._client._read_out(self._call)
            else:
                self.cancel()
            self._end()
            raise
        if not self._ended:
            self._end()
            self._reader.end()
        raise StopIteration

    def cancel(self) -> None:
        """Stop this song, from any thread; the server frees its place. Iterating then raises Cancelled."""
        self._cancelled = True
        self._call.cancel()

    def _end(self) -> None:
        self._ended = True
        self._client._songs.discard(weakref.ref(self))

    def __del__(self, *, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._ended:
            return
        # While Python ends a new thread would not run, and starting one may wait for it for ever.
        if self._reader.finish_reason is None or python_ends():
            self._call.cancel()
        else:
            # All sound is here: the stream is to be read to its end, but nobody may be kept waiting here.
            self._client._read_out(self._call)

    def __enter__(self) -> "SongStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if self._reader.finish_reason is None:
            self.cancel()
        else:
            deque(self, maxlen=0)  # all sound is here: what is left is the stream's end
        self._end()


class Music3Client:
    """A connection to a server of this project's model repository.

    `url` is `host:port` of its gRPC door, or `grpcs://host:port` for TLS. Nothing is sent before the first
    call. Close it, or use it in a `with` block.
    """

    def __init__(self, url: str = wire.DEFAULT_URL, *, model: str = wire.DEFAULT_MODEL) -> None:
        self.url, self.model = url, model
        target, secure = wire.split_url(url)
        if secure:
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(), wire.CHANNEL_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target, wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._ask = wire.song_method(self._channel)
        # Weak, so that a song which nobody holds any more ends. Not a WeakSet: that can't be listed while
        # another thread adds to it.
        self._songs: set[weakref.ref[SongStream]] = set()
        self._endings: set[threading.Thread] = set()

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
    ) -> SongStream:
        """Ask for a song; the request leaves at once, and the chunks come by iterating over the result.

        `max_frames` (25 a second) caps the song's length. `audio_encoding` is `f32` for float32 chunks or
        `s16` for int16. `deadline_s` bounds the whole song; by default it may take as long as it needs.
        Raises InvalidRequest here for values that no request can carry; iterating raises the others of
        `client.errors`.
        """
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
        return SongStream(self, call, reader)

    def generate(self, caption: str, lyrics: str, **options: object) -> Song:
        """A whole song at once: the chunks of `stream` (same options) put together."""
        with self.stream(caption, lyrics, **options) as song:
            return wire.join_song(list(song), song.progress)

    def cancel(self) -> None:
        """Cancel every song of this client that is on its way."""
        for reference in list(self._songs):
            song = reference()
            if song is not None:
                song.cancel()

    def check_ready(self, *, timeout_s: float = 5.0) -> None:
        """Raises ServerUnavailable unless the server answers and says that the model is ready."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            answer = self._stub.ModelReady(request, timeout=timeout_s)
        except grpc.RpcError as error:
            wire.readiness(url=self.url, model=self.model, error=error)
        else:
            wire.readiness(url=self.url, model=self.model, ready=answer.ready)

    def wait_until_ready(self, timeout_s: float, *, poll_s: float = 0.25) -> None:
        """Wait for a server that is starting. Raises the last ServerUnavailable when time is up."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.check_ready()
            except ServerUnavailable:
                if time.monotonic() + poll_s > deadline_s:
                    raise
                time.sleep(poll_s)

    def close(self) -> None:
        """Cancel what is on its way and close the connection."""
        self.cancel()
        deadline_s = time.monotonic() + wire.LAST_WORD_S
        for ending in list(self._endings):
            ending.join(max(0.0, deadline_s - time.monotonic()))
        self._channel.close()

    def _read_out(self, call: grpc.Call) -> None:
        """Reads what is left of a whole song's stream, in a thread of its own."""

        def read() -> None:
            try:
                with contextlib.suppress(grpc.RpcError):
                    deque(call, maxlen=0)
            finally:
                self._endings.discard(ending)

        ending = threading.Thread(target=read, name="song's end", daemon=True)
        self._endings.add(ending)
        ending.start()

    def __enter__(self) -> "Music3Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
