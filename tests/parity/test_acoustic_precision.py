"""What each precision costs: signal-to-noise ratio of a stage against itself in float32, with floors."""

import math

import pytest
import torch
from torch import Tensor

from python_backend_models.engine.acoustic import FlowEngine, FlowResult, FlowWindow, VocoderEngine
from tests.acoustic_models import Acoustic, make_acoustic
from tests.parity.acoustic_oracles import random_sizes
from tests.parity.conftest import Fidelity

SIZES = (7, 8, 9)
# Random weights, CPU. What is lost grows with depth, so the full-size figures come from a GPU.
FLOORS_DB = {
    ("flow", "bfloat16"): 42.0,
    ("flow", "float16"): 62.0,
    ("vocoder", "bfloat16"): 35.0,
    ("vocoder", "float16"): 50.0,
}


def sized(seed: int) -> Acoustic:
    return make_acoustic(random_sizes(seed=seed), seed=100 * seed)


def latent_of_flow(size: int, precision: str) -> Tensor:
    acoustic = sized(size)
    engine = FlowEngine(acoustic.encoder, acoustic.transformer, device="cpu", precision=precision)
    width = 8 * acoustic.configs["condition_encoder"]["condition_hidden_dim"]
    hidden = torch.randn(60, width, generator=torch.Generator().manual_seed(size))
    (result,) = engine.solve([FlowWindow(hidden, size, 0, None)])
    assert isinstance(result, FlowResult)
    return result.latent


def sound_of_vocoder(size: int, precision: str) -> Tensor:
    acoustic = sized(size)
    latent = torch.randn(
        acoustic.configs["vocoder"]["latent_channels"], 80, generator=torch.Generator().manual_seed(size)
    )
    (sound,) = VocoderEngine(acoustic.vocoder, device="cpu", precision=precision).decode([latent], [(0, 0)])
    assert isinstance(sound, Tensor)
    return sound


@pytest.mark.parametrize(("stage", "precision"), FLOORS_DB)
def test_signal_to_noise_ratio(stage: str, precision: str, fidelity: Fidelity) -> None:
    run = latent_of_flow if stage == "flow" else sound_of_vocoder
    ratios_db = []
    for size in SIZES:
        exact = run(size, "float32").double()
        noise = run(size, precision).double() - exact
        ratios_db.append(20 * math.log10((exact.norm() / noise.norm()).item()))
    floor_db = FLOORS_DB[stage, precision]
    fidelity.record(
        section="Precision",
        quantity=f"{stage} stage in {precision}",
        oracle="the same stage in float32",
        cases=len(SIZES),
        largest_error=10 ** (-min(ratios_db) / 20),
        tolerance=10 ** (-floor_db / 20),
        note=f"relative; SNR {min(ratios_db):.1f} dB, floor {floor_db:.0f} dB; CPU, random weights",
    )
