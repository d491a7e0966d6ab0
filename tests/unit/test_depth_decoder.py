"""The depth decoder's cached walk against the published formula over the whole prefix, in float64."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from python_backend_models.networks import depth_decoder
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.networks.layers import pack_linears
from tests.small_models import DEPTH_CONFIG

# The MLP is 64 wide because torch computes the last values of silu otherwise where they fill no block of 32;
# the official width, 6144, has no such rest.
SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_layers": 3, "intermediate_size": 64}
CONFIG = DEPTH_CONFIG | SIZES
ROWS = 6


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    made = {}
    for name, shape in depth_decoder.checkpoint_shapes(CONFIG).items():
        noise = torch.randn(shape, generator=generator)
        scale = 1.0 if "embedding" in name else 1.5 / math.sqrt(shape[-1])
        made[name] = scale * noise if len(shape) > 1 else 1 + 0.2 * noise
    return made


@pytest.fixture(scope="module")
def decoder(tensors: dict[str, Tensor]) -> DepthDecoder:
    network = DepthDecoder(CONFIG)
    network.load_state_dict(dict(depth_decoder.convert(tensors)), strict=True)
    return network.eval()


def frame_inputs(rows: int = ROWS, *, seed: int = 2) -> Tensor:
    """A hidden state and seven embeddings per row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, CONFIG["hidden_size"], generator=generator)


def walk(decoder: DepthDecoder, inputs: Tensor) -> list[Tensor]:
    """The seven outputs, the first from two positions at once, as a frame runs."""
    cache = decoder.start()
    outputs = [decoder(inputs[:, :2], 0, cache)]
    outputs += [decoder(inputs[:, k : k + 1], k, cache) for k in range(2, 8)]
    return outputs


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_outputs(tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Normed outputs `[rows, positions, hidden]` of the whole sequence at once."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    count, heads = inputs.shape[1], CONFIG["num_attention_heads"]
    x = inputs.double() @ wide["projection.weight"].T + wide["pos_embedding.weight"][:count]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    for layer in range(CONFIG["num_layers"]):
        prefix = f"layers.{layer}."
        normed = plain_norm(x, wide[f"{prefix}input_layernorm.weight"])
        queries, keys, values = (
            (normed @ wide[f"{prefix}attn.to_{part}.weight"].T).unflatten(-1, (heads, -1)) for part in "qkv"
        )
        scores = torch.einsum("rqhd,rkhd->rhqk", queries, keys) / math.sqrt(queries.shape[-1])
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        attended = torch.einsum("rhqk,rkhd->rqhd", weights, values).flatten(-2)
        x = x + attended @ wide[f"{prefix}attn.to_out.weight"].T
        normed = plain_norm(x, wide[f"{prefix}post_attention_layernorm.weight"])
        gate, up = (normed @ wide[f"{prefix}{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ wide[f"{prefix}down_proj.weight"].T
    return plain_norm(x, wide["norm.weight"])


def test_outputs_and_logits_equal_the_formula(decoder: DepthDecoder, tensors: dict[str, Tensor]) -> None:
    inputs = frame_inputs()
    expected = plain_outputs(tensors, inputs)
    for codebook, output in enumerate(walk(decoder, inputs), start=1):
        torch.testing.assert_close(output.double(), expected[:, codebook], rtol=0, atol=2e-5)
        logits = decoder.logits(output, codebook)
        head = tensors[f"audio_heads.{codebook - 1}.weight"].double()
        torch.testing.assert_close(logits.double(), expected[:, codebook] @ head.T, rtol=0, atol=5e-5)


def test_an_output_depends_on_nothing_after_it(decoder: DepthDecoder) -> None:
    inputs = frame_inputs()
    changed = inputs.clone()
    changed[:, 5] += 1
    before, after = walk(decoder, inputs), walk(decoder, changed)
    assert all(torch.equal(before[k], after[k]) for k in range(4))
    assert all((before[k] - after[k]).abs().amax() > 1e-3 for k in range(4, 7))


def test_a_frame_remembers_nothing_of_the_one_before(decoder: DepthDecoder) -> None:
    first, second = frame_inputs(seed=3), frame_inputs(seed=4)
    alone = walk(decoder, second)
    walk(decoder, first)
    assert all(torch.equal(a, b) for a, b in zip(walk(decoder, second), alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    network = DepthDecoder(CONFIG)
    converted = depth_decoder.convert({name: tensor.to(dtype) for name, tensor in tensors.items()})
    network.load_state_dict(dict(converted), strict=True, assign=True)
    pack_linears(network)  # as a song runs on a CPU
    inputs = frame_inputs(56).to(dtype)
    together = walk(network, inputs)
    for rows in (slice(0, 2), slice(10, 14), slice(24, 56)):
        for alone, among in zip(walk(network, inputs[rows]), together, strict=True):
            assert torch.equal(alone, among[rows]), rows


def test_half_of_the_position_table_is_never_read(tensors: dict[str, Tensor]) -> None:
    """Frames have eight positions, the table sixteen."""
    spoiled = dict(tensors)
    spoiled["pos_embedding.weight"] = tensors["pos_embedding.weight"].clone()
    spoiled["pos_embedding.weight"][8:] = math.nan
    network = DepthDecoder(CONFIG)
    network.load_state_dict(dict(depth_decoder.convert(spoiled)), strict=True)
    expected = plain_outputs(tensors, frame_inputs())
    for codebook, output in enumerate(walk(network, frame_inputs()), start=1):
        torch.testing.assert_close(output.double(), expected[:, codebook], rtol=0, atol=2e-5)


def test_embeddings_of_a_codebook_are_its_own_rows(decoder: DepthDecoder, tensors: dict[str, Tensor]) -> None:
    table = tensors["audio_embeddings.weight"]
    for codebook in range(1, 8):
        codes = torch.tensor([0, 5, 1023])
        rows = [1024 * (codebook - 1) + code for code in (0, 5, 1023)]
        assert torch.equal(decoder.embed(codes, codebook), table[rows])


def test_shapes_fill_the_network_exactly() -> None:
    with torch.device("meta"):
        network = DepthDecoder(CONFIG)
        stored = {name: torch.empty(shape) for name, shape in depth_decoder.checkpoint_shapes(CONFIG).items()}
    converted = {name: tensor.shape for name, tensor in depth_decoder.convert(stored)}
    assert converted == {name: tensor.shape for name, tensor in network.state_dict().items()}
