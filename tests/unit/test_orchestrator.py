"""A song's calls: their order, what is checked between them, and exactly one END on every path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from python_backend_models import chunking
from python_backend_models.orchestrator import SongCancelledError, SongJob, SongRun, TalkerWindow
from python_backend_models.prompt import Prompt

HOP_SAMPLES = 512


def job(name: str = "song", *, frames: int = 301, probe: bool = False) -> SongJob:
    prompt = Prompt(ids=[1, 2, 3, 4], unconditional_ids=[1, 9, 3, 4], warnings=[])
    return SongJob(name, prompt, seed=5, draw_seed=6, lead_in_frames=0, max_frames=frames, probe=probe)


class FakeStages:
    """Windows of a song of `max_frames`, silence for sound, and a record of every call.

    `before` is called with each call's name, and may block or raise. Each window is there only after it was
    asked for `not_yet` times in vain.
    """

    def __init__(self, *, before: Callable[[str], None] = lambda call: None, not_yet: int = 0) -> None:
        self.calls: list[str] = []
        self.carries: list[Any] = []
        self._before = before
        self._windows: list[chunking.Window] = []
        self.not_yet = not_yet
        self._asked_in_vain = 0

    def start(self, key: int, job: SongJob) -> TalkerWindow | None:
        self._call("start")
        self.key = key
        self._windows = chunking.windows(job.max_frames)
        return self._window()

    def next_window(self, key: int) -> TalkerWindow | None:
        self._call("next")
        assert key == self.key
        return self._window()

    def end(self, key: int) -> None:
        self._call("end")

    def solve(self, window: TalkerWindow, seed: int, carry: Any) -> tuple[Any, Any]:
        self._call("solve")
        self.carries.append(carry)
        return window.hidden, f"carry of {window.index}"

    def decode(self, latent: Any, crop_samples: tuple[int, int]) -> Tensor:
        self._call("decode")
        return torch.full((2, latent.latents * HOP_SAMPLES - sum(crop_samples)), 0.25)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self._before(name)

    def _window(self) -> TalkerWindow | None:
        self._asked_in_vain += 1
        if self._asked_in_vain <= self.not_yet:
            return None
        self._asked_in_vain = 0
        window = self._windows.pop(0)
        reason = "length" if window.is_last else None
        return TalkerWindow(window, window.index, window.end_frame, window.crop_samples, reason)


class FakeListener:
    """Keeps what it hears; `gone_after` chunks its client is gone."""

    def __init__(self, *, gone_after: int | None = None) -> None:
        self.gone_after = gone_after
        self.chunks: list[tuple[int, int, str | None]] = []
        self.closed: list[Exception | None] = []

    def cancelled(self) -> bool:
        return self.gone_after is not None and len(self.chunks) >= self.gone_after

    def chunk(self, audio: Tensor, *, frames_done: int, job: SongJob, finish_reason: str | None) -> None:
        assert not self.closed
        assert audio.shape[1:] == (2,)
        assert audio.is_contiguous()
        self.chunks.append((len(audio), frames_done, finish_reason))

    def close(self, error: Exception | None) -> None:
        self.closed.append(error)


def test_windows_go_through_the_stages_in_order_with_the_carry_handed_on() -> None:
    stages, listener = FakeStages(), FakeListener()
    run = SongRun(job(frames=301), stages, listener)
    run.make()
    window = ["solve", "decode"]
    assert stages.calls == ["start", *window, "next", *window, "next", *window, "end"]
    assert stages.carries == [None, "carry of 0", "carry of 1"]
    assert [(done, reason) for _, done, reason in listener.chunks] == [
        (200, None),
        (300, None),
        (301, "length"),
    ]
    # 301 frames are floor(301 * 441 / 128) latents of 512 samples at 44.1 kHz, resampled to 32 kHz.
    assert sum(samples for samples, _, _ in listener.chunks) == -(-(301 * 441 // 128) * 512 * 320 // 441)
    assert run.report.samples == sum(samples for samples, _, _ in listener.chunks)
    assert (run.report.frames, run.call) == (301, None)
    assert run.report.stage_calls == {"talker": 4, "dit": 3, "vocoder": 3}
    assert run.report.first_audio_s <= run.age_s


def test_a_window_is_asked_for_until_it_is_there() -> None:
    stages, listener = FakeStages(not_yet=2), FakeListener()
    SongRun(job(frames=201), stages, listener).make()
    window = ["next", "next", "solve", "decode"]
    assert stages.calls == ["start", *window, "next", *window, "end"]
    assert [done for _, done, _ in listener.chunks] == [200, 201]


def test_a_song_that_waits_for_the_talker_can_be_cancelled() -> None:
    listener = FakeListener()

    def go_away(call: str) -> None:
        if stages.calls.count("next") == 5:
            listener.gone_after = 0

    stages = FakeStages(before=go_away, not_yet=10**9)
    with pytest.raises(SongCancelledError):
        SongRun(job(frames=201), stages, listener).make()
    assert stages.calls == ["start", *["next"] * 5, "end"]
    assert not listener.chunks


@pytest.mark.parametrize("failing", ["start", "solve", "decode", "next", "end"])
def test_a_failure_in_any_call_is_raised_and_ends_the_song_once(failing: str) -> None:
    def explode(call: str) -> None:
        if call == failing:
            raise RuntimeError(failing)

    stages = FakeStages(before=explode)
    with pytest.raises(RuntimeError, match=failing):
        SongRun(job(), stages, FakeListener()).make()
    assert stages.calls.count("end") == 1
    assert stages.calls[-1] == "end"


@pytest.mark.parametrize(("gone_after", "calls"), [(0, 0), (1, 5), (2, 8)])
def test_a_cancelled_song_makes_no_further_sound(gone_after: int, calls: int) -> None:
    stages, listener = FakeStages(), FakeListener(gone_after=gone_after)
    with pytest.raises(SongCancelledError):
        SongRun(job(), stages, listener).make()
    assert len(listener.chunks) == gone_after
    # Per chunk solve, decode and the next window, which is thrown away after the last; and start and end.
    assert len(stages.calls) == calls
    assert stages.calls[-1:] == (["end"] if calls else [])


@pytest.mark.parametrize("moment", ["start", "solve", "decode", "next"])
def test_an_abandoned_song_stops_without_a_sound_and_leaves_its_end_to_others(moment: str) -> None:
    def abandon(call: str) -> None:
        if call == moment:
            run.abandoned = True

    stages, listener = FakeStages(before=abandon), FakeListener()
    run = SongRun(job(), stages, listener)
    with pytest.raises(SongCancelledError):
        run.make()
    assert stages.calls[-1] == moment
    assert len(listener.chunks) == (1 if moment == "next" else 0)


def test_whoever_watches_sees_which_call_is_under_way() -> None:
    seen = {}

    def look(call: str) -> None:
        assert run.call
        seen[call] = run.call.stage

    run = SongRun(job(), FakeStages(before=look), FakeListener())
    run.make()
    assert seen == {
        "start": "talker",
        "next": "talker",
        "end": "talker",
        "solve": "dit",
        "decode": "vocoder",
    }


def test_keys_are_random_and_never_zero() -> None:
    keys = {SongRun(job(), FakeStages(), FakeListener()).key for _ in range(200)}
    assert len(keys) == 200
    assert all(0 < key < 2**63 for key in keys)
