"""The `music3` model's tensors as gRPC messages: a request goes out, responses become chunks.

Nothing here waits for the network: `Music3Client` and `AsyncMusic3Client` differ only in how they wait,
and share this.
One request, many responses, then one marked final (KServe v2 over Triton's ModelStreamInfer).
"""

import struct
import time
from dataclasses import dataclass
from typing import Final, Literal

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2

from client.errors import (
    InvalidRequest,
    Music3Error,
    ServerError,
    ServerUnavailable,
    from_message,
    from_status,
)

AudioEncoding = Literal["f32", "s16"]

DEFAULT_URL: Final = "localhost:8001"
DEFAULT_MODEL: Final = "music3"
# How long closing a client waits for the ends of streams whose songs are whole: the last word is on its way.
LAST_WORD_S: Final = 5.0
# A six-minute song may wait an hour for its turn with no byte sent, so no time-out stands by default;
# a dead peer is found by a ping. Triton takes pings more often than every 300 s for abuse.
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_SERVICE: Final = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

_AUDIO_OUTPUT: Final[dict[str, str]] = {"f32": "audio", "s16": "audio_s16"}
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Chunk:
    """One piece of a song, as it arrived.

    `audio` is `[samples, 2]`: float32 in -1 ... 1 for `f32`, int16 for `s16`. `frames_done` counts the
    frames (25 a second) that the server has decoded with it, out of at most `frame_cap`; the end of what is
    decoded is held back for the next chunk to join on to. `warnings` are those
    that came with this chunk; `finish_reason` is `stop` or `length` on the last one, else None.
    `elapsed_s` is the time since the request was sent.
    """

    audio: np.ndarray
    sample_rate_hz: int
    frames_done: int
    frame_cap: int
    warnings: tuple[str, ...]
    finish_reason: str | None
    elapsed_s: float


@dataclass(frozen=True, eq=False)
class Song:
    """A whole song: all chunks put together. `audio` is `[samples, 2]`."""

    audio: np.ndarray
    sample_rate_hz: int
    frames: int
    warnings: tuple[str, ...]
    finish_reason: str | None
    first_audio_s: float
    total_s: float


def split_url(url: str) -> tuple[str, bool]:
    """`host:port` and whether to use TLS, from `host:port`, `grpc://host:port` or `grpcs://host:port`."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url, False
    if scheme not in ("grpc", "grpcs"):
        raise InvalidRequest(
            f"url: {url!r} is not a gRPC address",
            advice="Give host:port of the gRPC door (8001 by default), or grpcs://host:port for TLS.",
        )
    return rest.rstrip("/"), scheme == "grpcs"


def song_method(
    channel: grpc.Channel | grpc.aio.Channel,
) -> grpc.UnaryStreamMultiCallable | grpc.aio.UnaryStreamMultiCallable:
    """Triton's ModelStreamInfer as a call with one request: what a song needs, and no more.

    On the wire it is the same as the generated stub's call with a stream of one request. But there asyncio's
    gRPC sends that request in steps of its own, and where the server refuses the call in between, it says
    INTERNAL in place of the server's status (every fifth refusal, gRPC 1.85); the blocking one has a thread
    for it. Here the request leaves with the call.
    """
    return channel.unary_stream(
        f"/{_SERVICE}/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )


def build_request(
    *,
    caption: str,
    lyrics: str,
    seed: int,
    max_frames: int | None,
    audio_encoding: AudioEncoding,
    model: str,
    request_id: str,
) -> service_pb2.ModelInferRequest:
    """One song's request. Only what cannot be written into its tensor is refused here; the rest is the
    server's to judge. Raises InvalidRequest."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if audio_encoding not in _AUDIO_OUTPUT:
        allowed = ", ".join(_AUDIO_OUTPUT)
        raise InvalidRequest(f"audio_encoding: {audio_encoding!r} is not one of {allowed}")
    _add_text(request, "caption", caption)
    _add_text(request, "lyrics", lyrics)
    _add_integer(request, "seed", seed, datatype="INT64", limit=_INT64_MAX)
    if max_frames is not None:
        _add_integer(request, "max_frames", max_frames, datatype="INT32", limit=_INT32_MAX)
    _add_text(request, "audio_encoding", audio_encoding)
    return request


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, raw: bytes) -> None:
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.append(1)
    request.raw_input_contents.append(raw)


def _add_text(request: service_pb2.ModelInferRequest, name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}: must be text, not {type(text).__name__}")
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name}: character {error.start} cannot be written as UTF-8") from None
    _add(request, name, "BYTES", struct.pack("<I", len(raw)) + raw)


def _add_integer(
    request: service_pb2.ModelInferRequest, name: str, value: int, *, datatype: str, limit: int
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidRequest(f"{name}: must be a whole number, not {value!r}")
    if not -limit - 1 <= int(value) <= limit:
        raise InvalidRequest(f"{name}: {value} does not fit into {datatype}")
    _add(request, name, datatype, struct.pack("<q" if datatype == "INT64" else "<i", int(value)))


class SongProgress:
    """What has arrived of a song so far: its frames, the cap they count towards, warnings, finish reason; and
    the tokens of its prompt, which the first response tells (None from a server that does not)."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.frames_done = 0
        self.frame_cap = 0
        self.warnings: tuple[str, ...] = ()
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request was made."""
        return time.monotonic() - self._started_s


class SongReader(SongProgress):
    """Turns one song's messages into chunks. `final` once the response that ends the song was read."""

    def __init__(self, *, audio_encoding: AudioEncoding, url: str, model: str, request_id: str) -> None:
        super().__init__(request_id)
        self.final = False
        self._audio_output = _AUDIO_OUTPUT[audio_encoding]
        self._url, self._model = url, model

    def read(self, message: service_pb2.ModelStreamInferResponse) -> Chunk | None:
        """The chunk in a message; None where it has no audio. Raises a Music3Error it carries."""
        response = message.infer_response
        if "triton_final_response" in response.parameters:
            self.final = response.parameters["triton_final_response"].bool_param
        if message.error_message:
            # No more comes. (The metadata `triton_grpc_error` would give errors as gRPC statuses instead, but
            # on Triton 2.51 it ends the server with a segmentation fault when several songs fail at once.)
            self.final = True
            raise from_message(
                message.error_message, url=self._url, model=self._model, frames_done=self.frames_done
            )
        result = InferResult(response)
        warnings = self._texts(result, "warnings")
        self.warnings += warnings
        progress = result.as_numpy("progress")
        if progress is not None:
            self.frames_done, self.frame_cap = (int(value) for value in progress)
        prompt_tokens = result.as_numpy("prompt_tokens")
        if prompt_tokens is not None:
            self.prompt_tokens = int(prompt_tokens[0])
        reason = self._texts(result, "finish_reason")
        if reason:
            self.finish_reason = reason[0]
        audio = result.as_numpy(self._audio_output)
        if audio is None:
            return None
        rate = result.as_numpy("sample_rate")
        if audio.ndim != 2 or audio.shape[1] != 2 or rate is None or progress is None:
            raise self._malformed(f"a chunk of audio {list(audio.shape)} without its rate or progress")
        return Chunk(
            audio=audio,
            sample_rate_hz=int(rate[0]),
            frames_done=self.frames_done,
            frame_cap=self.frame_cap,
            warnings=warnings,
            finish_reason=reason[0] if reason else None,
            elapsed_s=self.elapsed_s,
        )

    def end(self) -> None:
        """The stream is over: raises ServerError unless the song was whole."""
        if not (self.final and self.finish_reason):
            raise self._malformed(f"the server ended the stream early, after {self.frames_done} frames")

    def error(self, code: grpc.StatusCode, details: str | None) -> Music3Error:
        """The exception for a gRPC status that ended the stream."""
        return from_status(
            code, details or "", url=self._url, model=self._model, frames_done=self.frames_done
        )

    def _malformed(self, what: str) -> ServerError:
        advice = "Ask again; if it happens again, is this server of the same version as the client?"
        return ServerError(what, advice=advice, frames_done=self.frames_done)

    @staticmethod
    def _texts(result: InferResult, name: str) -> tuple[str, ...]:
        values = result.as_numpy(name)
        if values is None:
            return ()
        return tuple(value.decode("utf-8", "replace") for value in values.reshape(-1))


def join_song(chunks: list[Chunk], reader: SongReader) -> Song:
    """All chunks of one song, in order, as one array."""
    return Song(
        audio=np.concatenate([chunk.audio for chunk in chunks]),
        sample_rate_hz=chunks[0].sample_rate_hz,
        frames=reader.frames_done,
        warnings=reader.warnings,
        finish_reason=reader.finish_reason,
        first_audio_s=chunks[0].elapsed_s,
        total_s=reader.elapsed_s,
    )


def readiness(*, url: str, model: str, ready: bool = False, error: grpc.RpcError | None = None) -> None:
    """Judges the answer to a readiness call: raises ServerUnavailable for anything but a yes."""
    if error is not None:
        cause = from_status(error.code(), error.details() or "", url=url, model=model)
        if isinstance(cause, ServerUnavailable):
            raise cause from None
        raise ServerUnavailable(f"{url} does not say whether {model!r} is ready: {cause.message}") from None
    if not ready:
        raise ServerUnavailable(
            f"{url} is up, but its model {model!r} is not ready", advice="Ask again in a while; see its log."
        )
