"""The flow transformer against golden vectors, its own parts, and the official tensor list."""

import math

import pytest
import torch

from python_backend_models.networks import flow_transformer
from python_backend_models.networks.flow_transformer import FlowTransformer
from tests.acoustic_models import MICRO, channels_last, make_acoustic, official_digest
from tests.unit.test_condition_encoder import golden_hidden

OFFICIAL = {
    "attention_head_dim": 64,
    "condition_dim": 2048,
    "ff_inner_dim": 8192,
    "fourier_embedding_dim": 256,
    "in_channels": 128,
    "num_attention_heads": 32,
    "num_layers": 36,
    "rotary_dim": 32,
}
OFFICIAL_SHA256 = "3ad8e6ed9386a88f435a6b7aa63d3fb65688f31eba025c1b9b651d068972bc3f"


@pytest.fixture(scope="module")
def golden() -> FlowTransformer:
    return make_acoustic().transformer


@pytest.fixture(scope="module")
def network() -> FlowTransformer:
    return make_acoustic(seed=3).transformer


def golden_noise(channels: int, latents: int) -> torch.Tensor:
    index = torch.arange(channels * latents, dtype=torch.float64)
    return torch.cos(0.3 * index).float().reshape(channels, latents)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_golden_velocity(golden: FlowTransformer) -> None:
    condition = make_acoustic().encoder(golden_hidden(5))
    velocity = golden(golden_noise(4, 17)[None], torch.tensor([0.25]), condition)
    expected = {
        0: [-0.5330467, -1.4613872, 0.5087051, 1.7412446],
        16: [-0.4231720, -1.3451520, 0.4165734, 1.5378280],
    }
    for latent, values in expected.items():
        torch.testing.assert_close(velocity[0, :, latent], torch.tensor(values), atol=2e-6, rtol=0)


def test_folded_ends_equal_two_maps_in_a_row(network: FlowTransformer) -> None:
    x, condition = noise(1, 4, 9, seed=1), noise(1, 6, 9, seed=2)
    u = torch.cat((x, torch.zeros_like(x), condition), dim=1)
    in_two = network.proj_in((network.preprocess_conv(u) + u).transpose(1, 2))
    folded = network.fold()
    in_one = x.transpose(1, 2) @ folded.latent_in + network.condition_tokens(condition)
    torch.testing.assert_close(in_one, in_two, atol=2e-6, rtol=0)

    hidden = noise(1, 9, 16, seed=3)
    y = network.proj_out(hidden).transpose(1, 2)
    out_two = (network.postprocess_conv(y) + y).transpose(1, 2)
    torch.testing.assert_close(hidden @ folded.latent_out, out_two, atol=2e-6, rtol=0)


def test_no_condition_has_no_share(network: FlowTransformer) -> None:
    assert not network.condition_tokens(torch.zeros(2, 6, 5)).any()


def test_both_guidance_rows_equal_separate_calls(network: FlowTransformer) -> None:
    x, condition = noise(3, 4, 21, seed=4), noise(3, 6, 21, seed=5)
    time = torch.tensor([0.7])
    guided, plain = network.velocities(
        x.transpose(1, 2),
        network.time_tokens(time)[0],
        network.condition_tokens(condition),
        folded=network.fold(),
        rotary=network.rotary(21),
    )
    for row in range(3):
        for got, given in ((guided, condition[row]), (plain, torch.zeros(6, 21))):
            expected = network(x[row : row + 1], time, given[None])
            torch.testing.assert_close(got[row].t(), expected[0], atol=2e-6, rtol=0)


def test_time_features_are_cosines_then_sines(network: FlowTransformer) -> None:
    frequencies = network.time_proj.weight[:, 0].tolist()
    features = network.time_proj(torch.tensor([0.3]))[0].tolist()
    phases = [2 * math.pi * 0.3 * frequency for frequency in frequencies]
    assert features == pytest.approx([math.cos(p) for p in phases] + [math.sin(p) for p in phases], abs=1e-6)


def test_rotary_tables_are_the_closed_form() -> None:
    with torch.device("meta"):
        network = FlowTransformer(OFFICIAL | {"num_layers": 1})
    network.proj_in = torch.nn.Linear(1, 1)  # a device for the tables
    cos, sin = network.rotary(689)
    assert cos.shape == sin.shape == (690, 16)
    angles = torch.arange(690.0, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(16).double() / 16)
    # float32 angles of up to 689 are off by up to 3e-5.
    torch.testing.assert_close(cos.double(), angles.cos(), atol=5e-5, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=5e-5, rtol=0)


def test_attention_depends_on_distance_and_only_the_leading_channels_turn() -> None:
    cos, sin = make_acoustic(seed=3).transformer.rotary(9)
    q, k = noise(2, 8, seed=6)
    turned_q, turned_k = turned = torch.stack((q, k))[:, None].expand(2, 10, 8).clone()  # one per token
    flow_transformer._rotate(turned, cos, sin)
    scores = turned_q @ turned_k.t()
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:], atol=1e-5, rtol=0)
    assert (scores[0, 0] - scores[0, 5]).abs() > 1e-3
    assert torch.equal(turned_q[:, 4:], q[4:].expand(10, 4))
    angle = torch.tensor(3.0)  # position 3, first frequency is 1
    assert turned_q[3, 0].item() == pytest.approx((q[0] * angle.cos() - q[2] * angle.sin()).item(), abs=1e-6)
    assert turned_q[3, 2].item() == pytest.approx((q[2] * angle.cos() + q[0] * angle.sin()).item(), abs=1e-6)


def test_blocks_in_lower_precision_keep_a_float32_stream() -> None:
    network, reference = make_acoustic(seed=3).transformer, make_acoustic(seed=3).transformer
    for block in network.transformer_blocks:
        for name in ("attn", "ff_in", "ff_out"):
            getattr(block, name).bfloat16()
    x, time, condition = noise(1, 4, 30, seed=7), torch.tensor([0.5]), noise(1, 6, 30, seed=8)
    got, expected = network(x, time, condition), reference(x, time, condition)
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert 1e-4 < error < 2e-2


def test_official_tensors() -> None:
    stored = flow_transformer.checkpoint_shapes(OFFICIAL)
    assert len(stored) == 441
    assert official_digest(channels_last(stored)) == OFFICIAL_SHA256
    assert sum(math.prod(shape) for shape in stored.values()) == 2_431_905_920


def test_conversion_keeps_q_k_v_in_order_and_everything_else() -> None:
    config = MICRO["transformer"]
    stored = {
        name: torch.full(shape, float(place))
        for place, (name, shape) in enumerate(flow_transformer.checkpoint_shapes(config).items())
    }
    converted = dict(flow_transformer.convert(stored))
    with torch.device("meta"):
        expected = FlowTransformer(config).state_dict()
    assert {name: tensor.shape for name, tensor in converted.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    prefix = "transformer_blocks.1.attn.to_"
    assert torch.equal(
        converted[f"{prefix}qkv.weight"], torch.cat([stored[f"{prefix}{part}.weight"] for part in "qkv"])
    )
    untouched = [
        name for name in stored if name.split(".to_")[-1] not in ("q.weight", "k.weight", "v.weight")
    ]
    assert all(converted[name] is stored[name] for name in untouched)
