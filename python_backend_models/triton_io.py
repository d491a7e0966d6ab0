"""The only module that knows Triton: tensors, errors, calls and answers between the server and the package.

`triton_python_backend_utils` exists only inside the server's stub process (and as a fake in unit tests).
"""

import base64
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor

from python_backend_models import pcm
from python_backend_models.contract import OUTPUT_RATE_HZ
from python_backend_models.orchestrator import (
    SongCancelledError,
    SongJob,
    TalkerWindow,
    UnavailableError,
)
from python_backend_models.request import InvalidRequestError

_LOG = logging.getLogger(__name__)
# Numbers of Triton's C API: the stub fills pb_utils only after a model's file, and so this one, is read.
_FINAL = 1
_START, _END = 1, 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END
Item = TypeVar("Item")


class StageError(Exception):
    """A stage answered with an error; the message is its own."""


# ------------------------------------------------------------------ start-up


class _ServerLog(logging.Handler):
    """Python logging into the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            logger.log_warn(text)
        else:
            logger.log_info(text)


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
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.numel():
        # The server computes other strides for an empty tensor than torch, and refuses it as not contiguous.
        return pb_utils.Tensor(name, tensor.numpy())
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


def error_response(error: Exception) -> Any:
    """A response that is this error."""
    return pb_utils.InferenceResponse(error=to_triton_error(error))


def send_error(sender: Any, error: Exception) -> None:
    """End a decoupled request with an error."""
    sender.send(error_response(error), flags=_FINAL)


def answer_batch(
    requests: Sequence[Any],
    read: Callable[[Any], Item],
    compute: Callable[[list[Item]], Sequence[Any]],
    write: Callable[[Any], list[Any]],
) -> list[Any]:
    """Answer what Triton batched: read each request, compute all that could be read, write each answer.

    A request that can't be read, or whose own result is an exception, is answered with an error and harms no
    other; if the computation itself raises, all of them are.
    """
    answers: dict[int, Any] = {}
    items: dict[int, Item] = {}
    for index, request in enumerate(requests):
        try:
            items[index] = read(request)
        except Exception as error:
            _LOG.exception("a request could not be read")
            answers[index] = error
    if items:
        try:
            answers.update(zip(items, compute(list(items.values())), strict=True))
        except Exception as error:
            _LOG.exception("a batch of %d failed", len(items))
            answers.update(dict.fromkeys(items, error))
    return [
        error_response(StageError(str(answers[index])))
        if isinstance(answers[index], Exception)
        else pb_utils.InferenceResponse(output_tensors=write(answers[index]))
        for index in range(len(requests))
    ]


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
        return self._sender.is_cancelled()

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
            else:
                send_error(self._sender, error)

    def _audio(self, samples: np.ndarray[Any, Any]) -> list[Any]:
        if self._encoding == "f32":
            return [pb_utils.Tensor("audio", samples)]
        integers = pcm.to_int16(samples, profile=self._profile)
        if self._encoding == "s16":
            return [pb_utils.Tensor("audio_s16", integers)]
        encoded = base64.b64encode(integers.astype("<i2").tobytes()).decode()
        return [from_texts("audio_base64", [encoded], batched=False)]


# ---------------------------------------------------------------- BLS stages


class BlsStages:
    """A song's calls to the other models, one short call per window and stage."""

    def __init__(self, *, name: str, trace: Any) -> None:
        self._name, self._trace = name, trace

    def start(self, key: int, job: SongJob) -> TalkerWindow:
        inputs = [
            from_ints("prompt_ids", job.prompt.ids),
            from_ints("draw_seed", [job.draw_seed], dtype=np.int64),
            from_ints("max_frames", [job.max_frames]),
            from_ints("lead_in_frames", [job.lead_in_frames]),
        ]
        return self._window(key, inputs, flags=_START)

    def next_window(self, key: int) -> TalkerWindow:
        return self._window(key, [], flags=0)

    def end(self, key: int) -> None:
        """Never raises: it runs when the song is over anyway, and the talker drops idle songs by itself."""
        try:
            self._call("talker", [], [], correlation_id=key, flags=_END)
        except Exception as error:
            _LOG.warning("song %s: the talker did not take its end: %s", self._name, error)

    def solve(self, window: TalkerWindow, seed: int, carry: Any) -> tuple[Any, Any]:
        inputs = [
            window.hidden,
            from_ints("seed", [seed], dtype=np.int64),
            from_ints("window_index", [window.index]),
            *(carry or (_empty("carry_latent"), _empty("carry_condition"))),
        ]
        outputs = self._call("dit", inputs, ["latent", "carry_latent", "carry_condition"])
        return outputs["latent"], (outputs["carry_latent"], outputs["carry_condition"])

    def decode(self, latent: Any, crop_samples: tuple[int, int]) -> Tensor:
        outputs = self._call("vocoder", [latent, from_ints("crop_samples", crop_samples)], ["waveform"])
        return torch.from_dlpack(outputs["waveform"].to_dlpack())[0].clone()

    def _window(self, key: int, inputs: list[Any], *, flags: int) -> TalkerWindow:
        names = ["hidden", "window_index", "end_frame", "crop_samples", "finish_reason"]
        outputs = self._call("talker", inputs, names, correlation_id=key, flags=flags)
        reason = outputs["finish_reason"].as_numpy().reshape(-1)[0].decode()
        left, right = outputs["crop_samples"].as_numpy().reshape(-1).tolist()
        return TalkerWindow(
            hidden=outputs["hidden"],
            index=int(outputs["window_index"].as_numpy().reshape(-1)[0]),
            end_frame=int(outputs["end_frame"].as_numpy().reshape(-1)[0]),
            crop_samples=(left, right),
            finish_reason=reason or None,
        )

    def _call(
        self,
        model: str,
        inputs: list[Any],
        outputs: list[str],
        *,
        correlation_id: int = 0,
        flags: int = 0,
    ) -> dict[str, Any]:
        request = pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=outputs,
            inputs=inputs,
            request_id=self._name,
            correlation_id=correlation_id,
            flags=flags,
            trace=self._trace,
        )
        found: dict[str, Any] = {}
        try:
            # Read to the end, then let go of the iterator: it keeps every response in shared memory.
            for response in request.exec(decoupled=True):
                if response.has_error():
                    raise _stage_error(model, response.error())
                found.update({tensor.name(): tensor for tensor in response.output_tensors()})
        except pb_utils.TritonModelException as error:
            raise _stage_error(model, error) from error
        if missing := [name for name in outputs if name not in found]:
            raise StageError(f"{model}: answered without {', '.join(missing)}")
        return found


def _stage_error(model: str, error: Any) -> Exception:
    """What a failed call means to a song: the server is going, a stage is dead, or the song failed."""
    text = error.message() if hasattr(error, "message") else str(error)
    code = error.code() if hasattr(error, "code") else None
    unavailable = code == pb_utils.TritonError.UNAVAILABLE
    if unavailable or "not ready" in text or "not healthy" in text or "unhealthy" in text:
        return UnavailableError(f"{model}: not available, the server is starting, stopping or broken")
    return StageError(f"{model}: {text}")


def _empty(name: str) -> Any:
    return pb_utils.Tensor(name, np.zeros((1, 0, 0), dtype=np.float32))
