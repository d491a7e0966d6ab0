"""Guided, seeded drawing of codes: pure functions of logits, a seed and a draw position.

Nothing here reads the host or depends on other rows, so a draw is the same in any batch and inside a
CUDA graph. Source of every rule: vllm-omni 0.30.0, whose draws use Gumbel noise from MurmurHash3.
"""

import hashlib
import sys
from typing import Final

import torch
from torch import Tensor

from python_backend_models.contract import AR_GUIDANCE_SCALE, CODEBOOKS, TOP_K

# MurmurHash3 x86_32 (Austin Appleby, public domain). Constants as two's-complement int32: torch wraps.
_C1: Final = 0xCC9E2D51 - (1 << 32)
_C2: Final = 0x1B873593
_ADD: Final = 0xE6546B64 - (1 << 32)
_MIX1: Final = 0x85EBCA6B - (1 << 32)
_MIX2: Final = 0xC2B2AE35 - (1 << 32)
_HASHED_BYTES: Final = 16

# The uniform is hash / (2^32 - 1), a closed interval. Both ends are clamped in the log domain; without the
# upper clamp a saturated hash scores +inf and can win from behind the top-k mask.
_HASH_RANGE: Final = 4294967295.0
_LOG_UNIFORM_MIN: Final = -sys.float_info.max
_LOG_UNIFORM_MAX: Final = -(2.0**-32)

_SATURATED_LOGIT: Final = 1e9


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32 (torch's `>>` is arithmetic)."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shift_right(x, 32 - bits)


def _scramble(word: Tensor) -> Tensor:
    return _rotate_left(word * _C1, 15) * _C2


def _absorb(state: Tensor, scrambled: Tensor) -> Tensor:
    return _rotate_left(state ^ scrambled, 13) * 5 + _ADD


def hash_draws(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """MurmurHash3 x86_32 (seed 0) of the 16 bytes (seed lo, seed hi, position, column), little-endian.

    Args:
        seeds, positions: int64, broadcastable to `[...]`; positions below 2^32.
        columns: number of candidates; column `j` is hashed as `j`.

    Returns:
        `[..., columns]` int32 whose bits are the unsigned hash.
    """
    seeds, positions = torch.broadcast_tensors(seeds, positions)
    state = torch.zeros_like(seeds, dtype=torch.int32)
    for word in (seeds, seeds >> 32, positions):
        state = _absorb(state, _scramble(word.to(torch.int32)))
    column = torch.arange(columns, dtype=torch.int32, device=seeds.device)
    mixed = _absorb(state.unsqueeze(-1), _scramble(column)) ^ _HASHED_BYTES
    mixed = (mixed ^ _shift_right(mixed, 16)) * _MIX1
    mixed = (mixed ^ _shift_right(mixed, 13)) * _MIX2
    return mixed ^ _shift_right(mixed, 16)


def gumbel_noise(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Gumbel noise `-ln(-ln U)`, `[..., columns]` float64; arguments as in `hash_draws`."""
    unsigned = hash_draws(seeds, positions, columns).to(torch.int64) & 0xFFFFFFFF
    log_uniform = (unsigned.to(torch.float64) / _HASH_RANGE).log()
    return -(-log_uniform.clamp(_LOG_UNIFORM_MIN, _LOG_UNIFORM_MAX)).log()


def guide(conditional: Tensor, unconditional: Tensor) -> Tensor:
    """`u + 1.5 (c - u)` in float32, each operation rounded by itself.

    Args:
        conditional, unconditional: logits `[..., columns]` float32.
    """
    return unconditional + (conditional - unconditional) * AR_GUIDANCE_SCALE


def _kth_largest(values: Tensor, k: int) -> Tensor:
    k = min(k, values.shape[-1])
    return values.topk(k, dim=-1).values[..., k - 1 :]


def mask_below_conditional(guided: Tensor, conditional: Tensor, k: int = TOP_K) -> Tensor:
    """Guided logits, -inf where the conditional one is below its row's k-th largest; ties at it stay."""
    return guided.masked_fill(conditional < _kth_largest(conditional, k), -torch.inf)


def draw_with_noise(logits: Tensor, noise: Tensor, k: int = TOP_K) -> Tensor:
    """Column with the largest logit + noise among the top k (ties at the k-th stay), `[...]` int64.

    Args:
        logits: `[..., columns]` float32; infinities count as +-1e9 and NaN as -1e9, so some column wins.
        noise: `[..., columns]` float64.
    """
    bounded = torch.nan_to_num(
        logits, nan=-_SATURATED_LOGIT, posinf=_SATURATED_LOGIT, neginf=-_SATURATED_LOGIT
    )
    survivors = bounded.masked_fill(bounded < _kth_largest(bounded, k), -torch.inf)
    return (survivors.to(torch.float64) + noise).argmax(dim=-1)


def draw_c0(conditional: Tensor, unconditional: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw the semantic code: column 0 is stop, column `j` is code `j - 1`. `[songs]` int64.

    Args:
        conditional, unconditional: the drawable logits `[songs, 1 + 16384]`, any float dtype.
        seeds: draw seeds `[songs]` int64.
        positions: draw positions `[songs]` int64, `8 * drawn frame`.
    """
    conditional, unconditional = conditional.float(), unconditional.float()
    masked = mask_below_conditional(guide(conditional, unconditional), conditional)
    return draw_with_noise(masked, gumbel_noise(seeds, positions, masked.shape[-1]))


def draw_residual(conditional: Tensor, unconditional: Tensor, noise: Tensor) -> Tensor:
    """Draw a residual code, `[songs]` int64, from its logits `[songs, 1024]`; no conditional mask."""
    return draw_with_noise(guide(conditional.float(), unconditional.float()), noise)


def residual_noise(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Noise of a frame's seven residual draws, `[songs, 7, columns]`: codebook k draws at position P + k."""
    offsets = torch.arange(1, CODEBOOKS, device=positions.device)
    return gumbel_noise(seeds.unsqueeze(-1), positions.unsqueeze(-1) + offsets, columns)


def lead_in_frames(profile: str) -> int:
    """Drawn frames that a song doesn't contain: `sglang-omni` only feeds the first one back."""
    return 1 if profile == "sglang-omni" else 0


def ar_draw_seed(seed: int, *, profile: str) -> int:
    """The seed of the autoregressive draws for a request's seed (0 ... 2^63-1).

    `vllm-omni` draws with the request's seed itself, `sglang-omni` with 31 bits of its BLAKE2b digest.
    """
    if profile == "vllm-omni":
        return seed
    digest = hashlib.blake2b(f"minimax-ttm-ar:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
