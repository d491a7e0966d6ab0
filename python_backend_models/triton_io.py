"""Between the server and the package: tensors, errors, answers, log and metrics.

This and `triton_stages`, which calls other models, are the only modules that know Triton.
`triton_python_backend_utils` exists only inside the server's stub process (and as a fake in unit tests).
"""

import base64
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor

from python_backend_models import metrics, pcm
from python_backend_models.contract import OUTPUT_RATE_HZ
from python_backend_models.engine import acoustic, talker
from python_backend_models.orchestrator import SongCancelledError, SongJob, UnavailableError
from python_backend_models.request import InvalidRequestError

_LOG = logging.getLogger(__name__)
# Numbers of Triton's C API: the stub fills pb_utils only after a model's file, and so this one, is read.
_FINAL = 1
# Begins a stage's error that was written for clients; whatever else comes out of a stage may hold paths.
FOR_CLIENTS = "this song: "
Item = TypeVar("Item")


class StageError(Exception):
    """A stage could not do its part of a song; the message is for the client."""


# ------------------------------------------------------------------ start-up


class _ServerLog(logging.Handler):
    """Python logging into the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                logger.log_warn(text)
            else:
                logger.log_info(text)
        except Exception:  # as logging's own handlers: what can't be logged must not stop what logs
            self.handleError(record)


def start_logging() -> None:
    """Send the package's log records to the server's log; call once in `initialize`."""
    package = logging.getLogger("python_backend_models")
    package.handlers[:] = [_ServerLog()]
    package.setLevel(logging.INFO)
    package.propagate = False


def parameters(args: Mapping[str, str]) -> dict[str, str]:
    """The `parameters` of a model's config.pbtxt."""
    config = json.loads(args["model_config"])
    return {name: value["string_value"] for name, value in config.get("parameters", {}).items()}


def sequence_places(args: Mapping[str, str]) -> int:
    """Sequences that a model's config lets be active at once."""
    config = json.loads(args["model_config"])
    return int(config["sequence_batching"]["oldest"]["max_candidate_sequences"])


def compute_device(args: Mapping[str, str], wanted: str) -> torch.device:
    """Where this model instance computes.

    Args:
        wanted: the `device` setting: auto, cpu or cuda.

    Raises:
        RuntimeError: `cuda` is asked for and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("device: cuda is asked for, but torch finds no CUDA device")
    # An instance of KIND_GPU is told its device; KIND_MODEL leaves the choice here.
    index = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# ------------------------------------------------------------------- tensors


def to_torch(request_or_response: Any, name: str) -> Tensor | None:
    """A tensor by name as a CPU tensor that may be a view into shared memory; None if it wasn't sent."""
    found = _find(request_or_response, name)
    return None if found is None else torch.from_dlpack(found.to_dlpack())


def to_numpy(request_or_response: Any, name: str) -> np.ndarray[Any, Any] | None:
    """A tensor by name as a numpy array (STRING: objects of bytes); None if it wasn't sent."""
    found = _find(request_or_response, name)
    return None if found is None else found.as_numpy()


def to_int(request_or_response: Any, name: str) -> int:
    """The one element of an integer tensor.

    Raises:
        ValueError: it wasn't sent, or has more elements.
    """
    array = to_numpy(request_or_response, name)
    if array is None or array.size != 1:
        raise ValueError(f"{name}: one number is needed")
    return int(array.reshape(-1)[0])


def _find(request_or_response: Any, name: str) -> Any:
    if isinstance(request_or_response, pb_utils.InferenceRequest):
        return pb_utils.get_input_tensor_by_name(request_or_response, name)
    return pb_utils.get_output_tensor_by_name(request_or_response, name)


def from_torch(name: str, tensor: Tensor) -> Any:
    """A tensor for the wire, on the CPU: stages may live on different devices, and a window is a few MB."""
    tensor = tensor.detach().cpu()
    # The server looks at the strides of axes of size 1 and 0 too, where torch calls any strides contiguous.
    if not tensor.numel():
        return pb_utils.Tensor(name, tensor.numpy())
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.stride() != plain.stride():
        tensor = plain.copy_(tensor)
    return pb_utils.Tensor.from_dlpack(name, tensor)


def from_ints(name: str, values: Sequence[int], *, dtype: Any = np.int32, batched: bool = True) -> Any:
    """Integers for the wire, `[1, n]`, or `[n]` where not batched."""
    array = np.array(values, dtype=dtype)
    return pb_utils.Tensor(name, array[None] if batched else array)


def from_texts(name: str, texts: Sequence[str], *, batched: bool = True) -> Any:
    """Strings for the wire, `[1, n]`, or `[n]` where not batched."""
    array = np.array([text.encode() for text in texts], dtype=np.object_)
    return pb_utils.Tensor(name, array[None] if batched else array)


# -------------------------------------------------------------------- errors


def to_triton_error(error: Exception) -> Any:
    """The answer to a failed request: code by kind; only messages that were written for clients."""
    match error:
        case InvalidRequestError():
            return pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        case UnavailableError():
            return pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE)
        case SongCancelledError():
            return pb_utils.TritonError(str(error), pb_utils.TritonError.CANCELLED)
        case StageError():
            return pb_utils.TritonError(str(error), pb_utils.TritonError.INTERNAL)
        case _:
            return pb_utils.TritonError(
                "the song failed; the server's log says why", pb_utils.TritonError.INTERNAL
            )


def send_error(sender: Any, error: Exception) -> None:
    """End a decoupled request with an error."""
    sender.send(pb_utils.InferenceResponse(error=to_triton_error(error)), flags=_FINAL)


def stage_failure(error: Exception) -> StageError:
    """What a stage tells the orchestrator of an error of one song."""
    match error:
        case talker.SongError() | acoustic.NonFiniteError():
            return StageError(f"{FOR_CLIENTS}{error}")
        case MemoryError() | torch.OutOfMemoryError():
            return StageError(f"{FOR_CLIENTS}not enough memory")
        case _:
            return StageError("failed")


def answer_batch(
    requests: Sequence[Any],
    read: Callable[[Any], Item],
    compute: Callable[[list[Item]], Sequence[Any]],
    write: Callable[[Any], list[Any]],
    *,
    count: Callable[[int, int, float], None] = lambda windows, failed, seconds: None,
) -> list[Any]:
    """Answer what Triton batched: read each request, compute all that could be read, write each answer.

    A request that can't be read, written, or whose own result is an exception, is answered with an error and
    harms no other. If computing them together raises, each is computed alone: it may have been one of them,
    or too many for the memory.

    Args:
        count: told of the number of requests, how many failed, and the seconds of the computation.
    """
    answers: dict[int, Any] = {}
    items: dict[int, Item] = {}
    for index, request in enumerate(requests):
        _attempt(items, answers, index, read, request)
    started_s = time.perf_counter()
    try:
        answers.update(zip(items, compute(list(items.values())), strict=True))
    except Exception:
        _LOG.exception("a batch of %d failed; computing them one by one", len(items))
        for index, item in items.items():
            _attempt(answers, answers, index, lambda item: compute([item])[0], item)
    seconds = time.perf_counter() - started_s
    written: dict[int, list[Any]] = {}
    for index, answer in answers.items():
        if not isinstance(answer, Exception):
            _attempt(written, answers, index, write, answer)
    count(len(requests), len(requests) - len(written), seconds)
    return [_response(written.get(index), answers[index]) for index in range(len(requests))]


def _attempt(
    results: dict[int, Any], errors: dict[int, Any], index: int, function: Callable[[Any], Any], given: Any
) -> None:
    """Keep what a function makes of one request's part, or the error in its place."""
    try:
        results[index] = function(given)
    except Exception as error:
        _LOG.exception("a request of a batch failed")
        errors[index] = error


def _response(tensors: list[Any] | None, answer: Any) -> Any:
    if tensors is not None:
        return pb_utils.InferenceResponse(output_tensors=tensors)
    _LOG.error("a request is answered with an error: %s: %s", type(answer).__name__, answer)
    return pb_utils.InferenceResponse(error=to_triton_error(stage_failure(answer)))


# ------------------------------------------------------------------- metrics


def publish_metrics(board: metrics.Board, args: Mapping[str, str], *, every_s: float) -> metrics.Publisher:
    """Publish a board on the server's metrics page, if it has one; call in `initialize`."""
    families: dict[str, Any] = {}

    def sink(family: metrics.Family, labels: Mapping[str, str]) -> Any:
        if family.name not in families:
            kind = getattr(pb_utils.MetricFamily, family.kind.upper())
            families[family.name] = pb_utils.MetricFamily(
                name=family.name, description=family.meaning, kind=kind
            )
        return families[family.name].Metric(labels=dict(labels))

    name = args["model_instance_name"]
    try:
        return metrics.Publisher(board, sink, instance_name=name, every_s=every_s)
    except Exception as error:  # metrics are switched off, or this server can't have custom ones
        _LOG.warning("no metrics of %s: %s", name, error)
        return metrics.Publisher(board, None, instance_name=name, every_s=every_s)


# --------------------------------------------------------------- front door


class SongListener:
    """Streams one song's chunks to its client and ends the stream exactly once."""

    def __init__(self, request: Any, sender: Any, *, audio_encoding: str, profile: str) -> None:
        self._sender = sender
        self._encoding, self._profile = audio_encoding, profile
        self._lock = threading.Lock()
        self._closed = False
        self._sent = 0
        self.trace = request.trace()

    def cancelled(self) -> bool:
        """Whether nobody listens any more; also once the stream has ended."""
        # The server frees a request with its final response and doesn't check whom a later question is about
        # (python_backend 24.10), so the two must not overlap.
        with self._lock:
            return self._closed or self._sender.is_cancelled()

    def chunk(self, audio: Tensor, *, frames_done: int, job: SongJob, finish_reason: str | None) -> None:
        tensors = [
            *self._audio(audio.numpy()),
            from_ints("sample_rate", [OUTPUT_RATE_HZ], batched=False),
            from_ints("progress", [frames_done, job.max_frames], batched=False),
        ]
        if not self._sent:
            tensors.append(from_texts("warnings", job.prompt.warnings, batched=False))
            tensors.append(from_ints("prompt_tokens", [len(job.prompt.ids)], batched=False))
        if finish_reason:
            tensors.append(from_texts("finish_reason", [finish_reason], batched=False))
        with self._lock:
            if not self._closed:
                self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors))
                self._sent += 1

    def close(self, error: Exception | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if error is None:
                self._sender.send(flags=_FINAL)
                return
            try:
                send_error(self._sender, error)
            except Exception:
                self._sender.send(flags=_FINAL)  # better an end without a reason than none
                raise

    def _audio(self, samples: np.ndarray[Any, Any]) -> list[Any]:
        if self._encoding == "f32":
            return [pb_utils.Tensor("audio", samples)]
        integers = pcm.to_int16(samples, profile=self._profile)
        if self._encoding == "s16":
            return [pb_utils.Tensor("audio_s16", integers)]
        encoded = base64.b64encode(integers.astype("<i2").tobytes()).decode()
        return [from_texts("audio_base64", [encoded], batched=False)]
