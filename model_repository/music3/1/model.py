"""`music3`: validates and queues songs, and chains the other models for each. No maths, no weights."""

from __future__ import annotations  # the stub fills pb_utils only after this file is read

import json
import logging
import time

import triton_python_backend_utils as pb_utils

from python_backend_models import sampling, triton_io
from python_backend_models.orchestrator import SongJob, SongLine, SongReport, UnavailableError
from python_backend_models.prompt import PromptBuilder, frame_budget
from python_backend_models.request import FIELDS, InvalidRequestError, parse_request
from python_backend_models.settings import Music3Settings, read

_LOG = logging.getLogger("python_backend_models.music3")
_EXIT_TIMEOUT_S = 10.0


class TritonPythonModel:
    """Decoupled: `execute` answers nothing itself, each song's thread does."""

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        self._settings = read(Music3Settings, "music3", triton_io.parameters(args))
        tokenizer = self._settings.checkpoint_path / "tokenizer" / "tokenizer.json"
        self._prompts = PromptBuilder(tokenizer, profile=self._settings.profile)
        self._line = SongLine(
            live_songs=self._settings.live_songs,
            waiting_songs=self._settings.waiting_songs,
            on_end=log_song,
        )
        _LOG.info(
            "music3: %d songs at once, %d may wait, profile %s",
            self._settings.live_songs,
            self._settings.waiting_songs,
            self._settings.profile,
        )

    def execute(self, requests: list) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except (InvalidRequestError, UnavailableError) as error:
                triton_io.send_error(sender, error)
            except Exception as error:
                _LOG.exception("request %s could not be accepted", request.request_id())
                triton_io.send_error(sender, error)

    def finalize(self) -> None:
        self._line.close(timeout_s=_EXIT_TIMEOUT_S)

    def _accept(self, request: pb_utils.InferenceRequest, sender: object) -> None:
        fields = {name: triton_io.to_numpy(request, name) for name in FIELDS}
        song = parse_request(fields, json.loads(request.parameters() or "{}"), profile=self._settings.profile)
        prompt = self._prompts.build(song.caption, song.lyrics)
        most = self._settings.max_frames
        if song.max_frames is not None and song.max_frames > most:
            raise InvalidRequestError(
                f"max_frames: {song.max_frames} is more than this server makes; at most {most}"
            )
        budget = frame_budget(len(prompt.ids), song.max_frames)
        job = SongJob(
            name=request.request_id() or f"unnamed-{time.monotonic_ns():x}",
            prompt=prompt,
            seed=song.seed,
            draw_seed=sampling.ar_draw_seed(song.seed, profile=self._settings.profile),
            lead_in_frames=sampling.lead_in_frames(self._settings.profile),
            max_frames=min(budget, most),
        )
        listener = triton_io.SongListener(
            request, sender, audio_encoding=song.audio_encoding, profile=self._settings.profile
        )
        stages = triton_io.BlsStages(name=job.name, trace=listener.trace)
        self._line.submit(job, stages, listener)


def log_song(report: SongReport) -> None:
    """One line per song: what came of it and when."""
    waited, first = report.started_s or report.ended_s, report.first_audio_s
    _LOG.info(
        "song %s: %s, %d of %d frames, prompt %d tokens, waited %.2f s, first audio %s, took %.2f s",
        report.job.name,
        report.outcome,
        report.frames,
        report.job.max_frames,
        len(report.job.prompt.ids),
        waited,
        "never" if first is None else f"after {first:.2f} s",
        report.ended_s,
    )
