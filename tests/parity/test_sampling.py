"""Draws equal vllm-omni's: ties, saturated hashes and non-finite logits included.

A saturated hash is one in four billion, so they are made: MurmurHash3 is solved backwards for the seed.
"""

import itertools
import math
import random
import struct
import types
from collections.abc import Iterator
from dataclasses import dataclass

import mmh3
import pytest
import torch
from torch import Tensor

from python_backend_models import sampling
from tests.parity.conftest import Fidelity
from tests.parity.oracles import vllm_omni

SECTION = "Sampling"
REFERENCE = "vllm-omni 0.30.0"
C0_DRAWS, RESIDUAL_DRAWS, BATCH = 4_000, 10_000, 100
C0_COLUMNS, RESIDUAL_COLUMNS = 16385, 1024
SATURATED, ZERO = 0xFFFFFFFF, 0
WORD = 0xFFFFFFFF


@pytest.fixture(scope="module")
def reference() -> types.ModuleType:
    return vllm_omni("sampling")


# ------------------------------------------------------- solving for a seed


def rotate(word: int, bits: int) -> int:
    bits %= 32
    return (word << bits | word >> (32 - bits)) & WORD


def inverse(factor: int) -> int:
    return pow(factor, -1, 2**32)


def scramble(key: int) -> int:
    return rotate(key * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD


def unscramble(scrambled: int) -> int:
    return rotate(scrambled * inverse(0x1B873593) & WORD, -15) * inverse(0xCC9E2D51) & WORD


def absorb(state: int, key: int) -> int:
    return (rotate(state ^ scramble(key), 13) * 5 + 0xE6546B64) & WORD


def before_absorbing(state: int) -> int:
    """The old state, mixed with the scrambled key by exclusive or."""
    return rotate((state - 0xE6546B64) * inverse(5) & WORD, -13)


def before_finalizing(hashed: int) -> int:
    h = hashed ^ hashed >> 16
    h = h * inverse(0xC2B2AE35) & WORD
    h ^= h >> 13 ^ h >> 26
    h = h * inverse(0x85EBCA6B) & WORD
    return h ^ h >> 16


def seed_with_hash(hashed: int, *, position: int, column: int, rng: random.Random) -> int:
    """A seed of 0 ... 2^63 - 1 with which that column hashes to that value at that position."""
    state = before_absorbing(before_finalizing(hashed) ^ 16) ^ scramble(column)
    state = before_absorbing(state) ^ scramble(position)
    while True:
        low = rng.getrandbits(32)
        high = unscramble(before_absorbing(state) ^ absorb(0, low))
        if high < 2**31:
            seed = high << 32 | low
            assert mmh3.hash(struct.pack("<QII", seed, position, column), signed=False) == hashed
            return seed


# -------------------------------------------------------------------- cases


@dataclass
class Draws:
    """A batch of draws, one per row."""

    conditional: Tensor
    unconditional: Tensor
    seeds: Tensor
    positions: Tensor


def plain(logits: Tensor, rng: random.Random) -> None:
    """Continuous, as after float32 products."""


def ties(logits: Tensor, rng: random.Random) -> None:
    """Rounded so coarsely that many columns share the 50th largest value."""
    step = rng.choice([0.0625, 0.25, 1.0, 4.0])
    logits.div_(step).round_().mul_(step)


def all_equal(logits: Tensor, rng: random.Random) -> None:
    logits.fill_(rng.choice([0.0, -3.5, 1e30]))


def some_not_finite(logits: Tensor, rng: random.Random) -> None:
    """Up to 100 values of each kind, so more and fewer than the 50 that are kept."""
    for value in (math.nan, math.inf, -math.inf):
        count = rng.choice([0, 1, 3, 49, 50, 51, 100])
        columns = rng.sample(range(logits.shape[-1]), count)
        logits[rng.randrange(2), columns] = value


def few_finite(logits: Tensor, rng: random.Random) -> None:
    """Fewer finite columns than are kept, down to none."""
    kept = rng.sample(range(logits.shape[-1]), rng.choice([0, 1, 7, 49]))
    finite = logits[:, kept].clone()
    logits.fill_(rng.choice([-math.inf, math.nan, math.inf]))
    logits[:, kept] = finite


def huge(logits: Tensor, rng: random.Random) -> None:
    """Guidance overflows, and values pass the bound that infinities get."""
    logits.mul_(rng.choice([1e8, 1e38]))


KINDS = {
    "plain": plain,
    "ties": ties,
    "all equal": all_equal,
    "some not finite": some_not_finite,
    "few finite": few_finite,
    "huge": huge,
}


def batches(columns: int, draws: int, *, seed: int) -> Iterator[Draws]:
    """All draws. The kind of the logits changes with every row, that of the hashes with every six."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    kinds = itertools.cycle(KINDS.values())
    hashes = itertools.cycle(
        hashed for hashed in (None, SATURATED, None, ZERO, None, SATURATED) for _ in range(len(KINDS))
    )
    for _ in range(draws // BATCH):
        logits = 3 * torch.randn(BATCH, 2, columns, generator=generator)
        seeds = [rng.randrange(2**63) for _ in range(BATCH)]
        positions = [rng.randrange(72_008) for _ in range(BATCH)]
        for row in range(BATCH):
            next(kinds)(logits[row], rng)
            hashed = next(hashes)
            if hashed is not None:
                # In the middle, at the top or at the bottom of the logits, so behind the mask or not.
                place = rng.choice([rng.randrange(columns), int(logits[row, 0].argmax()), 0, columns - 1])
                seeds[row] = seed_with_hash(hashed, position=positions[row], column=place, rng=rng)
        yield Draws(logits[:, 0], logits[:, 1], torch.tensor(seeds), torch.tensor(positions))


def rows_that_differ(got: Tensor, expected: Tensor) -> int:
    assert got.shape == expected.shape
    return int((~((got == expected) | (got.isnan() & expected.isnan()))).flatten(1).any(dim=1).sum())


def test_the_solved_seeds_saturate(reference: types.ModuleType) -> None:
    rng = random.Random(3)
    for hashed, column in ((SATURATED, 5), (ZERO, 16384), (SATURATED, 0), (1, 600)):
        seed = seed_with_hash(hashed, position=4000, column=column, rng=rng)
        found = reference.murmur_hash32(torch.tensor([seed]), torch.tensor([4000]), torch.arange(C0_COLUMNS))
        assert found[0, column].item() == hashed


def test_c0_draws(reference: types.ModuleType, fidelity: Fidelity) -> None:
    drawn = stops = different = different_mask = 0
    for case in batches(C0_COLUMNS, C0_DRAWS, seed=1):
        guided = reference.apply_c0_cfg(case.conditional, case.unconditional)
        expected = reference.sample_topk_seeded(guided, case.seeds, case.positions)
        got = sampling.draw_c0(case.conditional, case.unconditional, case.seeds, case.positions)
        own_guided = sampling.mask_below_conditional(
            sampling.guide(case.conditional, case.unconditional), case.conditional
        )
        different += int((got != expected).sum())
        different_mask += rows_that_differ(own_guided, guided)
        drawn += len(got)
        stops += int((expected == 0).sum())
    assert stops > 0
    for quantity, found, what in (
        ("draws of c0 and stop", different, "draws"),
        ("guided and masked logits of c0", different_mask, "rows"),
    ):
        fidelity.record(
            section=SECTION,
            quantity=quantity,
            oracle=REFERENCE,
            cases=drawn,
            largest_error=found,
            tolerance="equal bits",
            note=f"{what} that differ; ties, saturated hashes and non-finite logits among them",
        )


def test_residual_draws(reference: types.ModuleType, fidelity: Fidelity) -> None:
    drawn = different = 0
    for case in batches(RESIDUAL_COLUMNS, RESIDUAL_DRAWS, seed=2):
        noise = reference.gumbel_noise(case.seeds, case.positions, RESIDUAL_COLUMNS)
        guided = reference.apply_depth_cfg(case.conditional, case.unconditional)
        expected = reference.draw_from_gumbel(guided, noise)
        own_noise = sampling.gumbel_noise(case.seeds, case.positions, RESIDUAL_COLUMNS)
        got = sampling.draw_residual(case.conditional, case.unconditional, own_noise)
        different += int((got != expected).sum())
        drawn += len(got)
    fidelity.record(
        section=SECTION,
        quantity="draws of c1 ... c7",
        oracle=REFERENCE,
        cases=drawn,
        largest_error=different,
        tolerance="equal bits",
        note="draws that differ; ties, saturated hashes and non-finite logits among them",
    )


def test_noise_of_whole_frames(reference: types.ModuleType, fidelity: Fidelity) -> None:
    """The draw of c0, and the seven residual draws at once, up to the last frame of the longest song."""
    generator = torch.Generator().manual_seed(4)
    seeds = torch.randint(0, 2**63 - 1, (300,), generator=generator)
    positions = 8 * torch.randint(0, 9001, (300,), generator=generator)
    positions[:2] = torch.tensor([0, 8 * 9000])
    for seed_number, hashed in ((2, SATURATED), (3, ZERO)):
        rng, at = random.Random(hashed), int(positions[seed_number])
        seeds[seed_number] = seed_with_hash(hashed, position=at, column=77, rng=rng)
    residual_positions = positions.unsqueeze(1) + torch.arange(1, 8)
    for draws, got, expected in (
        (
            "c0",
            sampling.gumbel_noise(seeds, positions, C0_COLUMNS),
            reference.gumbel_noise(seeds, positions, C0_COLUMNS),
        ),
        (
            "c1 ... c7",
            sampling.residual_noise(seeds, positions, RESIDUAL_COLUMNS),
            reference.gumbel_noise(seeds, residual_positions, RESIDUAL_COLUMNS),
        ),
    ):
        assert got.dtype == expected.dtype == torch.float64
        fidelity.record(
            section=SECTION,
            quantity=f"noise of the draws of {draws}",
            oracle=REFERENCE,
            cases=expected.numel() // expected.shape[-1],
            largest_error=rows_that_differ(got, expected),
            tolerance="equal bits",
            note="frames that differ",
        )


def test_the_two_known_songs_with_a_saturated_hash(reference: types.ModuleType, fidelity: Fidelity) -> None:
    """Found by search: they draw from inside the mask. Without the upper clamp they would not."""
    outside = different = cases = 0
    for seed, position, column in ((128, 157, 600), (1, 16248, 5532)):
        columns = RESIDUAL_COLUMNS if position % 8 else C0_COLUMNS
        at = torch.tensor([seed]), torch.tensor([position])
        assert mmh3.hash(struct.pack("<QII", seed, position, column), signed=False) == SATURATED
        for trial in range(50):
            conditional, unconditional = torch.randn(
                2, 1, columns, generator=torch.Generator().manual_seed(trial)
            )
            conditional[0, column] = unconditional[0, column] = -1.0
            if position % 8:
                guided = sampling.guide(conditional, unconditional)
                mask = guided >= guided.topk(50).values[:, -1:]
                got = sampling.draw_residual(conditional, unconditional, sampling.gumbel_noise(*at, columns))
                expected = reference.sample_topk_seeded(
                    reference.apply_depth_cfg(conditional, unconditional), *at
                )
            else:
                mask = conditional >= conditional.topk(50).values[:, -1:]
                got = sampling.draw_c0(conditional, unconditional, *at)
                expected = reference.sample_topk_seeded(
                    reference.apply_c0_cfg(conditional, unconditional), *at
                )
            assert not mask[0, column]
            unclamped = sampling.gumbel_noise(*at, columns)
            unclamped[0, column] = math.inf
            assert (torch.where(mask, 0.0, -math.inf) + unclamped).argmax() == column
            outside += int(not mask[0, got])
            different += int((got != expected).sum())
            cases += 1
    assert different == 0
    fidelity.record(
        section=SECTION,
        quantity="draws at the saturated hashes of seeds 128 and 1",
        oracle="the top-50 mask",
        cases=cases,
        largest_error=outside,
        tolerance="equal bits",
        note="draws outside the mask",
    )
