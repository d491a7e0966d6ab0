"""The acoustic networks against diffusers' and vllm-omni's classes, three random sizes each."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from python_backend_models.networks import vocoder
from tests.acoustic_models import Acoustic, make_acoustic
from tests.parity.acoustic_oracles import (
    diffusers_network,
    random_sizes,
    vllm_omni_flow,
    vllm_omni_vocoder,
)
from tests.parity.conftest import Fidelity

SIZES = (1, 2, 3)
BOTH = "vllm-omni 0.30.0, diffusers 0.42.1"


@pytest.fixture(scope="module")
def acoustics() -> list[Acoustic]:
    return [make_acoustic(random_sizes(seed=seed), seed=100 * seed) for seed in SIZES]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    for got, expected in pairs:
        assert got.shape == expected.shape
    return max((got.double() - expected.double()).abs().max().item() for got, expected in pairs)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_condition_encoder_at_every_length(
    acoustics: list[Acoustic], dtype: torch.dtype, fidelity: Fidelity
) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for acoustic in acoustics:
        ours = make_acoustic(acoustic.configs, seed=1).encoder
        ours.load_state_dict(acoustic.encoder.state_dict())
        ours.to(dtype)
        theirs = vllm_omni_flow(acoustic).condition_encoder.to(dtype)
        others = diffusers_network(acoustic, "condition_encoder").to(dtype)
        width = 8 * acoustic.configs["condition_encoder"]["condition_hidden_dim"]
        for frames in range(1, 201):
            hidden = noise(1, frames, width, seed=frames).to(dtype)
            got = ours(hidden)
            pairs += [
                (got, theirs.aligned_condition(hidden)),
                (got, others(hidden).transpose(1, 2)),
            ]
    low = dtype == torch.bfloat16
    fidelity.record(
        quantity="condition encoder, every length 1 ... 200",
        oracle=BOTH,
        cases=len(pairs),
        largest_error=largest(pairs),
        tolerance=4e-2 if low else 1e-5,
        note="bfloat16; an einsum's order moves values of up to 8 by a bit" if low else "float32",
    )


def test_velocity(acoustics: list[Acoustic], fidelity: Fidelity) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for acoustic in acoustics:
        config = acoustic.configs["transformer"]
        theirs = vllm_omni_flow(acoustic).transformer
        others = diffusers_network(acoustic, "transformer")
        for latents in (3, 17, 172, 689):
            x = noise(2, config["in_channels"], latents, seed=latents)
            condition = noise(2, config["condition_dim"], latents, seed=latents + 1)
            times = torch.tensor([7 / 30, 29 / 30])
            got = acoustic.transformer(x, times, condition)
            pairs += [
                (got, theirs(x, times, condition)),
                (got, others(x, times, condition.transpose(1, 2), return_dict=False)[0]),
            ]
    fidelity.record(
        quantity="velocity of the flow transformer",
        oracle=BOTH,
        cases=len(pairs),
        largest_error=largest(pairs),
        tolerance=1e-5,
        note="float32; 3 ... 689 latents",
    )


def test_velocity_in_bfloat16_is_nearer_to_float32_than_the_reference_s(
    acoustics: list[Acoustic], fidelity: Fidelity
) -> None:
    ours, theirs = [], []
    for acoustic in acoustics:
        config = acoustic.configs["transformer"]
        exact = vllm_omni_flow(acoustic).transformer
        low = vllm_omni_flow(acoustic).transformer.bfloat16()
        mixed = make_acoustic(acoustic.configs, seed=1).transformer
        mixed.load_state_dict(acoustic.transformer.state_dict())
        for block in mixed.transformer_blocks:
            for part in (block.attn, block.ff_in, block.ff_out):
                part.bfloat16()
        for latents in (17, 172):
            x = noise(1, config["in_channels"], latents, seed=latents)
            condition = noise(1, config["condition_dim"], latents, seed=latents + 1)
            time = torch.tensor([7 / 30])
            expected = exact(x, time, condition)
            ours.append(relative(mixed(x, time, condition), expected))
            theirs.append(relative(low(x.bfloat16(), time.bfloat16(), condition.bfloat16()), expected))
    assert max(ours) < max(theirs)
    fidelity.record(
        quantity="velocity of the flow transformer",
        oracle="vllm-omni 0.30.0",
        cases=len(ours),
        largest_error=max(ours),
        tolerance=2e-2,
        note=(
            "bfloat16 products against float32, relative norm; with 8 bits each product is off by 0.2 %. "
            f"The reference in bfloat16 throughout: {max(theirs):.1e}"
        ),
    )


def test_vocoder(acoustics: list[Acoustic], fidelity: Fidelity) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for acoustic in acoustics:
        references = [
            vllm_omni_vocoder(acoustic, folded=False),
            vllm_omni_vocoder(acoustic, folded=True),
            diffusers_network(acoustic, "vocoder"),
        ]
        for latents in (1, 3, 64, 345):
            x = noise(2, acoustic.configs["vocoder"]["latent_channels"], latents, seed=latents)
            got = acoustic.vocoder(x)
            pairs += [(got, reference(x)) for reference in references]
    fidelity.record(
        quantity="vocoder",
        oracle=BOTH,
        cases=len(pairs),
        largest_error=largest(pairs),
        tolerance=1e-5,
        note="float32; 1 ... 345 latents",
    )


def test_vocoder_in_bfloat16_is_nearer_to_float32_than_the_reference_s(
    acoustics: list[Acoustic], fidelity: Fidelity
) -> None:
    ours, theirs = [], []
    for acoustic in acoustics:
        exact, low = (vllm_omni_vocoder(acoustic, folded=True) for _ in range(2))
        low.bfloat16()
        mixed = make_acoustic(acoustic.configs, seed=1).vocoder
        mixed.load_state_dict(acoustic.vocoder.state_dict())
        for module in mixed.modules():
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                module.bfloat16()
        x = noise(1, acoustic.configs["vocoder"]["latent_channels"], 64, seed=9)
        ours.append(relative(mixed(x), exact(x)))
        theirs.append(relative(low(x.bfloat16()), exact(x)))
    assert max(ours) < max(theirs)
    fidelity.record(
        quantity="vocoder",
        oracle="vllm-omni 0.30.0",
        cases=len(ours),
        largest_error=max(ours),
        tolerance=5e-2,
        note=(
            "bfloat16 convolutions against float32, relative norm; 27 of them in a row, each off by 0.2 %. "
            f"The reference in bfloat16 throughout: {max(theirs):.1e}"
        ),
    )


def test_weight_norm_folding(acoustics: list[Acoustic], fidelity: Fidelity) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for acoustic in acoustics:
        folded = dict(vocoder.convert(acoustic.tensors["vocoder"]))
        expected = vllm_omni_vocoder(acoustic, folded=True).state_dict()
        assert folded.keys() == expected.keys()
        pairs += [(folded[name], tensor) for name, tensor in expected.items()]
    fidelity.record(
        quantity="folded weight norms",
        oracle="vllm-omni 0.30.0",
        cases=len(pairs),
        largest_error=largest(pairs),
        tolerance=1e-6,
        note="float32; weights of up to 1",
    )
