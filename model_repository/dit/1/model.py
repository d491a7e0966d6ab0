"""`dit`: windows of hidden states to windows of latents, several songs' in one solve."""

from __future__ import annotations  # the stub fills pb_utils only after this file is read

from functools import partial

import torch
import triton_python_backend_utils as pb_utils

from python_backend_models import metrics, triton_io
from python_backend_models.engine import faults
from python_backend_models.engine.acoustic import Carry, FlowResult, FlowWindow
from python_backend_models.engine.loading import load_flow
from python_backend_models.host_memory import bound_host_memory
from python_backend_models.settings import DitSettings, read


class TritonPythonModel:
    """Stateless; what Triton batched is what the engine gets."""

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        bound_host_memory()
        settings = read(DitSettings, "dit", triton_io.parameters(args))
        torch.set_num_threads(settings.threads)
        self._engine = load_flow(settings, triton_io.compute_device(args, settings.device))
        faults.arm(self._engine, settings.fault)
        self._board = metrics.acoustic_board("dit")
        self._publisher = triton_io.publish_metrics(self._board, args, every_s=settings.metrics_interval_s)

    def execute(self, requests: list) -> list:
        return triton_io.answer_batch(
            requests,
            read_window,
            self._engine.solve,
            write_result,
            count=partial(metrics.count_batch, self._board, "dit"),
        )

    def finalize(self) -> None:
        self._publisher.close()


def read_window(request: pb_utils.InferenceRequest) -> FlowWindow:
    """One request's window; an empty carry means that it is its song's first."""
    latent = triton_io.to_torch(request, "carry_latent")[0]
    condition = triton_io.to_torch(request, "carry_condition")[0]
    return FlowWindow(
        hidden=triton_io.to_torch(request, "hidden")[0],
        seed=triton_io.to_int(request, "seed"),
        window_index=triton_io.to_int(request, "window_index"),
        carry=Carry(latent, condition) if latent.numel() else None,
    )


def write_result(result: FlowResult) -> list:
    """The tensors that answer a request."""
    return [
        triton_io.from_torch("latent", result.latent.unsqueeze(0)),
        triton_io.from_torch("carry_latent", result.carry.latent.unsqueeze(0)),
        triton_io.from_torch("carry_condition", result.carry.condition.unsqueeze(0)),
    ]
