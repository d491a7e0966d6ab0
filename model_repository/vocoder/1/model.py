"""`vocoder`: windows of latents to sound at 44.1 kHz, several songs' at once."""

from __future__ import annotations  # the stub fills pb_utils only after this file is read

from functools import partial

import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor

from python_backend_models import metrics, triton_io
from python_backend_models.engine import faults
from python_backend_models.engine.loading import load_vocoder
from python_backend_models.host_memory import bound_host_memory
from python_backend_models.settings import VocoderSettings, read


class TritonPythonModel:
    """Stateless; what Triton batched is what the engine gets."""

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        bound_host_memory()
        settings = read(VocoderSettings, "vocoder", triton_io.parameters(args))
        torch.set_num_threads(settings.threads)
        self._engine = load_vocoder(settings, triton_io.compute_device(args, settings.device))
        faults.arm(self._engine, settings.fault)
        self._board = metrics.acoustic_board("vocoder")
        self._publisher = triton_io.publish_metrics(self._board, args, every_s=settings.metrics_interval_s)

    def execute(self, requests: list) -> list:
        return triton_io.answer_batch(
            requests,
            read_latent,
            self._decode,
            write_waveform,
            count=partial(metrics.count_batch, self._board, "vocoder"),
        )

    def finalize(self) -> None:
        self._publisher.close()

    def _decode(self, items: list[tuple[Tensor, tuple[int, int]]]) -> list[Tensor | Exception]:
        latents, crops = zip(*items, strict=True)
        return self._engine.decode(latents, crops)


def read_latent(request: pb_utils.InferenceRequest) -> tuple[Tensor, tuple[int, int]]:
    """One request's latents and what to cut from its sound."""
    left, right = triton_io.to_numpy(request, "crop_samples").reshape(-1).tolist()
    return triton_io.to_torch(request, "latent")[0], (left, right)


def write_waveform(waveform: Tensor) -> list:
    """The tensors that answer a request."""
    return [triton_io.from_torch("waveform", waveform.unsqueeze(0))]
