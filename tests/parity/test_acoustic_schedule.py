"""Windows and sample counts for every song length, and the resampler, against vllm-omni's own functions."""

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from python_backend_models import chunking
from python_backend_models.resample import StreamingResampler, resample, torchaudio_functional
from tests.parity import oracles
from tests.parity.conftest import Fidelity

LENGTHS = range(1, 9001)
REFERENCE = "vllm-omni 0.30.0"


@pytest.fixture(scope="module")
def reference_windows() -> dict[int, list[Any]]:
    chunk_windows = oracles.vllm_omni("chunking").chunk_windows
    return {frames: chunk_windows(frames) for frames in LENGTHS}


def test_windows(reference_windows: dict[int, list[Any]], fidelity: Fidelity) -> None:
    module = oracles.vllm_omni("chunking")
    cases = wrong = 0
    for frames, expected in reference_windows.items():
        got = chunking.windows(frames)
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            cases += 1
            wrong += (
                (ours.index, ours.start_frame, ours.end_frame, ours.is_first, ours.is_last)
                != (theirs.index, theirs.start, theirs.end, theirs.is_first, theirs.is_last)
            ) or ours.crop_samples != module.crop_sample_bounds(theirs)
    fidelity.record(
        quantity="windows and crops of songs of 1 ... 9000 frames",
        oracle=REFERENCE,
        cases=cases,
        largest_error=wrong,
        tolerance="equal bits",
        note="error: how many differ",
    )


def test_release_of_windows_while_a_song_runs(fidelity: Fidelity) -> None:
    frame_state = oracles.vllm_omni("frame_state")
    state = frame_state.RequestARState(seed=0, max_frames=9000)
    released = wrong = 0
    frame = torch.zeros(1, 1)
    for frames in range(1, 1001):
        state.frames.append(frame)
        theirs = state.ready_window()
        ours = chunking.window_at(released, frames, finished=False)
        wrong += (theirs is None) != (ours is None)
        if theirs is not None and ours is not None:
            wrong += (ours.index, ours.start_frame, ours.end_frame, ours.is_last) != (
                theirs.index,
                theirs.start,
                theirs.end,
                theirs.is_last,
            )
            state.take_window(theirs, is_final=False)
            released += 1
    assert released == 8
    fidelity.record(
        quantity="which window of a running song is ready",
        oracle=REFERENCE,
        cases=1000,
        largest_error=wrong,
        tolerance="equal bits",
        note="error: how many frame counts differ",
    )


def test_latents(fidelity: Fidelity) -> None:
    aligned = oracles.vllm_omni("dit").MiniMaxMusic3ConditionEncoder.aligned_mel_length
    wrong = sum(chunking.window_latents(frames) != aligned(None, frames) for frames in LENGTHS)
    fidelity.record(
        quantity="latents of 1 ... 9000 frames",
        oracle=REFERENCE,
        cases=len(LENGTHS),
        largest_error=wrong,
        tolerance="equal bits",
        note="error: how many differ",
    )


def lengths_only(waveform: Tensor, orig_freq: int, new_freq: int) -> Tensor:
    """torchaudio's output length without the sound, for tensors that have only a shape."""
    assert (orig_freq, new_freq) == (44100, 32000)
    samples = torch.ceil(torch.as_tensor(320 * waveform.shape[1] / 441)).long().item()
    return waveform.new_empty(waveform.shape[0], samples)


def test_output_length_rule_is_torchaudio_s() -> None:
    for samples in (1, 440, 441, 442, 1536, 220_672, 478_208, 730_112, 982_528):
        waveform = torch.zeros(1, samples)
        expected = torchaudio_functional().resample(waveform, 44100, 32000)
        assert lengths_only(waveform, 44100, 32000).shape == expected.shape


def test_sample_counts(
    reference_windows: dict[int, list[Any]], monkeypatch: pytest.MonkeyPatch, fidelity: Fidelity
) -> None:
    # The reference's resampler runs on shapes alone. Songs share all pushes but their last.
    crop = oracles.vllm_omni("chunking").crop_sample_bounds
    aligned = oracles.vllm_omni("dit").MiniMaxMusic3ConditionEncoder.aligned_mel_length
    module = oracles.vllm_omni("dav")

    def kept(window: Any) -> int:
        left, right = crop(window)
        return 512 * aligned(None, window.length) - left - right

    def shape_only(samples: int) -> list[Tensor]:
        return [torch.empty(2, samples, device="meta")]

    begun: list[tuple[Any, int, int]] = [(module.StreamingResampler(), 0, 0)]  # resampler, 44.1k, 32k so far
    wrong = {"44.1 kHz": 0, "32 kHz, streamed": 0, "32 kHz, in one call": 0}
    with oracles.torchaudio_importable():
        monkeypatch.setattr(sys.modules["torchaudio.functional"], "resample", lengths_only)
        for frames, windows in reference_windows.items():
            while len(begun) < len(windows):
                resampler, before, out = begun[-1]
                resampler = copy.deepcopy(resampler)
                samples = kept(windows[len(begun) - 1])
                emitted = resampler.push(shape_only(samples)).shape[1]
                begun.append((resampler, before + samples, out + emitted))
            resampler, before, out = begun[len(windows) - 1]
            last = kept(windows[-1])
            streamed = out + copy.deepcopy(resampler).push(shape_only(last), flush=True).shape[1]
            whole = module.StreamingResampler().push(shape_only(before + last), flush=True).shape[1]
            wrong["44.1 kHz"] += chunking.song_samples_44k(frames) != before + last
            wrong["32 kHz, streamed"] += chunking.song_samples_32k(frames) != streamed
            wrong["32 kHz, in one call"] += chunking.song_samples_32k(frames, streamed=False) != whole
    for what, count in wrong.items():
        fidelity.record(
            quantity=f"samples of songs of 1 ... 9000 frames, {what}",
            oracle=REFERENCE,
            cases=len(LENGTHS),
            largest_error=count,
            tolerance="equal bits",
            note="error: how many differ",
        )


def noise(samples: int) -> Tensor:
    return 0.3 * torch.randn(2, samples, generator=torch.Generator().manual_seed(samples))


def sines(samples: int) -> Tensor:
    seconds = torch.arange(samples, dtype=torch.float64) / 44100
    left = sum(torch.sin(2 * torch.pi * hz * seconds) / 8 for hz in (55, 440, 1234.5, 9000, 15999, 21000))
    return torch.stack((left, torch.sin(2 * torch.pi * 997 * seconds))).float()


@pytest.mark.parametrize("signal", [noise, sines])
def test_streaming_resampler(signal: Callable[[int], Tensor], fidelity: Fidelity) -> None:
    sound = signal(20 * 44100 + 77)
    whole = torchaudio_functional().resample(sound, 44100, 32000)
    assert torch.equal(resample(sound), whole)
    module, sizes = oracles.vllm_omni("dav"), random.Random(7)
    error, rounds = 0.0, 6
    with oracles.torchaudio_importable():
        for _ in range(rounds):
            ours, theirs, start = StreamingResampler(), module.StreamingResampler(), 0
            pieces = []
            while start < sound.shape[1]:
                end = start + sizes.choice([1, 440, 883, 10_000, 44_032, 176_640, 220_672])
                piece, flush = sound[:, start:end], end >= sound.shape[1]
                got, expected = ours.push(piece, flush=flush), theirs.push([piece], flush=flush)
                assert got.shape == expected.shape
                error = max(error, np.abs(got.numpy() - expected.numpy()).max(initial=0.0).item())
                pieces.append(got)
                start = end
            streamed = torch.cat(pieces, dim=1)
            assert abs(streamed.shape[1] - whole.shape[1]) <= 1
            shared = min(streamed.shape[1], whole.shape[1])
            error = max(error, (streamed[:, :shared] - whole[:, :shared]).abs().max().item())
    fidelity.record(
        quantity=f"streaming resampler, random chunks of 20 s of {signal.__name__}",
        oracle="vllm-omni 0.30.0, and torchaudio 2.11.1 in one call",
        cases=2 * rounds,
        largest_error=error,
        tolerance="equal bits",
        note="the one call may have one sample more or less at the end",
    )
