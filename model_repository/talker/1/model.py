"""`talker`: hands each request of a song to the engine's thread, which answers when its window is ready."""

from __future__ import annotations  # the stub fills pb_utils only after this file is read

import logging

import torch
import triton_python_backend_utils as pb_utils

from python_backend_models import metrics, triton_io
from python_backend_models.contract import CODEBOOKS
from python_backend_models.engine import faults
from python_backend_models.engine.loading import load_talker
from python_backend_models.engine.talker import SongError, SongPlan
from python_backend_models.engine.talker_loop import Answer, Reply, StepReport, TalkerLoop
from python_backend_models.host_memory import bound_host_memory
from python_backend_models.prompt import unconditional_twin
from python_backend_models.settings import SettingsError, TalkerSettings, read

_LOG = logging.getLogger("python_backend_models.talker")


class TritonPythonModel:
    """Decoupled and sequence-batched; a sequence is a song."""

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        bound_host_memory()
        settings = read(TalkerSettings, "talker", triton_io.parameters(args))
        places = triton_io.sequence_places(args)
        if settings.live_songs > places:
            raise SettingsError(
                f"talker: live_songs is {settings.live_songs}, max_candidate_sequences only {places}"
            )
        torch.set_num_threads(settings.threads)
        engine = load_talker(settings, triton_io.compute_device(args, settings.device))
        faults.arm(engine, settings.fault)
        self._board = metrics.talker_board()
        empty = engine.census
        self._board.set("music3_talker_slots", empty.slots_free)
        self._board.set("music3_talker_pages", empty.pages_free)
        self._count(StepReport(empty, frames=0, prefilled=False, seconds=0.0))
        self._publisher = triton_io.publish_metrics(self._board, args, every_s=settings.metrics_interval_s)
        self._loop = TalkerLoop(
            engine,
            idle_limit_s=settings.idle_limit_s,
            answer_within_s=settings.answer_within_s,
            on_step=self._count,
        )

    def execute(self, requests: list) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except Exception as error:
                _LOG.exception("a request of a song could not be taken")
                triton_io.send_error(sender, triton_io.stage_failure(error))

    def finalize(self) -> None:
        self._loop.close()
        self._publisher.close()

    def _count(self, report: StepReport) -> None:
        metrics.count_step(
            self._board,
            vars(report.census),
            frames=report.frames,
            prefilled=report.prefilled,
            seconds=report.seconds,
        )

    def _take(self, request: pb_utils.InferenceRequest, sender: object) -> None:
        key = triton_io.to_int(request, "CORRID")
        if triton_io.to_int(request, "END"):
            self._loop.end(key)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        elif (plan := read_plan(request)) is not None:
            self._loop.start(key, plan, replier(sender))
        else:
            # With START, too, where the server had closed the sequence of a song that goes on.
            self._loop.next_window(key, replier(sender))


def read_plan(request: pb_utils.InferenceRequest) -> SongPlan | None:
    """A song's plan from its first request; None from a later one, which has no inputs."""
    prompt = triton_io.to_numpy(request, "prompt_ids")
    if prompt is None:
        return None
    ids = prompt.reshape(-1).tolist()
    return SongPlan(
        prompt=ids,
        twin=unconditional_twin(ids),
        draw_seed=triton_io.to_int(request, "draw_seed"),
        max_frames=triton_io.to_int(request, "max_frames"),
        lead_in_frames=triton_io.to_int(request, "lead_in_frames"),
    )


def replier(sender: object) -> Reply:
    """Answers a request with one window, with nothing where there is none yet, or an error, and ends it."""

    def reply(result: Answer) -> None:
        if result is None:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        if isinstance(result, SongError):
            triton_io.send_error(sender, triton_io.stage_failure(result))
            return
        window = result.window
        tensors = [
            triton_io.from_torch("hidden", result.hidden.to(torch.bfloat16).unsqueeze(0)),
            triton_io.from_torch("codes", result.codes.to(torch.int32).view(1, -1, CODEBOOKS)),
            triton_io.from_ints("window_index", [window.index]),
            triton_io.from_ints("end_frame", [window.end_frame]),
            triton_io.from_ints("crop_samples", window.crop_samples),
            triton_io.from_texts("finish_reason", [result.finish_reason or ""]),
        ]
        sender.send(
            pb_utils.InferenceResponse(output_tensors=tensors),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    return reply
