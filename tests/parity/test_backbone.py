"""The backbone against transformers' Qwen3: a prompt, then 64 decode steps, through every attention."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from python_backend_models.engine.frame_step import compose_feedback
from python_backend_models.engine.kv_cache import (
    HostDecodeAttention,
    KVPool,
    MaskedDecodeAttention,
    PrefillAttention,
    decode_slots,
)
from python_backend_models.networks.backbone import Backbone, rotary_phases
from python_backend_models.networks.layers import pack_linears
from python_backend_models.offline import _DenseAttention
from tests.parity import oracles
from tests.parity.conftest import Fidelity
from tests.parity.talker_oracles import (
    AUDIO_END,
    C0_CODES,
    C0_OFFSET,
    Talker,
    VllmOmniTalker,
    diffusers_depth_decoder,
    own_backbone,
    own_depth_decoder,
    qwen3,
    random_talker,
    stored_in_bfloat16,
)

SECTION = "Talker"
ORACLE = "transformers 5.24, Qwen3"
SIZES = (1, 5, 9)
# Sums in another order round otherwise; each of some dozen roundings on the way through five layers is 2^-9.
BFLOAT16_TOLERANCE = 2e-2
PROMPT_TOKENS, STEPS, PAGE_TOKENS, CHUNK_TOKENS = 45, 64, 16, 20
LAST_POSITION = 10_239
# Rows of two songs: the prompt and its twin, which get the same feedback.
ROWS = 4
Walk = Callable[[Backbone, Tensor, int], Iterator[Tensor]]


@cache
def sized(seed: int) -> Talker:
    return stored_in_bfloat16(random_talker(seed=seed))


@cache
def inputs(seed: int, dtype: torch.dtype) -> Tensor:
    """Embeddings `[rows, tokens, hidden]` of prompts and of the feedback of 64 frames of random codes."""
    talker = sized(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, 168_000, (ROWS, PROMPT_TOKENS), generator=generator)
    prompts[1::2, 1:-2] = 151_654
    columns = [
        torch.randint(0, 16384 if k == 0 else 1024, (2 * STEPS,), generator=generator) for k in range(8)
    ]
    backbone, depth = own_backbone(talker, dtype=dtype), own_depth_decoder(talker, dtype=dtype)
    feedback = compose_feedback(backbone, depth, torch.stack(columns, dim=1)).unflatten(0, (2, STEPS))
    return torch.cat((backbone.embed(prompts), feedback.repeat_interleave(2, dim=0)), dim=1)


def reference_states(model: nn.Module, embeddings: Tensor, first_position: int) -> Tensor:
    """Hidden states of the last prompt token and every step, from one pass over all tokens."""
    positions = torch.arange(first_position, first_position + embeddings.shape[1])[None].expand(ROWS, -1)
    output = model.model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
    return output.last_hidden_state[:, PROMPT_TOKENS - 1 :]


def dense_walk(backbone: Backbone, embeddings: Tensor, first: int) -> Iterator[Tensor]:
    """As `offline` does it: each prompt whole, keys and values in one growing tensor."""
    positions = torch.arange(first, first + embeddings.shape[1])
    rows, states = [], []
    for row in range(ROWS):
        rows.append(_DenseAttention(len(backbone.model.layers)))
        prompt = embeddings[row : row + 1, :PROMPT_TOKENS]
        states.append(backbone(prompt, positions[None, :PROMPT_TOKENS], rows[-1])[:, -1])
    yield torch.cat(states)
    attend = _DenseAttention.stacked(rows)
    for at in range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS):
        yield backbone(embeddings[:, at : at + 1], positions[at].expand(ROWS, 1), attend)[:, 0]


def paged_walk(backbone: Backbone, embeddings: Tensor, first: int, *, masked: bool) -> Iterator[Tensor]:
    """As the engine does it: prompts in chunks, pages in no order, packed projections."""
    assert first == 0, "pages start with a song's first token"
    pack_linears(backbone)
    per_row = -(-(PROMPT_TOKENS + STEPS) // PAGE_TOKENS)
    pool = KVPool(
        dict(backbone.config),
        pages=ROWS * per_row,
        page_tokens=PAGE_TOKENS,
        dtype=embeddings.dtype,
        device="cpu",
    )
    order = torch.randperm(pool.pages, generator=torch.Generator().manual_seed(9)) + 1
    tables = order.view(ROWS, per_row).to(torch.int32)
    states = []
    for row, pages in enumerate(tables.tolist()):
        for start in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, PROMPT_TOKENS)
            attend = PrefillAttention(pool, pages, first_position=start, tokens=end - start)
            hidden = backbone(embeddings[row : row + 1, start:end], torch.arange(start, end)[None], attend)
        states.append(hidden[:, -1])
    yield torch.cat(states)
    pages = tables.tolist()
    for at in range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS):
        positions = torch.full((ROWS,), at)
        slots = decode_slots(pool, tables, positions)
        if masked:
            attend = MaskedDecodeAttention(pool, slots, tables, positions + 1)
        else:
            songs = [(pages[row], pages[row + 1]) for row in range(0, ROWS, 2)]
            attend = HostDecodeAttention(pool, slots, songs, [at + 1] * (ROWS // 2))
        yield backbone(embeddings[:, at : at + 1], positions.unsqueeze(1), attend)[:, 0]


def host_walk(backbone: Backbone, embeddings: Tensor, first: int) -> Iterator[Tensor]:
    return paged_walk(backbone, embeddings, first, masked=False)


def masked_walk(backbone: Backbone, embeddings: Tensor, first: int) -> Iterator[Tensor]:
    return paged_walk(backbone, embeddings, first, masked=True)


WALKS: dict[str, Walk] = {
    "keys and values in one tensor": dense_walk,
    "paged, as a CPU reads them": host_walk,
    "paged, as a graph reads them": masked_walk,
}


def largest(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return (got.double() - expected.double()).abs().max().item()


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("walk", WALKS)
@torch.inference_mode()
def test_prompt_and_steps_in_float32(walk: str, fidelity: Fidelity) -> None:
    hidden_errors, logit_errors, cases = [], [], 0
    for seed in SIZES:
        model, embeddings = qwen3(sized(seed)), inputs(seed, torch.float32)
        expected = reference_states(model, embeddings, 0)
        backbone = own_backbone(sized(seed))
        got = torch.stack(list(WALKS[walk](backbone, embeddings, 0)), dim=1)
        hidden_errors.append(largest(got, expected))
        head = model.lm_head.weight
        drawable = torch.cat((head[AUDIO_END : AUDIO_END + 1], head[C0_OFFSET : C0_OFFSET + C0_CODES]))
        logit_errors.append(largest(backbone.logits(got), expected @ drawable.T))
        cases += ROWS * (1 + STEPS)
    note = f"float32; a prompt, then {STEPS} steps against one pass; {len(SIZES)} sizes"
    for quantity, found in (("hidden states", hidden_errors), ("drawable logits", logit_errors)):
        fidelity.record(
            section=SECTION,
            quantity=f"backbone's {quantity}, {walk}",
            oracle=ORACLE,
            cases=cases,
            largest_error=max(found),
            tolerance=1e-5,
            note=note,
        )


@pytest.mark.parametrize("walk", WALKS)
@torch.inference_mode()
def test_prompt_and_steps_in_bfloat16(walk: str, fidelity: Fidelity) -> None:
    errors, ours, theirs = [], [], []
    for seed in SIZES:
        embeddings = inputs(seed, torch.bfloat16)
        expected = reference_states(qwen3(sized(seed), dtype=torch.bfloat16), embeddings, 0)
        exact = reference_states(qwen3(sized(seed)), embeddings.float(), 0)
        backbone = own_backbone(sized(seed), dtype=torch.bfloat16)
        got = torch.stack(list(WALKS[walk](backbone, embeddings, 0)), dim=1)
        assert got.dtype == torch.bfloat16
        errors.append(relative(got, expected))
        ours.append(relative(got, exact))
        theirs.append(relative(expected, exact))
    assert max(ours) <= 1.1 * max(theirs)
    fidelity.record(
        section=SECTION,
        quantity=f"backbone's hidden states, {walk}",
        oracle=ORACLE,
        cases=len(SIZES) * ROWS * (1 + STEPS),
        largest_error=max(errors),
        tolerance=BFLOAT16_TOLERANCE,
        note=f"bfloat16, relative; against float32 {max(ours):.1e}, the oracle's own {max(theirs):.1e}",
    )


@torch.inference_mode()
def test_the_last_positions_of_the_context(fidelity: Fidelity) -> None:
    first = LAST_POSITION + 1 - PROMPT_TOKENS - STEPS
    errors: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for seed in SIZES:
        for dtype, found in errors.items():
            embeddings, talker = inputs(seed, dtype), sized(seed)
            expected = reference_states(qwen3(talker, dtype=dtype), embeddings, first)
            backbone = own_backbone(talker, dtype=dtype)
            got = torch.stack(list(dense_walk(backbone, embeddings, first)), dim=1)
            found.append((largest if dtype == torch.float32 else relative)(got, expected))
    for dtype, found in errors.items():
        low = dtype == torch.bfloat16
        fidelity.record(
            section=SECTION,
            quantity=f"backbone's hidden states at positions up to {LAST_POSITION:,}",
            oracle=ORACLE,
            cases=len(SIZES) * ROWS * (1 + STEPS),
            largest_error=max(found),
            tolerance=BFLOAT16_TOLERANCE if low else 1e-5,
            note="bfloat16, relative" if low else "float32",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_factors(dtype: torch.dtype, fidelity: Fidelity) -> None:
    """At every position, as the layers of a model in this dtype get them."""
    config = oracles.library("transformers").Qwen3Config(
        head_dim=128, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )
    rotary = oracles.library("transformers.models.qwen3.modeling_qwen3").Qwen3RotaryEmbedding(config)
    positions = torch.arange(LAST_POSITION + 1)
    expected = rotary(torch.empty(0, dtype=dtype), positions[None])
    phases = rotary_phases(128, 1e6)
    got = phases.cos().to(dtype), phases.sin().to(dtype)
    assert phases.dtype == torch.float32
    fidelity.record(
        section=SECTION,
        quantity="rotary factors at positions 0 ... 10,239",
        oracle=ORACLE,
        cases=2 * phases.numel(),
        largest_error=max(largest(ours, theirs[0]) for ours, theirs in zip(got, expected, strict=True)),
        tolerance="equal bits",
        note=f"for layers in {str(dtype).removeprefix('torch.')}; phases in float32",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feedback_of_frames(dtype: torch.dtype, fidelity: Fidelity) -> None:
    encoders = oracles.library("diffusers.modular_pipelines.minimax_music3.encoders")
    different, frames = 0, 500
    for seed in SIZES:
        talker = sized(seed)
        generator = torch.Generator().manual_seed(seed)
        codes = torch.cat(
            [torch.randint(0, 16384 if k == 0 else 1024, (frames, 1), generator=generator) for k in range(8)],
            1,
        )
        codes[0], codes[1] = 0, torch.tensor([16383, *[1023] * 7])
        got = compose_feedback(
            own_backbone(talker, dtype=dtype), own_depth_decoder(talker, dtype=dtype), codes
        )
        reference = VllmOmniTalker(talker, dtype=dtype)
        other = encoders._embed_audio_frame(
            reference.language_model, diffusers_depth_decoder(talker, dtype=dtype), codes
        ).squeeze(1)
        for expected in (reference.stage.embed_frames(codes), other):
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype == dtype
            different += int((got != expected).any(dim=1).sum())
    fidelity.record(
        section=SECTION,
        quantity="feedback embeddings of frames",
        oracle="vllm-omni 0.30.0, diffusers 0.42.1",
        cases=2 * len(SIZES) * frames,
        largest_error=different,
        tolerance="equal bits",
        note=f"{str(dtype).removeprefix('torch.')}; frames that differ",
    )
