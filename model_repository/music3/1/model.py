"""`music3`: validates and queues songs, and chains the other models for each. No maths, no weights."""

from __future__ import annotations  # the stub fills pb_utils only after this file is read

import json
import logging
import os
import time
from pathlib import Path

import torch
import triton_python_backend_utils as pb_utils

from python_backend_models import metrics, sampling, triton_io
from python_backend_models.control import DrainNotes
from python_backend_models.delayed_release import DelayedRelease
from python_backend_models.host_memory import bound_host_memory
from python_backend_models.orchestrator import SongJob, SongReport, UnavailableError
from python_backend_models.prompt import PromptBuilder, frame_budget
from python_backend_models.request import FIELDS, InvalidRequestError, parse_request, take_probe
from python_backend_models.settings import DitSettings, Music3Settings, read
from python_backend_models.song_line import LineCensus, SongLine
from python_backend_models.stub_processes import StubWatch
from python_backend_models.triton_stages import BlsStages

_LOG = logging.getLogger("python_backend_models.music3")
_EXIT_TIMEOUT_S = 10.0
_DRAINING = "the server is draining: it finishes its songs and takes no new ones; ask another one"


class TritonPythonModel:
    """Decoupled: `execute` answers nothing itself, each song's thread does."""

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        bound_host_memory()
        self._settings = settings = read(Music3Settings, "music3", triton_io.parameters(args))
        tokenizer = settings.checkpoint_path / "tokenizer" / "tokenizer.json"
        self._prompts = PromptBuilder(tokenizer, profile=settings.profile)
        self._board = metrics.music3_board()
        self._board.set("music3_places", settings.live_songs)
        self._publisher = triton_io.publish_metrics(self._board, args, every_s=settings.metrics_interval_s)
        self._stubs = StubWatch(os.getppid())
        self._notes = DrainNotes(Path(settings.control_folder), os.getppid())
        self._notes.withdraw()
        self._releases = DelayedRelease()
        self._line = SongLine(
            live_songs=settings.live_songs,
            waiting_songs=settings.waiting_songs,
            windows_in_flight=windows_in_flight(settings),
            stage_limit_s=settings.stage_limit_s,
            died_s=self._stubs.died_s,
            on_tick=self._tick,
            on_end=self._song_ended,
            on_lost=lambda stage: self._board.add("music3_lost_calls_total", stage=stage),
        )
        self._board.ask("music3_live_songs", lambda: self._line.census.live)
        self._board.ask("music3_waiting_songs", lambda: self._line.census.waiting)
        _LOG.info(
            "music3: %d songs at once, %d may wait, profile %s",
            settings.live_songs,
            settings.waiting_songs,
            settings.profile,
        )

    def execute(self, requests: list) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except (InvalidRequestError, UnavailableError) as error:
                kind = "refused" if isinstance(error, InvalidRequestError) else "unavailable"
                self._board.add("music3_songs_total", outcome=kind)
                triton_io.send_error(sender, error)
            except Exception as error:
                _LOG.exception("request %s could not be accepted", request.request_id())
                self._board.add("music3_songs_total", outcome="failed")
                triton_io.send_error(sender, error)

    def finalize(self) -> None:
        self._line.close(timeout_s=_EXIT_TIMEOUT_S)
        self._publisher.close()
        self._notes.withdraw()

    def _accept(self, request: pb_utils.InferenceRequest, sender: object) -> None:
        fields = {name: triton_io.to_numpy(request, name) for name in FIELDS}
        parameters = read_parameters(request)
        probe = take_probe(parameters)
        song = parse_request(fields, parameters, profile=self._settings.profile)
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
            max_frames=1 if probe else min(budget, most),
            probe=probe,
        )
        listener = triton_io.SongListener(
            request, sender, audio_encoding=song.audio_encoding, profile=self._settings.profile
        )
        stages = BlsStages(
            name=job.name,
            trace=listener.trace,
            releases=self._releases,
            reopen_after_s=self._settings.reopen_after_s,
        )
        (self._line.probe if probe else self._line.submit)(job, stages, listener)

    def _tick(self, census: LineCensus) -> None:
        """Housekeeping, a few times a second."""
        self._stubs.look()
        self._releases.purge()
        draining = self._notes.wished
        if draining == census.open:
            _LOG.info("music3: %s", "draining" if draining else "taking songs again")
            if draining:
                self._line.refuse(_DRAINING)
            else:
                self._line.reopen()
        self._notes.answer(census.live if draining and not census.open else None)
        self._board.set("music3_accepting", not draining)

    def _song_ended(self, report: SongReport) -> None:
        if report.job.probe and report.outcome == "done":
            return  # every ten seconds, and it says nothing about songs
        metrics.count_song(self._board, report)
        log_song(report)


def read_parameters(request: pb_utils.InferenceRequest) -> dict[str, object]:
    """The request's own parameters, such as those beside the inputs in the body of `generate_stream`.

    Raises:
        InvalidRequestError: a name or a text is not UTF-8, which Triton lets through.
    """
    try:
        return json.loads(request.parameters() or "{}")
    except UnicodeDecodeError:
        raise InvalidRequestError("parameters: not valid UTF-8") from None


def windows_in_flight(settings: Music3Settings) -> int:
    """Windows that may be with `dit` at once: as set, or one batch to solve and one to wait for it.

    More would wait in Triton's queue, where a first window can't overtake; and a batch that Triton makes of
    more than `dit` solves together is answered when its last window is done.
    """
    if settings.windows_in_flight:
        return settings.windows_in_flight
    dit = read(DitSettings, "dit", {})
    on_cpu = dit.device == "cpu" or not torch.cuda.is_available()
    return 2 * (1 if on_cpu else dit.batch_windows)


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
