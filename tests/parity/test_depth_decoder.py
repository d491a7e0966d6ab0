"""The depth decoder against vllm-omni's and diffusers', step by step and as the whole guided, seeded loop."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from python_backend_models.engine.frame_step import DepthLoop
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.networks.layers import pack_linears
from tests.parity.conftest import Fidelity
from tests.parity.talker_oracles import (
    Talker,
    VllmOmniTalker,
    diffusers_depth_decoder,
    own_backbone,
    own_depth_decoder,
    random_talker,
    stored_in_bfloat16,
    vllm_omni_depth_decoder,
)

SECTION = "Talker"
SIZES = (1, 5, 9)
ROWS, STEPS = 48, 7
REFERENCES = {"vllm-omni 0.30.0": vllm_omni_depth_decoder, "diffusers 0.42.1": diffusers_depth_decoder}
# Relative, against either oracle: sums in another order, and diffusers rounds twice in its norms.
BFLOAT16_TOLERANCE = 2e-2


@cache
def sized(seed: int) -> Talker:
    return stored_in_bfloat16(random_talker(seed=seed))


def frame_inputs(talker: Talker, dtype: torch.dtype) -> Tensor:
    """A hidden state, an embedding of c0, and embeddings of random c1 ... c6 per row, as in a loop."""
    generator = torch.Generator().manual_seed(talker.hidden)
    hidden = torch.randn(ROWS, 1, talker.hidden, generator=generator).to(dtype)
    c0 = torch.randint(151_675, 168_059, (ROWS, 1), generator=generator)
    rows = torch.randint(0, 1024, (ROWS, 6), generator=generator) + 1024 * torch.arange(6)
    parts = (
        talker.backbone_tensors["model.embed_tokens.weight"][c0],
        talker.depth_tensors["audio_embeddings.weight"][rows],
    )
    return torch.cat((hidden, *(part.to(dtype) for part in parts)), dim=1)


def own_steps(decoder: DepthDecoder, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[rows, 7, hidden]` and logits `[rows, 7, 1024]`, with the cache that a frame has."""
    frame = decoder.start()
    outputs = [decoder(inputs[:, :2], 0, frame)]
    outputs += [decoder(inputs[:, k : k + 1], k, frame) for k in range(2, 8)]
    logits = [decoder.logits(output, k) for k, output in enumerate(outputs, start=1)]
    return torch.stack(outputs, dim=1), torch.stack(logits, dim=1)


def reference_steps(decoder: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The same by computing the whole prefix anew for each step, as the references do."""
    projected = decoder.projection(inputs)
    outputs = [decoder(projected[:, : k + 1])[:, -1] for k in range(1, 8)]
    logits = [head(output) for head, output in zip(decoder.audio_heads, outputs, strict=True)]
    return torch.stack(outputs, dim=1), torch.stack(logits, dim=1)


def largest(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return (got.double() - expected.double()).abs().max().item()


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("oracle", REFERENCES)
@torch.inference_mode()
def test_steps(oracle: str, dtype: torch.dtype, packed: bool, fidelity: Fidelity) -> None:
    low, measure = dtype == torch.bfloat16, relative if dtype == torch.bfloat16 else largest
    errors: dict[str, list[float]] = {"states": [], "logits": []}
    ours, theirs = [], []
    for seed in SIZES:
        talker = sized(seed)
        inputs = frame_inputs(talker, dtype)
        expected = reference_steps(REFERENCES[oracle](talker, dtype=dtype), inputs)
        decoder = own_depth_decoder(talker, dtype=dtype)
        if packed:
            pack_linears(decoder)
        got = own_steps(decoder, inputs)
        for found, mine, other in zip(errors.values(), got, expected, strict=True):
            found.append(measure(mine, other))
        if low:
            exact = reference_steps(REFERENCES[oracle](talker), inputs.float())[0]
            ours.append(relative(got[0], exact))
            theirs.append(relative(expected[0], exact))
    note = "float32"
    if low:
        assert max(ours) <= 1.1 * max(theirs)
        note = f"bfloat16, relative; against float32 {max(ours):.1e}, the oracle's own {max(theirs):.1e}"
    for what, found in errors.items():
        fidelity.record(
            section=SECTION,
            quantity=f"depth decoder's {what}, {'packed' if packed else 'plain'} projections",
            oracle=oracle,
            cases=len(SIZES) * ROWS * STEPS,
            largest_error=max(found),
            tolerance=BFLOAT16_TOLERANCE if low else 1e-5,
            note=note if what == "states" else note.split(";")[0],
        )


@torch.inference_mode()
def test_loop(fidelity: Fidelity) -> None:
    """Noise, guidance, draws and feedback of the seven codes, for several songs at once."""
    wrong, state_errors, songs, rounds = 0, [], 12, 8
    for seed in SIZES:
        talker = sized(seed)
        loop = DepthLoop(own_backbone(talker), own_depth_decoder(talker))
        reference = VllmOmniTalker(talker).stage
        generator = torch.Generator().manual_seed(seed)
        for number in range(rounds):
            hidden = torch.randn(songs, 2, talker.hidden, generator=generator)
            c0 = torch.randint(0, 16384, (songs,), generator=generator)
            seeds = torch.randint(0, 2**63 - 1, (songs,), generator=generator)
            positions = 8 * torch.randint(0, 9000, (songs,), generator=generator)
            codes, states, finite = loop(hidden, c0, seeds, positions)
            expected_codes, expected_states = reference._depth_decode_eager(
                hidden[:, 0], hidden[:, 1], c0, seeds, positions
            )
            assert finite.all(), number
            assert codes.shape == expected_codes.shape == (songs, 8)
            wrong += int((codes != expected_codes).sum())
            state_errors.append(largest(states, expected_states))
    cases = len(SIZES) * rounds * songs
    for quantity, found, allowed, note in (
        ("codes c1 ... c7 of the depth loop", wrong, "equal bits", "float32; codes that differ"),
        ("conditioning states of the depth loop", max(state_errors), 1e-5, "float32"),
    ):
        fidelity.record(
            section=SECTION,
            quantity=quantity,
            oracle="vllm-omni 0.30.0",
            cases=7 * cases,
            largest_error=found,
            tolerance=allowed,
            note=note,
        )
