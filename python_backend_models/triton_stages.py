"""A song's calls to the other models, over Triton's business logic scripting."""

import logging
import time
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor

from python_backend_models.delayed_release import DelayedRelease
from python_backend_models.orchestrator import SongJob, TalkerWindow, UnavailableError
from python_backend_models.triton_io import FOR_CLIENTS, StageError, from_ints

_LOG = logging.getLogger(__name__)
_CLOSED = "must specify the START flag"
_START, _END = 1, 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, not in pb_utils while this is read


class SequenceClosedError(Exception):
    """Triton no longer has the sequence that a request without START belongs to."""


class BlsStages:
    """A song's calls to the other models, one short call per window and stage.

    Args:
        name: the song's, for the log and as the calls' request id.
        trace: of the client's request, for Triton's tracing.
        releases: keeps the answers' tensors a little longer.
        reopen_after_s: when the talker's sequence was not used for so long, Triton may have closed it.
    """

    def __init__(self, *, name: str, trace: Any, releases: DelayedRelease, reopen_after_s: float) -> None:
        self._name, self._trace, self._releases = name, trace, releases
        self._reopen_after_s = reopen_after_s
        self._talked_s = time.monotonic()

    def start(self, key: int, job: SongJob) -> TalkerWindow | None:
        inputs = [
            from_ints("prompt_ids", job.prompt.ids),
            from_ints("draw_seed", [job.draw_seed], dtype=np.int64),
            from_ints("max_frames", [job.max_frames]),
            from_ints("lead_in_frames", [job.lead_in_frames]),
        ]
        return self._window(key, inputs, flags=_START)

    def next_window(self, key: int) -> TalkerWindow | None:
        return self._window(key, [], flags=0)

    def end(self, key: int) -> None:
        """Never raises: it runs when the song is over anyway, and the talker drops idle songs by itself."""
        try:
            self._talk(key, [], [], flags=_END)
        except Exception as error:
            _LOG.warning("song %s: the talker did not take its end: %s", self._name, error)

    def solve(self, window: TalkerWindow, seed: int, carry: Any) -> tuple[Any, Any]:
        inputs = [
            window.hidden,
            from_ints("seed", [seed], dtype=np.int64),
            from_ints("window_index", [window.index]),
            *(carry or (_empty("carry_latent"), _empty("carry_condition"))),
        ]
        names = ["latent", "carry_latent", "carry_condition"]
        outputs = _whole("dit", self._call("dit", inputs, names), names)
        return outputs["latent"], (outputs["carry_latent"], outputs["carry_condition"])

    def decode(self, latent: Any, crop_samples: tuple[int, int]) -> Tensor:
        inputs, names = [latent, from_ints("crop_samples", crop_samples)], ["waveform"]
        outputs = _whole("vocoder", self._call("vocoder", inputs, names), names)
        return torch.from_dlpack(outputs["waveform"].to_dlpack())[0].clone()

    def _window(self, key: int, inputs: list[Any], *, flags: int) -> TalkerWindow | None:
        names = ["hidden", "window_index", "end_frame", "crop_samples", "finish_reason"]
        outputs = self._talk(key, inputs, names, flags=flags)
        if not outputs:
            return None
        reason = outputs["finish_reason"].as_numpy().reshape(-1)[0].decode()
        left, right = outputs["crop_samples"].as_numpy().reshape(-1).tolist()
        return TalkerWindow(
            hidden=outputs["hidden"],
            index=int(outputs["window_index"].as_numpy().reshape(-1)[0]),
            end_frame=int(outputs["end_frame"].as_numpy().reshape(-1)[0]),
            crop_samples=(left, right),
            finish_reason=reason or None,
        )

    def _talk(self, key: int, inputs: list[Any], outputs: list[str], *, flags: int) -> dict[str, Any]:
        """Call the talker; its song goes on where Triton has closed the sequence as idle. May be empty."""
        now_s = time.monotonic()
        if now_s - self._talked_s >= self._reopen_after_s:
            flags |= _START
        self._talked_s = now_s
        try:
            found = self._call("talker", inputs, outputs, correlation_id=key, flags=flags)
        except SequenceClosedError:  # just closed, or the talker's config and ours differ
            found = self._call("talker", inputs, outputs, correlation_id=key, flags=flags | _START)
        return _whole("talker", found, outputs) if found else {}

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
        tensors: list[Any] = []
        try:
            # Read to the end, then let go of the iterator: it keeps every response in shared memory.
            for response in request.exec(decoupled=True):
                if response.has_error():
                    raise _stage_error(model, response.error())
                tensors += response.output_tensors()
        except pb_utils.TritonModelException as error:
            raise _stage_error(model, error) from error
        finally:
            self._releases.keep(tensors)
        return {tensor.name(): tensor for tensor in tensors}


def _whole(model: str, found: dict[str, Any], names: list[str]) -> dict[str, Any]:
    if missing := [name for name in names if name not in found]:
        raise StageError(f"{model}: answered without {', '.join(missing)}")
    return found


def _stage_error(model: str, error: Any) -> Exception:
    """What a failed call means to a song: the server is going, a stage is dead, or the song failed."""
    text = error.message() if hasattr(error, "message") else str(error)
    if text.startswith(FOR_CLIENTS):
        return StageError(f"{model}: {text.removeprefix(FOR_CLIENTS)}")
    if _CLOSED in text:
        return SequenceClosedError(text)
    code = error.code() if hasattr(error, "code") else None
    _LOG.warning("%s: %s", model, text)
    unavailable = code == pb_utils.TritonError.UNAVAILABLE
    if unavailable or "not ready" in text or "not healthy" in text or "unhealthy" in text:
        return UnavailableError(f"{model}: not available, the server is starting, stopping or broken")
    return StageError(f"{model}: failed on this song; the server's log says why")


def _empty(name: str) -> Any:
    return pb_utils.Tensor(name, np.zeros((1, 0, 0), dtype=np.float32))
