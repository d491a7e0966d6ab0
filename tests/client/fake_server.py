"""A gRPC server in this process that speaks the `music3` side of KServe v2, to inject faults.

A test gives it a script: a function of the request and the call's context that yields messages, sleeps or
aborts. Messages are built here from the protocol alone, so that client and server share no code.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

RATE_HZ = 32_000
SAMPLES_PER_FRAME = 1280

Request = service_pb2.ModelInferRequest
Message = service_pb2.ModelStreamInferResponse
Script = Callable[[Request, grpc.ServicerContext], Iterator[Message]]


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves `script` on `url`. `requests` are those that came; `cancelled` is set when one is given up.

    With `refusal`, a status and its text, calls end with it before their request is read.
    """

    refusal: tuple[grpc.StatusCode, str] | None = None

    def __init__(self, script: Script, *, ready: bool = True) -> None:
        self.script, self.ready = script, ready
        self.requests: list[Request] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def ModelStreamInfer(  # noqa: N802 - the protocol's name
        self, request_iterator: Iterator[Request], context: grpc.ServicerContext
    ) -> Iterator[Message]:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refusal is not None:
            context.abort(*self.refusal)
        for request in request_iterator:
            self.requests.append(request)
            finished = False

            def gone() -> None:
                if not finished:  # noqa: B023 - the value at the call's end is meant
                    self.cancelled.set()

            context.add_callback(gone)
            yield from self.script(request, context)
            finished = True

    def ModelReady(  # noqa: N802
        self, request: service_pb2.ModelReadyRequest, context: grpc.ServicerContext
    ) -> service_pb2.ModelReadyResponse:
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def __enter__(self) -> "FakeServer":
        self._server.start()
        return self

    def stop(self) -> None:
        """Go away at once, as a server that is ended: running calls and the connections break."""
        self._server.stop(0).wait()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def read_inputs(request: Request) -> dict[str, Any]:
    """The request's tensors as Python values, by name."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert list(tensor.shape) == [1]
        if tensor.datatype == "BYTES":
            (size,) = struct.unpack_from("<I", raw)
            assert size == len(raw) - 4
            values[tensor.name] = raw[4:].decode()
        else:
            (values[tensor.name],) = struct.unpack({"INT32": "<i", "INT64": "<q"}[tensor.datatype], raw)
    return values


def song_audio(frames: int, seed: int) -> np.ndarray:
    """The fake song: `[1280 frames - 121, 2]` int16, a function of the seed alone."""
    random = np.random.default_rng(seed)
    return random.integers(-32768, 32768, (frames * SAMPLES_PER_FRAME - 121, 2), dtype=np.int16)


def song_messages(request: Request, *, hop: int = 100, warnings: tuple[str, ...] = ()) -> Iterator[Message]:
    """The whole of a song as a well-behaved server sends it, a chunk every `hop` frames."""
    inputs = read_inputs(request)
    cap = inputs.get("max_frames", 250)
    audio = song_audio(cap, inputs["seed"])
    for start in range(0, cap, hop):
        done = min(start + hop, cap)
        last = done == cap
        piece = audio[start * SAMPLES_PER_FRAME : len(audio) if last else done * SAMPLES_PER_FRAME]
        yield chunk_message(
            request.id,
            piece,
            encoding=inputs["audio_encoding"],
            progress=(done, cap),
            warnings=warnings if start == 0 else (),
            finish_reason="length" if last else None,
        )
    yield final_message(request.id)


def chunk_message(
    request_id: str,
    audio: np.ndarray | None,
    *,
    encoding: str,
    progress: tuple[int, int],
    warnings: tuple[str, ...] = (),
    finish_reason: str | None = None,
    final: bool = False,
) -> Message:
    """One response with audio; `audio` None leaves the audio tensor out."""
    message = Message()
    response = message.infer_response
    response.model_name, response.id = "music3", request_id
    response.parameters["triton_final_response"].bool_param = final
    if audio is not None and encoding == "f32":
        _add(response, "audio", "FP32", audio.shape, (audio / np.float32(32768)).astype("<f4").tobytes())
    elif audio is not None:
        _add(response, "audio_s16", "INT16", audio.shape, audio.astype("<i2").tobytes())
    _add(response, "sample_rate", "INT32", (1,), struct.pack("<i", RATE_HZ))
    _add(response, "progress", "INT32", (2,), struct.pack("<ii", *progress))
    if warnings:
        _add(response, "warnings", "BYTES", (len(warnings),), b"".join(_text(each) for each in warnings))
    if finish_reason is not None:
        _add(response, "finish_reason", "BYTES", (1,), _text(finish_reason))
    return message


def empty_message(request_id: str) -> Message:
    """A response with no tensor at all that is not the last."""
    message = Message()
    message.infer_response.id = request_id
    message.infer_response.parameters["triton_final_response"].bool_param = False
    return message


def final_message(request_id: str) -> Message:
    """The empty response that ends a request."""
    message = empty_message(request_id)
    message.infer_response.parameters["triton_final_response"].bool_param = True
    return message


def error_message(request_id: str, text: str) -> Message:
    """An error as Triton sends it without a status."""
    message = final_message(request_id)
    message.error_message = text
    return message


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<I", len(raw)) + raw


def _add(
    response: service_pb2.ModelInferResponse, name: str, datatype: str, shape: tuple[int, ...], raw: bytes
) -> None:
    output = response.outputs.add()
    output.name, output.datatype = name, datatype
    output.shape.extend(shape)
    response.raw_output_contents.append(raw)


def one_chunk_then_nothing(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
    """A script whose song hangs after its first chunk, until its client is gone."""
    yield next(iter(song_messages(request)))
    while context.is_active():
        time.sleep(0.02)
