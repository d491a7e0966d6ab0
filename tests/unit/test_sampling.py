"""Draws against published vectors, MurmurHash3's own package, and closed forms."""

import math
import random
import struct

import mmh3
import pytest
import torch

from python_backend_models import sampling

C0_COLUMNS = 16385


def ramp_a(j: torch.Tensor) -> torch.Tensor:
    return (((2654435761 * j) % 2**32) // 256).float() / 2**20


def ramp_b(j: torch.Tensor) -> torch.Tensor:
    return (((2246822519 * j + 374761393) % 2**32) // 256).float() / 2**20


def one(value: int) -> torch.Tensor:
    return torch.tensor([value])


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize(
    ("seed", "position", "column", "hashed", "gumbel"),
    [
        (0, 0, 0, 2167721464, 0.3801375633297289),
        (0, 0, 1, 10027521, -1.8016876557470012),
        (42, 0, 0, 1868632036, 0.18363765151910857),
        (42, 8, 16384, 1378997848, -0.12758981603522082),
        (42, 13, 1023, 2467649135, 0.5902693252119686),
        (1153769322, 0, 0, 1795620021, 0.13685856399176435),
        (1153769322, 8, 0, 3700955961, 1.9047974706864277),
        (0x123456789ABCDEF0, 72007, 512, 799807156, -0.5192868718984447),
        (-1, 3, 5, 1943913275, 0.23225891110948063),
    ],
)
def test_hash_and_noise_vectors(seed: int, position: int, column: int, hashed: int, gumbel: float) -> None:
    hashes = sampling.hash_draws(one(seed), one(position), C0_COLUMNS)
    assert hashes[0, column].item() & 0xFFFFFFFF == hashed
    noise = sampling.gumbel_noise(one(seed), one(position), C0_COLUMNS)
    assert noise.dtype == torch.float64
    assert noise[0, column].item() == pytest.approx(gumbel, rel=1e-14)


@pytest.mark.parametrize(
    ("seed", "position", "column", "hashed"),
    [(1153769322, 7, 1023, 390523399), (1153769322, 24, 16384, 3048668828)],
)
def test_hash_vectors_of_later_draws(seed: int, position: int, column: int, hashed: int) -> None:
    hashes = sampling.hash_draws(one(seed), one(position), C0_COLUMNS)
    assert hashes[0, column].item() & 0xFFFFFFFF == hashed


def test_hash_equals_mmh3_for_random_keys() -> None:
    rng = random.Random(1)
    seeds = [rng.getrandbits(64) for _ in range(500)]
    positions = [rng.randrange(72008) for _ in range(500)]
    hashes = sampling.hash_draws(torch.tensor([signed(s) for s in seeds]), torch.tensor(positions), 40)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column in range(40):
            expected = mmh3.hash(struct.pack("<QII", seed, position, column), signed=False)
            assert hashes[row, column].item() & 0xFFFFFFFF == expected


@pytest.mark.parametrize(
    ("hashed", "gumbel"),
    [
        (0, -709.782712893384),
        (1, -3.099222982207565),
        (0xFFFFFFFE, 22.180709777801834),
        (0xFFFFFFFF, 22.18070977791825),
    ],
)
def test_noise_extremes(monkeypatch: pytest.MonkeyPatch, hashed: int, gumbel: float) -> None:
    wrapped = hashed - 2**32 if hashed >= 2**31 else hashed
    monkeypatch.setattr(sampling, "hash_draws", lambda *_: torch.tensor([[wrapped]], dtype=torch.int32))
    assert sampling.gumbel_noise(one(0), one(0), 1).item() == pytest.approx(gumbel, rel=1e-13)


@pytest.mark.parametrize(("seed", "position", "column"), [(128, 157, 600), (1, 16248, 5532)])
def test_saturated_hash_cannot_win_from_behind_the_mask(seed: int, position: int, column: int) -> None:
    columns = 1024 if column < 1024 else C0_COLUMNS
    assert sampling.hash_draws(one(seed), one(position), columns)[0, column].item() == -1
    logits = torch.zeros(1, columns)
    logits[0, :50] = 5.0
    logits[0, column] = -3.0
    noise = sampling.gumbel_noise(one(seed), one(position), columns)
    assert math.isfinite(noise[0, column].item())
    assert sampling.draw_with_noise(logits, noise).item() < 50


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, (6765, 5922, 2961)), (42, (6765, 2961, 11090)), (1153769322, (10336, 13530, 6532))],
)
def test_c0_draw_vectors(seed: int, expected: tuple[int, ...]) -> None:
    j = torch.arange(C0_COLUMNS)
    conditional, unconditional = ramp_a(j).unsqueeze(0), ramp_b(j).unsqueeze(0)
    drawn = tuple(sampling.draw_c0(conditional, unconditional, one(seed), one(p)).item() for p in (0, 8, 16))
    assert drawn == expected


def test_c0_thresholds() -> None:
    j = torch.arange(C0_COLUMNS)
    conditional, unconditional = ramp_a(j).unsqueeze(0), ramp_b(j).unsqueeze(0)
    masked = sampling.mask_below_conditional(sampling.guide(conditional, unconditional), conditional)
    survivors = conditional[masked > -torch.inf]
    assert len(survivors) == 50
    assert survivors.min().item() == pytest.approx(15.95061206817627, abs=0)


@pytest.mark.parametrize(
    ("seed", "base", "expected"),
    [
        (42, 0, [471, 447, 371, 813, 1, 252, 228]),
        (42, 8, [882, 523, 266, 203, 454, 642, 50]),
        (1153769322, 8, [293, 955, 88, 190, 823, 621, 29]),
    ],
)
def test_residual_draw_vectors(seed: int, base: int, expected: list[int]) -> None:
    noise = sampling.residual_noise(one(seed), one(base), 1024)
    drawn = []
    for k in range(1, 8):
        v = 1024 * k + torch.arange(1024)
        drawn.append(sampling.draw_residual(ramp_a(v)[None], ramp_b(v)[None], noise[:, k - 1]).item())
    assert drawn == expected


@pytest.mark.parametrize(
    ("seed", "position", "column"),
    [(42, 0, 11217), (42, 8, 1451), (1153769322, 0, 6591), (1153769322, 8, 13530)],
)
def test_ties_at_both_thresholds_survive(seed: int, position: int, column: int) -> None:
    j = torch.arange(C0_COLUMNS)
    conditional, unconditional = (((7919 * j) % 257).float() / 8)[None], ramp_b(j)[None]
    masked = sampling.mask_below_conditional(sampling.guide(conditional, unconditional), conditional)
    assert (masked > -torch.inf).sum().item() == 64
    assert sampling.draw_c0(conditional, unconditional, one(seed), one(position)).item() == column


def test_toy_draw_vector() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])

    def draw(seed: int, position: int) -> int:
        return sampling.draw_with_noise(
            logits, sampling.gumbel_noise(one(seed), one(position), 4), k=4
        ).item()

    assert [draw(42, p) for p in range(8)] == [3, 3, 3, 0, 3, 3, 2, 3]
    assert draw(1809552049, 0) == 3


def test_non_finite_logits_still_draw_a_finite_candidate() -> None:
    logits = torch.full((1, 1024), -math.inf)
    logits[0, 7] = math.nan
    logits[0, 11] = math.inf
    noise = sampling.gumbel_noise(one(3), one(4), 1024)
    assert sampling.draw_with_noise(logits, noise).item() == 11


def test_draws_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    conditional, unconditional = torch.randn(2, 9, C0_COLUMNS, generator=generator).bfloat16()
    seeds, positions = torch.arange(9) * 77, torch.arange(9) * 8
    together = sampling.draw_c0(conditional, unconditional, seeds, positions)
    for row in range(9):
        one_row = slice(row, row + 1)
        alone = sampling.draw_c0(
            conditional[one_row], unconditional[one_row], seeds[one_row], positions[one_row]
        )
        assert alone.item() == together[row].item()


@pytest.mark.parametrize(
    ("public", "derived"),
    [
        (0, 411363039),
        (1, 833759482),
        (3, 122074423),
        (7, 2092721875),
        (42, 1153769322),
        (2**64 - 1, 1513867254),
    ],
)
def test_derived_seed_of_the_sglang_profile(public: int, derived: int) -> None:
    assert sampling.ar_draw_seed(public, profile="sglang-omni") == derived
    assert sampling.ar_draw_seed(public, profile="vllm-omni") == public
