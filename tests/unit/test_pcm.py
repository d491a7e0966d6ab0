"""PCM against libsndfile (vllm-omni's way) and a scalar oracle (sglang-omni's); headers against readers."""

import io
import struct
import wave

import numpy as np
import pytest
import soundfile

from python_backend_models.pcm import to_int16, wav_header


def written_by_libsndfile(samples: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 32000, format="WAV", subtype="PCM_16")
    buffer.seek(0)
    return soundfile.read(buffer, dtype="int16")[0]


def awkward_samples() -> np.ndarray:
    """Random ones, steps of 16 bits and their float32 neighbours, tiny ones, and ones beyond full scale."""
    draws = np.random.default_rng(0)
    steps = (np.arange(-32770, 32771) / 32768).astype(np.float32)
    return np.concatenate(
        [
            draws.uniform(-1.1, 1.1, 100_000).astype(np.float32),
            (draws.normal(size=50_000) * 10.0 ** draws.uniform(-14, 0, 50_000)).astype(np.float32),
            steps,
            np.nextafter(steps, np.float32(-np.inf)),
            np.nextafter(steps, np.float32(np.inf)),
            np.array([0.0, -0.0, 3.5, -3.5, 1e-30, -1e-30], dtype=np.float32),
        ]
    )


def test_vllm_omni_profile_equals_libsndfile() -> None:
    samples = awkward_samples()
    np.testing.assert_array_equal(to_int16(samples, profile="vllm-omni"), written_by_libsndfile(samples))


def test_vllm_omni_profile_is_the_floor() -> None:
    samples = np.random.default_rng(1).uniform(-1.1, 1.1, 100_000).astype(np.float32)
    floor = np.clip(np.floor(samples.astype(np.float64) * 32768), -32768, 32767)
    np.testing.assert_array_equal(to_int16(samples, profile="vllm-omni"), floor)
    examples = np.array([-1e-9, 0.1, -0.1, 1.0, -1.0], dtype=np.float32)
    assert to_int16(examples, profile="vllm-omni").tolist() == [-1, 3276, -3277, 32767, -32768]


def test_sglang_omni_profile_truncates() -> None:
    samples = awkward_samples()
    product = np.clip(samples, -1, 1) * np.float32(32767)
    np.testing.assert_array_equal(
        to_int16(samples, profile="sglang-omni"), [int(value) for value in product.tolist()]
    )
    examples = np.array([-1e-9, 0.1, -0.1, 1.0, -1.0, 2.0], dtype=np.float32)
    assert to_int16(examples, profile="sglang-omni").tolist() == [0, 3276, -3276, 32767, -32767, 32767]


def test_shape_is_kept() -> None:
    assert to_int16(np.zeros((5, 2), dtype=np.float32), profile="vllm-omni").shape == (5, 2)


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="mnn"):
        to_int16(np.zeros(1, dtype=np.float32), profile="mnn")  # type: ignore[arg-type]


def test_header_is_libsndfile_s() -> None:
    samples = np.zeros((7, 2), dtype=np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 32000, format="WAV", subtype="PCM_16")
    assert wav_header(32000, 2, 28) + bytes(28) == buffer.getvalue()


def test_header_reads_back() -> None:
    data = np.arange(10, dtype="<i2").tobytes()
    with wave.open(io.BytesIO(wav_header(44100, 1, len(data)) + data)) as reader:
        assert (reader.getnchannels(), reader.getsampwidth(), reader.getframerate()) == (1, 2, 44100)
        assert reader.readframes(10) == data


def test_streamed_header_has_unknown_sizes() -> None:
    header = wav_header(32000, 2, None)
    assert len(header) == 44
    assert struct.unpack_from("<I", header, 4) == struct.unpack_from("<I", header, 40) == (0xFFFFFFFF,)
    assert header[:4] + header[8:40] == wav_header(32000, 2, 0)[:4] + wav_header(32000, 2, 0)[8:40]


def test_too_much_for_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        wav_header(32000, 2, 2**32 - 36)
