"""The condition encoder against golden vectors, its formula in numpy, and the official tensor list."""

import numpy as np
import pytest
import torch

from python_backend_models.networks import condition_encoder
from tests.acoustic_models import MICRO, build, channels_last, official_digest, wave_tensors

CONFIG = MICRO["condition_encoder"]
OFFICIAL = {
    "condition_hidden_dim": 4096,
    "input_hop_length": 960,
    "input_sampling_rate": 24000,
    "num_condition_layers": 8,
    "out_dim": 2048,
    "output_hop_length": 512,
    "output_sampling_rate": 44100,
}
OFFICIAL_SHA256 = "c0d1c18e03e39fafcabb1bd28dad8477ff26abdeb18433d634632244fbaff803"
# Frames -> latents whose source frame differs from exact arithmetic, and the frame. Source: torch 2.13, run.
AWKWARD = {
    32: {55: 15},
    48: {55: 15, 110: 31},
    64: {55: 15, 110: 31},
    80: {55: 15, 110: 31, 220: 63},
    82: {141: 40},
    96: {55: 15, 110: 31, 220: 63},
    112: {55: 15, 110: 31, 220: 63},
    118: {203: 58},
    123: {141: 40, 282: 81},
    150: {430: 124},
    175: {430: 124},
    177: {203: 58, 406: 117},
    190: {327: 94},
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return wave_tensors("condition_encoder", CONFIG)


@pytest.fixture(scope="module")
def encoder(tensors: dict[str, torch.Tensor]) -> condition_encoder.ConditionEncoder:
    return build("condition_encoder", CONFIG, tensors)


def golden_hidden(frames: int) -> torch.Tensor:
    return (
        torch.sin(0.11 * torch.arange(32 * frames, dtype=torch.float64) + 0.5).float().reshape(1, frames, 32)
    )


def source_frames(frames: int) -> list[int]:
    """Which frame each latent reads, by the published rule in IEEE float32."""
    latents = max(1, frames * 441 // 128)
    scale = np.float32(frames) / np.float32(latents)
    return [min(int(np.floor(np.float32(j) * scale)), frames - 1) for j in range(latents)]


def test_golden_vectors(encoder: condition_encoder.ConditionEncoder) -> None:
    condition = encoder(golden_hidden(5))
    assert condition.shape == (1, 6, 17)
    expected = {
        0: [-0.0215351, 0.1179132, 0.1150137, 0.4042595, 0.2306722, -0.1144182],
        16: [-0.2196365, 0.1354856, 0.2948647, 0.1998978, 0.2630665, 0.0562994],
    }
    for latent, values in expected.items():
        torch.testing.assert_close(condition[0, :, latent], torch.tensor(values), atol=2e-6, rtol=0)


@pytest.mark.parametrize("frames", [1, 2, 3, 31, 118, 200])
def test_formula(
    encoder: condition_encoder.ConditionEncoder, tensors: dict[str, torch.Tensor], frames: int
) -> None:
    hidden = golden_hidden(frames)[0].double().numpy().reshape(frames, 8, 4)
    logits = tensors["layer_weight_logits"].double().numpy()
    weights = np.exp(logits) / np.exp(logits).sum()
    mixed = tensors["layer_scale"].item() * np.einsum("tlh,l->th", hidden, weights)
    padded = np.pad(mixed, ((1, 1), (0, 0)))
    kernel, bias = tensors["proj.weight"].double().numpy(), tensors["proj.bias"].double().numpy()
    projected = sum(padded[k : k + frames] @ kernel[:, :, k].T for k in range(3)) + bias
    expected = projected[source_frames(frames)].T
    np.testing.assert_allclose(encoder(golden_hidden(frames))[0].numpy(), expected, atol=1e-6)


def test_stretch_reads_the_frame_float32_gives(encoder: condition_encoder.ConditionEncoder) -> None:
    differing = {}
    for frames in range(1, 201):
        # A convolution of distinct frames has distinct columns, so a column names its frame.
        latents = max(1, frames * 441 // 128)
        stretched = torch.nn.functional.interpolate(
            torch.arange(frames, dtype=torch.float32)[None, None], size=latents, mode="nearest"
        )
        read = stretched[0, 0].int().tolist()
        assert read == source_frames(frames)
        exact = [j * frames // latents for j in range(latents)]
        off = {j: got for j, (got, want) in enumerate(zip(read, exact, strict=True)) if got != want}
        if off:
            differing[frames] = off
        hidden = torch.randn(1, frames, 32, generator=torch.Generator().manual_seed(frames))
        condition = encoder(hidden)
        assert condition.shape == (1, 6, latents)
        first_read = [read.index(frame) for frame in range(frames)]
        assert torch.equal(condition, condition[:, :, first_read][:, :, read])
        assert len({tuple(column) for column in condition[0].T.tolist()}) == frames
    assert differing == AWKWARD


def test_does_not_see_past_the_window(encoder: condition_encoder.ConditionEncoder) -> None:
    # Zeros at the edges: the same as frames that mix to nothing, and not the same as real neighbours.
    song = golden_hidden(12)
    window = song[:, 3:9]
    silence = torch.zeros(1, 1, 32)
    last = source_frames(6).index(5)
    beside_silence = encoder(torch.cat((window, silence), dim=1))[..., source_frames(7).index(5)]
    beside_song = encoder(song[:, 3:10])[..., source_frames(7).index(5)]
    torch.testing.assert_close(encoder(window)[..., last], beside_silence, atol=1e-6, rtol=0)
    assert (encoder(window)[..., last] - beside_song).abs().max() > 1e-3


def test_low_precision_hidden_is_widened_first(encoder: condition_encoder.ConditionEncoder) -> None:
    hidden = golden_hidden(9).bfloat16()
    assert torch.equal(encoder(hidden), encoder(hidden.float()))
    assert encoder(hidden).dtype == torch.float32


def test_other_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="latents per frame"):
        condition_encoder.ConditionEncoder(CONFIG | {"output_hop_length": 256})


def test_official_tensors() -> None:
    stored = condition_encoder.checkpoint_shapes(OFFICIAL)
    assert len(stored) == 4
    assert official_digest(channels_last(stored)) == OFFICIAL_SHA256
    with torch.device("meta"):
        network = condition_encoder.ConditionEncoder(OFFICIAL)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == stored
    assert sum(tensor.numel() for tensor in network.parameters()) == 25_167_881
