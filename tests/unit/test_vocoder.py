"""The vocoder against golden vectors, weight norm's closed form, its reach, and the official tensor list."""

import math

import pytest
import torch

from python_backend_models.networks import vocoder
from tests.acoustic_models import MICRO, build, channels_last, make_acoustic, official_digest, random_tensors

CONFIG = MICRO["vocoder"]
OFFICIAL = {
    "decoder_hidden_dim": 1536,
    "decoder_input_dim": 1024,
    "latent_channels": 128,
    "sampling_rate": 44100,
    "upsampling_ratios": [8, 8, 4, 2],
}
OFFICIAL_SHA256 = "f6d971e8568d50e77b1b4f90d1c098f7e869c5b443c081b84d653ce2a3686bfb"


@pytest.fixture(scope="module")
def network() -> vocoder.Vocoder:
    return make_acoustic(seed=4).vocoder


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_channels_are_independent_halves(network: vocoder.Vocoder) -> None:
    latents = noise(2, 4, 11, seed=1)
    sound = network(latents)
    assert sound.shape == (2, 2, 11 * 512)
    swapped = network(torch.cat((latents[:, 2:], latents[:, :2]), dim=1))
    assert torch.equal(swapped, sound.flip(1))
    mixed = network(torch.cat((latents[:, :2], -latents[:, 2:]), dim=1))
    assert torch.equal(mixed[:, 0], sound[:, 0])
    assert not torch.equal(mixed[:, 1], sound[:, 1])


def test_a_latent_reaches_as_far_as_published_and_no_farther_than_said(network: vocoder.Vocoder) -> None:
    # Published: 4756 samples before a latent's own 512 and 4757 after, found by moving a latent. NaN finds
    # one more, whose weight was too small to show.
    latents = noise(1, 4, 41, seed=2)
    latents[..., 20] = math.nan  # reaches everything that reads it, however small the weight
    changed = network(latents).isnan().any(dim=1)[0].nonzero()[:, 0]
    before, after = 20 * 512 - changed.min().item(), changed.max().item() - (21 * 512 - 1)
    assert (before, after) == (4757, 4757)
    assert network.reach_latents == 10
    assert network.hop_samples == 512


def test_snake_is_its_formula(network: vocoder.Vocoder) -> None:
    snake = network.blocks[1].snake1
    x = noise(2, 8, 50, seed=3)
    alpha = snake.alpha.double()
    expected = x.double() + torch.sin(alpha * x.double()) ** 2 / (alpha + 1e-9)
    torch.testing.assert_close(snake(x).double(), expected, atol=2e-6, rtol=0)


def test_weight_norm_folds_to_its_formula() -> None:
    stored = random_tensors("vocoder", CONFIG, seed=5)
    folded = dict(vocoder.convert(stored))
    directions = [name for name in stored if name.endswith("weight_v")]
    assert len(directions) == 30
    for name in directions:
        v, g = stored[name].double(), stored[f"{name[:-1]}g"].double()
        # One length per slice of dimension 0: output channels, but input channels of a transposed one.
        expected = torch.stack([g[i] * v[i] / v[i].square().sum().sqrt() for i in range(len(v))])
        torch.testing.assert_close(folded[name[:-2]].double(), expected, atol=1e-6, rtol=1e-6)
    assert folded.keys() == build("vocoder", CONFIG, stored).state_dict().keys()


def test_inputs_are_left_alone(network: vocoder.Vocoder) -> None:
    latents = noise(1, 4, 5, seed=6)
    kept = latents.clone()
    network(latents)
    assert torch.equal(latents, kept)


def test_convolutions_in_lower_precision_leave_snakes_in_float32() -> None:
    network, reference = make_acoustic(seed=4).vocoder, make_acoustic(seed=4).vocoder
    for module in network.modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d):
            module.bfloat16()
    latents = noise(1, 4, 30, seed=7)
    got, expected = network(latents), reference(latents)
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert 1e-4 < error < 3e-2


def test_official_tensors() -> None:
    stored = vocoder.checkpoint_shapes(OFFICIAL)
    assert len(stored) == 121
    mapped = channels_last(stored)
    assert len(mapped) == 91
    assert official_digest(mapped) == OFFICIAL_SHA256
    assert sum(math.prod(shape) for shape in stored.values()) == 54_170_722
    with torch.device("meta"):
        network = vocoder.Vocoder(OFFICIAL)
    assert network.state_dict().keys() == mapped.keys()
    assert network.reach_latents == 10
