"""One song, from the model to one reader: as a whole file, as sound while it is made, or as events.

The song is read by a task of its own into a `ByteQueue`; the reader's pace empties it. While the queue is
full, nothing more is taken from the gRPC stream. A reader that takes nothing for the stall limit loses its
song, and so does one that hangs up, at whatever moment. Until the first sound is there, an error has a status
of its own; after it, sound is cut off without the end that HTTP marks, and events end with one that says why.
"""

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from client.async_client import AsyncSongStream
from client.audio_files import AudioSink, open_sink
from client.errors import Music3Error
from client.gateway import events
from client.gateway.byte_queue import ByteQueue
from client.gateway.encoders import FORMATS, stream_encoder
from client.gateway.errors import ApiError, from_song_error
from client.gateway.guard import error_response
from client.gateway.service import Service
from client.gateway.speech_request import SpeechRequest
from client.gateway.waiting import within
from client.wire import Chunk, SongProgress
from python_backend_models.contract import OUTPUT_RATE_HZ

_LOG: Final = logging.getLogger("gateway")
_PIECE_BYTES: Final = 64 * 1024
_PIECE_SAMPLES: Final = 4 * OUTPUT_RATE_HZ
_SLOW_PIECE_SAMPLES: Final = OUTPUT_RATE_HZ // 2  # 20 ms of work as MP3
_MAX_WARNINGS_HEADER_CHARACTERS: Final = 4096
# An event stream begins after this even without sound, and then says now and then that it is alive: a song
# may wait for its turn longer than a proxy waits for a byte.
_EVENTS_BEGIN_S: Final = 1.0
_EVENTS_ALIVE_S: Final = 10.0
_OUTCOMES: Final = {400: "refused", 429: "unavailable", 503: "unavailable", 504: "time_limit"}


class SlowReaderError(Exception):
    """The reader took nothing for the stall limit."""


class SpeechResponse(Response):
    """The answer to one song's request; it takes one of the service's places while it runs."""

    def __init__(self, service: Service, wanted: SpeechRequest, request_id: str) -> None:
        super().__init__()
        self._service, self._wanted, self._id = service, wanted, request_id
        self._format = FORMATS[wanted.response_format]
        self._begun_s = time.monotonic()
        self._first_audio_s: float | None = None
        self._frames = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = _Reader(scope, receive, send, stall_limit_s=self._service.options.stall_limit_s)
        try:
            with self._service.place():
                await self._until_gone(reader)
        except ApiError as error:
            await reader.refuse(error, self._id)

    async def _until_gone(self, reader: "_Reader") -> None:
        options = self._service.options
        deliver = asyncio.ensure_future(self._deliver(reader))
        gone = asyncio.ensure_future(reader.gone())
        outcome = "stopped"
        try:
            # The song has its own deadline; this one also ends the sending of it.
            limit_s = options.time_limit_s + options.stall_limit_s
            await asyncio.wait({deliver, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if reader.ended:
                await deliver  # an answer that is complete looks like a lost connection
            unfinished = "client_gone" if gone.done() else "time_limit"
            outcome = deliver.result() if deliver.done() else unfinished
        finally:
            deliver.cancel()
            gone.cancel()
            await asyncio.gather(deliver, gone, return_exceptions=True)
            self._record(outcome, reader)

    async def _deliver(self, reader: "_Reader") -> str:
        """Sends the answer. What became of the song."""
        try:
            async with self._ask() as song:
                if self._wanted.delivery == "file":
                    await self._send_file(song, reader)
                else:
                    await self._send_stream(song, reader)
        except SlowReaderError:
            return "slow_reader"
        except Music3Error as error:
            _LOG.info("song %s: %s", self._id, error.message)
            failure = from_song_error(error, url=self._service.client.url)
        except Exception:
            _LOG.exception("song %s: the gateway failed", self._id)
            failure = ApiError(500, "the gateway failed on this song; its log says why")
        else:
            return "done"
        if not reader.begun:
            await reader.refuse(failure, self._id)
        elif self._wanted.delivery == "sse":
            await reader.send(events.failed(failure))
            await reader.end()
        return _OUTCOMES.get(failure.status, "failed")

    def _ask(self) -> AsyncSongStream:
        return self._service.client.stream(
            self._wanted.caption,
            self._wanted.lyrics,
            seed=self._wanted.seed,
            max_frames=self._wanted.max_frames,
            audio_encoding=self._format.encoding,
            deadline_s=self._service.options.time_limit_s,
            request_id=self._id,
        )

    # ------------------------------------------------------------ a whole file

    async def _send_file(self, song: AsyncSongStream, reader: "_Reader") -> None:
        ending = self._format.ending or ".pcm"
        # On disk, as eight songs of six minutes would be half a gigabyte of memory.
        with tempfile.NamedTemporaryFile(prefix="music3-", suffix=ending) as file:
            await self._fill(song, file)
            size = file.seek(0, 2)
            file.seek(0)
            headers = self._headers(song.progress) | {
                "Content-Length": str(size),
                "X-Music3-Frames": str(song.progress.frames_done),
                "X-Music3-Finish-Reason": str(song.progress.finish_reason),
            }
            await reader.begin(headers)
            while piece := file.read(_PIECE_BYTES):
                await reader.send(piece)
        await reader.end()

    async def _fill(self, song: AsyncSongStream, file: BinaryIO) -> None:
        sink: AudioSink | None = None
        try:
            async for chunk in song:
                self._note(chunk)
                if sink is None:
                    sink = self._open_sink(file, chunk)
                await self._encoded(sink.write, chunk.audio)
        finally:
            if sink is not None:
                sink.close()

    def _open_sink(self, file: BinaryIO, chunk: Chunk) -> AudioSink:
        if self._format.ending is None:
            return _PcmSink(file)
        return open_sink(Path(file.name), sample_rate_hz=chunk.sample_rate_hz, dtype=chunk.audio.dtype)

    # ------------------------------------------------------------ as it is made

    async def _send_stream(self, song: AsyncSongStream, reader: "_Reader") -> None:
        queue = ByteQueue(self._service.options.buffer_bytes, on_change=self._service.metrics.buffered.inc)
        produce = asyncio.ensure_future(self._produce(song, queue))
        try:
            piece = await self._next(queue, _EVENTS_BEGIN_S)
            media_type = "text/event-stream" if self._wanted.delivery == "sse" else self._format.media_type
            # Proxies that know this header do not wait for the whole.
            streamed = {"Content-Type": media_type, "X-Accel-Buffering": "no"}
            await reader.begin(self._headers(song.progress) | streamed)
            while piece is not None:
                await reader.send(piece)
                piece = await self._next(queue, _EVENTS_ALIVE_S)
            await reader.end()
        finally:
            produce.cancel()
            await asyncio.gather(produce, return_exceptions=True)
            queue.discard()

    async def _next(self, queue: ByteQueue, events_timeout_s: float) -> bytes | None:
        if self._wanted.delivery == "audio":
            return await queue.get()
        try:
            return await queue.get(timeout_s=events_timeout_s)
        except asyncio.TimeoutError:
            return events.ALIVE

    async def _produce(self, song: AsyncSongStream, queue: ByteQueue) -> None:
        in_events = self._wanted.delivery == "sse"
        try:
            encoder = stream_encoder(self._wanted.response_format)
            is_first = True
            async for chunk in song:
                self._note(chunk)
                for start in range(0, len(chunk.audio), self._piece_samples()):
                    audio = chunk.audio[start : start + self._piece_samples()]
                    data = await self._encoded(encoder.encode, audio)
                    if in_events:
                        data = events.delta(data, self._wanted, song.progress, is_first=is_first)
                    await queue.put(data)
                    is_first = False
            tail = await self._encoded(encoder.finish)
            if tail:
                if in_events:
                    tail = events.delta(tail, self._wanted, song.progress, is_first=False)
                await queue.put(tail)
            if in_events:
                await queue.put(events.done(self._wanted, song.progress))
            queue.close()
        except Exception as error:
            queue.close(error)

    def _piece_samples(self) -> int:
        """How much is encoded at once: what takes long must not keep the first sound waiting."""
        return _SLOW_PIECE_SAMPLES if self._format.slow else _PIECE_SAMPLES

    # ------------------------------------------------------------ both

    async def _encoded(self, work: Callable[..., Any], *arguments: object) -> Any:
        if not self._format.slow:
            return work(*arguments)
        task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Nobody may close what a thread is still writing to.
            await asyncio.wait({task})
            raise

    def _note(self, chunk: Chunk) -> None:
        metrics = self._service.metrics
        if self._first_audio_s is None:
            self._first_audio_s = time.monotonic() - self._begun_s
            metrics.first_audio.observe(self._first_audio_s)
        self._frames = chunk.frames_done
        metrics.audio.inc(len(chunk.audio) / chunk.sample_rate_hz)

    def _headers(self, progress: SongProgress) -> dict[str, str]:
        ending = self._format.ending or ".pcm"
        headers = {
            "Content-Type": self._format.media_type,
            "Content-Disposition": f'inline; filename="song-seed{self._wanted.seed}{ending}"',
            "Cache-Control": "no-store",
            "X-Request-Id": self._id,
            "X-Music3-Seed": str(self._wanted.seed),
        }
        if progress.frame_cap:
            headers["X-Music3-Frame-Cap"] = str(progress.frame_cap)
        if progress.prompt_tokens is not None:
            headers["X-Music3-Prompt-Tokens"] = str(progress.prompt_tokens)
        warnings = json.dumps(progress.warnings)
        if progress.warnings and len(warnings) <= _MAX_WARNINGS_HEADER_CHARACTERS:
            headers["X-Music3-Warnings"] = warnings
        return headers

    def _record(self, outcome: str, reader: "_Reader") -> None:
        metrics = self._service.metrics
        metrics.songs.labels(outcome, self._wanted.delivery).inc()
        metrics.sent.inc(reader.sent_bytes)
        first = "never" if self._first_audio_s is None else f"after {self._first_audio_s:.2f} s"
        _LOG.info(
            "song %s: %s, %s as %s, seed %d, %d frames, %d bytes sent, first audio %s, took %.2f s",
            *(self._id, outcome, self._wanted.response_format, self._wanted.delivery, self._wanted.seed),
            *(self._frames, reader.sent_bytes, first, time.monotonic() - self._begun_s),
        )


class _Reader:
    """Whoever asked, as ASGI sees them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, stall_limit_s: float) -> None:
        self.begun = self.ended = False
        self.sent_bytes = 0
        self._scope, self._receive, self._send, self._limit_s = scope, receive, send, stall_limit_s

    async def gone(self) -> None:
        """Returns once the connection is lost. The request's body has been read by now."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def refuse(self, error: ApiError, request_id: str) -> None:
        """The answer is this error."""
        self.begun = self.ended = True
        answer = error_response(error, extra_headers=[("X-Request-Id", request_id)])
        await answer(self._scope, self._receive, self._send)

    async def begin(self, headers: dict[str, str]) -> None:
        self.begun = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._paced({"type": "http.response.start", "status": 200, "headers": raw})

    async def send(self, data: bytes) -> None:
        """Hands bytes to the connection as fast as it takes them. Raises SlowReaderError."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            await self._paced({"type": "http.response.body", "body": piece, "more_body": True})
            self.sent_bytes += len(piece)

    async def end(self) -> None:
        self.ended = True
        await self._paced({"type": "http.response.body", "body": b"", "more_body": False})

    async def _paced(self, message: Message) -> None:
        try:
            await within(self._send(message), self._limit_s)
        except asyncio.TimeoutError:
            raise SlowReaderError from None


class _PcmSink:
    def __init__(self, file: BinaryIO) -> None:
        self.samples = 0
        self._file = file

    def write(self, audio: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(audio, dtype="<i2").tobytes())
        self.samples += len(audio)

    def close(self) -> None:
        self._file.flush()
