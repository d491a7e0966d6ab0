"""The backbone against a plain float64 formula, and the properties that its users lean on."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from python_backend_models.networks import backbone
from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.layers import Linear, RMSNorm
from tests.small_models import BACKBONE_CONFIG

CONFIG = BACKBONE_CONFIG | {"hidden_size": 24, "head_dim": 8, "num_attention_heads": 6}
TOKENS = 9


def random_tensors(config: Mapping[str, Any], *, seed: int) -> dict[str, Tensor]:
    """Checkpoint tensors that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in backbone.checkpoint_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        made[name] = noise / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.2 * noise
    return made


def loaded(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Backbone:
    network = Backbone(config)
    network.load_state_dict(dict(backbone.convert(tensors)), strict=True)
    return network.eval()


class PlainAttention:
    """Causal softmax attention in float64, a key-value head repeated for each of its queries."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if layer in self.stored:
            before = self.stored[layer]
            keys, values = torch.cat((before[0], keys), dim=1), torch.cat((before[1], values), dim=1)
        self.stored[layer] = keys, values
        group = queries.shape[2] // keys.shape[2]
        wide_keys, wide_values = (part.double().repeat_interleave(group, dim=2) for part in (keys, values))
        scores = torch.einsum("rqhd,rkhd->rhqk", queries.double(), wide_keys) * queries.shape[-1] ** -0.5
        new, total = queries.shape[1], keys.shape[1]
        later = torch.arange(total) > torch.arange(total - new, total).unsqueeze(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        return torch.einsum("rhqk,rkhd->rqhd", weights, wide_values).to(queries.dtype)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_rotation(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Channel i and i + half are the two parts of a complex number that turns with the position."""
    half = heads.shape[-1] // 2
    turning = torch.complex(heads[..., :half], heads[..., half:])
    rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = turning * torch.polar(torch.ones(half).double(), positions.double()[:, None, None] * rates)
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_forward(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], embeddings: Tensor, positions: Tensor
) -> Tensor:
    """Hidden states `[tokens, hidden]` of one row by the published formula, in float64."""
    wide = {name: tensor.double() for name, tensor in tensors.items() if name.startswith("model.")}
    x, size, attend = embeddings.double(), config["head_dim"], PlainAttention()
    for layer in range(config["num_hidden_layers"]):
        weights = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in wide.items()}
        normed = plain_norm(x, weights["input_layernorm.weight"])
        queries, keys, values = (
            (normed @ weights[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, size)) for part in "qkv"
        )
        queries, keys = (
            plain_rotation(plain_norm(heads, weights[f"self_attn.{name}.weight"]), positions, 1e6)
            for heads, name in ((queries, "q_norm"), (keys, "k_norm"))
        )
        attended = attend(layer, queries[None], keys[None], values[None])[0].flatten(-2)
        x = x + attended @ weights["self_attn.o_proj.weight"].T
        normed = plain_norm(x, weights["post_attention_layernorm.weight"])
        gate, up = (normed @ weights[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights["mlp.down_proj.weight"].T
    return plain_norm(x, wide["model.norm.weight"])


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_tensors(CONFIG, seed=3)


@pytest.fixture(scope="module")
def network(tensors: dict[str, Tensor]) -> Backbone:
    return loaded(CONFIG, tensors)


def embeddings(rows: int = 1, *, seed: int = 5) -> Tensor:
    return torch.randn(rows, TOKENS, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(seed))


def test_hidden_states_and_logits_equal_the_formula(network: Backbone, tensors: dict[str, Tensor]) -> None:
    for first in (0, 317):
        x, positions = embeddings(), torch.arange(first, first + TOKENS)
        hidden = network(x, positions[None], PlainAttention())[0]
        expected = plain_forward(CONFIG, tensors, x[0], positions)
        torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=2e-5)
        logits = network.logits(hidden)
        assert logits.shape == (TOKENS, 16385)
        head = tensors["lm_head.weight"].double()
        for column, token in ((0, 151670), (1, 151675), (777, 152451), (16384, 168058)):
            torch.testing.assert_close(logits[:, column].double(), expected @ head[token], rtol=0, atol=2e-5)


def test_steps_equal_one_pass(network: Backbone) -> None:
    x, positions = embeddings(2), torch.arange(TOKENS).expand(2, -1)
    whole = network(x, positions, PlainAttention())
    attend, stepped, start = PlainAttention(), [], 0
    for end in (4, 5, 6, 8, TOKENS):
        stepped.append(network(x[:, start:end], positions[:, start:end], attend))
        start = end
    torch.testing.assert_close(torch.cat(stepped, dim=1), whole, rtol=0, atol=1e-5)


def test_later_tokens_change_nothing_before_them(network: Backbone) -> None:
    x, positions = embeddings(), torch.arange(TOKENS)[None]
    changed = x.clone()
    changed[:, 6] += 1
    before, after = (network(given, positions, PlainAttention()) for given in (x, changed))
    assert torch.equal(before[:, :6], after[:, :6])
    assert ((before - after)[:, 6:].abs().amax(dim=-1) > 1e-3).all()


def test_embeddings_are_rows_of_the_table(network: Backbone, tensors: dict[str, Tensor]) -> None:
    ids = torch.tensor([[0, 151644, 168058]])
    assert torch.equal(network.embed(ids), tensors["model.embed_tokens.weight"][ids])


# ------------------------------------------------------------------- rotary


def test_phases_are_exact_to_float32_up_to_the_last_position() -> None:
    """Half a unit in the last place each for the rate and the product, at phases of up to 10,239."""
    phases = backbone.rotary_phases(128, 1e6)
    assert phases.dtype == torch.float32
    assert phases.shape == (10240, 128)
    assert torch.equal(phases[:, :64], phases[:, 64:])
    positions = torch.arange(10240, dtype=torch.float64)
    exact = torch.outer(positions, 1e6 ** (-torch.arange(64, dtype=torch.float64) / 64))
    assert ((phases[:, :64].double() - exact).abs() <= 4 * 2**-24 * exact).all()


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 1, 128, generator=generator)
    phases = backbone.rotary_phases(128, 1e6)

    def score(at: int, distance: int) -> float:
        turned = [
            backbone.rotate(heads, phases[p].cos()[None, None], phases[p].sin()[None, None])
            for heads, p in ((query, at), (key, at - distance))
        ]
        return (turned[0] * turned[1]).sum().item()

    for distance in (0, 1, 300):
        expected = score(distance, distance)
        for at in (1000, 10239):
            assert score(at, distance) == pytest.approx(expected, abs=2e-2)
    assert abs(score(1, 1) - score(300, 300)) > 0.5


def test_bfloat16_weights_leave_the_phases_in_float32(tensors: dict[str, Tensor]) -> None:
    """Positions that bfloat16 can't tell apart still give different states."""
    low = Backbone(CONFIG)
    low.load_state_dict(
        dict(backbone.convert({name: tensor.bfloat16() for name, tensor in tensors.items()})), assign=True
    )
    assert low.rotary_cos.dtype == low.rotary_sin.dtype == torch.float32
    positions = torch.tensor([[10238, 10239]])
    assert positions.bfloat16().unique().numel() == 1
    rotary = low.rotary_cos[positions[0]].bfloat16()
    assert not torch.equal(rotary[0], rotary[1])
    x = embeddings(2)[:, :2].bfloat16()
    near, far = (low(x[:1], torch.tensor([[first, 10239]]), PlainAttention()) for first in (10238, 10239))
    assert not torch.equal(near[:, 1], far[:, 1])


# ------------------------------------------------------------------- blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_the_formula_rounded_as_named(dtype: torch.dtype) -> None:
    x = 3 * torch.randn(400, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    wide = x.double()
    normalised = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    wrong = {}
    for rounds in (True, False):
        norm = RMSNorm(64, eps=1e-6, round_before_scale=rounds)
        norm.weight.data = (1 + 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(4))).to(dtype)
        expected = {
            True: (normalised.to(dtype).double() * norm.weight.double()).to(dtype),
            False: (normalised * norm.weight.double()).to(dtype),
        }
        got = norm(x)
        assert got.dtype == dtype
        wrong[rounds] = (got != expected[rounds]).double().mean().item()
        if dtype == torch.float32:
            torch.testing.assert_close(got, expected[rounds], rtol=3e-7, atol=1e-6)
        else:  # what float32 statistics round differently is rare; the other rule differs in a quarter
            assert wrong[rounds] < 0.01
            assert 0.1 < (got != expected[not rounds]).double().mean().item() < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projected_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """What a song draws must not depend on how many are in its step; packed, as songs run on a CPU."""
    for width, out in ((64, 16385), (256, 384)):
        layer = Linear(width, out)
        generator = torch.Generator().manual_seed(width)
        weight = torch.randn(out, width, generator=generator).to(dtype)
        layer.weight.data = weight
        layer.pack()
        rows = torch.randn(56, width, generator=generator).to(dtype)
        together = layer(rows)
        for count in (2, 4, 6, 16, 32):
            assert torch.equal(layer(rows[:count]), together[:count]), (width, count)
            assert torch.equal(layer(rows[-count:]), together[-count:]), (width, count)
        exact = rows.double() @ weight.double().T
        tolerance = 1e-4 if dtype == torch.float32 else 0.5
        torch.testing.assert_close(together.double(), exact, rtol=2**-8, atol=tolerance)


# ------------------------------------------------------------------- config


def test_rope_theta_is_found_in_both_places() -> None:
    assert backbone.rope_theta({"rope_theta": 5e5}) == 5e5
    assert backbone.rope_theta({"rope_parameters": {"rope_theta": 1e6}}) == 1e6
    assert backbone.rope_theta({"rope_theta": 7.0, "rope_parameters": None}) == 7.0


def test_shapes_fill_the_network_exactly() -> None:
    with torch.device("meta"):
        network = Backbone(CONFIG)
        stored = {name: torch.empty(shape) for name, shape in backbone.checkpoint_shapes(CONFIG).items()}
    converted = {name: tensor.shape for name, tensor in backbone.convert(stored)}
    assert converted == {name: tensor.shape for name, tensor in network.state_dict().items()}
