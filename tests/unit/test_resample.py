"""The resampler against published vectors, its closed form, its own whole-signal result, and torchaudio."""

import math
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from python_backend_models import chunking
from python_backend_models.resample import StreamingResampler, resample, torchaudio_functional

# torchaudio 2.11.1, float32: first taps of phase 0, and the answer to a unit impulse at sample 500 of 1000.
FIRST_TAPS = [
    3.47e-24,
    -0.000124489961,
    -0.000258005806,
    0.00804494508,
    -0.0212097149,
    0.0164228044,
    0.0354732312,
    -0.134969562,
    0.237690151,
    0.718367338,
]
IMPULSE_FROM_360 = [
    0.0287313033,
    -0.061207436,
    0.157392338,
    0.676426113,
    -0.0928628147,
    0.0374756418,
    -0.0156864244,
]


def impulse(at: int, length: int) -> torch.Tensor:
    signal = torch.zeros(2, length)
    signal[:, at] = 1.0
    return signal


def test_published_impulse_answer() -> None:
    answer = resample(impulse(500, 1000))
    assert answer.shape == (2, 726)
    torch.testing.assert_close(answer[0, 360:367], torch.tensor(IMPULSE_FROM_360), atol=1e-9, rtol=1e-7)
    assert torch.equal(answer[0], answer[1])


def test_published_taps() -> None:
    # Output 0 of block b reads x[441 b - 9 + i] with tap i of phase 0.
    taps = torch.stack([resample(impulse(441 + i - 9, 1400))[0, 320] for i in range(10)])
    torch.testing.assert_close(taps, torch.tensor(FIRST_TAPS), atol=1e-12, rtol=1e-7)


def test_filter_is_the_closed_form() -> None:
    base = 320 * 0.99
    generator = random.Random(5)
    for _ in range(200):
        phase, tap = generator.randrange(320), generator.randrange(459)
        # An impulse in the middle of the signal, seen by output `phase` of the block it belongs to.
        got = resample(impulse(882 + tap - 9, 3000))[0, 640 + phase].item()
        tau = max(-6.0, min(6.0, (-phase / 320 + (tap - 9) / 441) * base))
        sinc = 1.0 if tau == 0 else math.sin(math.pi * tau) / (math.pi * tau)
        assert got == pytest.approx(sinc * math.cos(math.pi * tau / 12) ** 2 * base / 441, abs=2e-6)


def test_whole_signal_equals_torchaudio_bit_for_bit() -> None:
    signal = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(resample(signal), torchaudio_functional().resample(signal, 44100, 32000))


def test_any_chunking_equals_the_whole_bit_for_bit() -> None:
    signal = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(2))
    whole = resample(signal)
    sizes = random.Random(3)
    for _ in range(30):
        resampler, pieces, start = StreamingResampler(), [], 0
        while start < signal.shape[1]:
            end = start + sizes.choice([0, 1, 9, 440, 441, 442, 881, 882, 883, 5_000, 20_000])
            pieces.append(resampler.push(signal[:, start:end], flush=end >= signal.shape[1]))
            start = end
        streamed = torch.cat(pieces, dim=1)
        assert abs(streamed.shape[1] - whole.shape[1]) <= 1
        shared = min(streamed.shape[1], whole.shape[1])
        assert torch.equal(streamed[:, :shared], whole[:, :shared])


def test_emits_as_early_as_one_block_of_context_allows() -> None:
    resampler = StreamingResampler()
    assert resampler.push(torch.ones(2, 881)).shape == (2, 0)
    assert resampler.push(torch.ones(2, 1)).shape == (2, 320)
    assert resampler.push(torch.ones(2, 441)).shape == (2, 320)


def test_is_as_new_after_a_flush() -> None:
    signal = torch.randn(2, 3000, generator=torch.Generator().manual_seed(4))
    resampler = StreamingResampler()
    resampler.push(torch.ones(2, 2000))
    resampler.push(torch.ones(2, 7), flush=True)
    assert torch.equal(resampler.push(signal, flush=True), resample(signal))
    assert resampler.push(torch.zeros(2, 0), flush=True).shape == (2, 0)


@pytest.mark.parametrize("frames", [1, 50, 200, 201, 271, 300, 399, 414, 429, 444])
def test_song_lengths_are_as_counted(frames: int) -> None:
    assert resample(torch.zeros(2, chunking.song_samples_44k(frames))).shape[1] == chunking.song_samples_32k(
        frames, streamed=False
    )
    resampler = StreamingResampler()
    chunks = [
        resampler.push(torch.zeros(2, window.kept_samples), flush=window.is_last)
        for window in chunking.windows(frames)
    ]
    assert sum(chunk.shape[1] for chunk in chunks) == chunking.song_samples_32k(frames)


@pytest.mark.parametrize(
    ("frames", "chunks"),
    [
        (201, [159680, 97412]),
        (250, [159680, 160199]),
        (300, [159680, 224471]),
        (350, [159680, 128000, 160373]),
        (450, [159680, 128000, 128320, 160227]),
    ],
)
def test_published_chunk_lengths(frames: int, chunks: list[int]) -> None:
    resampler = StreamingResampler()
    assert [
        resampler.push(torch.zeros(2, window.kept_samples), flush=window.is_last).shape[1]
        for window in chunking.windows(frames)
    ] == chunks


# Both ways of getting at torchaudio's functionals, each in a fresh interpreter.
ANSWER = (
    "import torch; from python_backend_models import resample as r; x = torch.arange(3000.).sin()[None]; "
)
REPORT = "print(r.torchaudio_functional().__file__, r.resample(x).double().sum().item())"


def run(program: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()


def test_works_without_torchaudio_s_binary_and_leaves_no_trace_of_it() -> None:
    file, answer, *left = run(
        ANSWER + REPORT + "; import sys; print(*[m for m in sys.modules if m.startswith('torchaudio')])"
    )
    assert file.endswith("torchaudio/functional/functional.py")
    assert float(answer) == resample(torch.arange(3000.0).sin()[None]).double().sum().item()
    assert left == []


def test_uses_torchaudio_as_it_is_where_it_is_imported(tmp_path: Path) -> None:
    installed = find_spec("torchaudio")
    assert installed is not None
    assert installed.origin is not None
    # A torchaudio that surely imports: the installed one without its binaries.
    shutil.copytree(
        Path(installed.origin).parent, tmp_path / "torchaudio", ignore=shutil.ignore_patterns("*.so", "lib")
    )
    file, answer, same = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torchaudio; "
        + ANSWER
        + REPORT
        + "; print(r.torchaudio_functional() is sys.modules['torchaudio.functional.functional'])"
    )
    assert file == str(tmp_path / "torchaudio/functional/functional.py")
    assert float(answer) == resample(torch.arange(3000.0).sin()[None]).double().sum().item()
    assert same == "True"
