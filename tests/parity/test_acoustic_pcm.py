"""16-bit PCM against libsndfile, which is how vllm-omni writes its WAV files."""

import io

import numpy as np
import soundfile

from python_backend_models.pcm import to_int16
from tests.parity.conftest import Fidelity
from tests.unit.test_pcm import awkward_samples


def test_pcm(fidelity: Fidelity) -> None:
    samples, buffer = awkward_samples(), io.BytesIO()
    soundfile.write(buffer, samples, 32000, format="WAV", subtype="PCM_16")
    buffer.seek(0)
    expected = soundfile.read(buffer, dtype="int16")[0].astype(np.int32)
    got = to_int16(samples, profile="vllm-omni").astype(np.int32)
    fidelity.record(
        quantity="16-bit PCM",
        oracle=f"libsndfile {soundfile.__libsndfile_version__}",
        cases=len(samples),
        largest_error=int(np.abs(got - expected).max()),
        tolerance="equal bits",
        note="in steps; among them every step's float32 neighbours, tiny and clipped samples",
    )
