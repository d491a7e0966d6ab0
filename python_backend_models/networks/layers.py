"""Building blocks that the talker's two networks share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """Bias-free projection whose rows don't depend on how many rows there are.

    On a CPU in float32, `F.linear` picks another summation order below about 16 rows, so a song's codes could
    depend on its batch-mates. Multiplying from the left keeps the order fixed for two to 56 rows (measured
    with torch 2.13 and MKL), and a song always has two. bfloat16 rows are independent as they are, and on
    CUDA the backbone's batch is a fixed bucket.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.linear(x, self.weight)
        # Contiguous on both sides: the library's kernel, and so the order, also depends on the layout.
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return (self.weight @ rows.t()).t().contiguous().view(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis with float32 statistics.

    Args:
        round_before_scale: round the normalised value to the input's dtype before the weight multiplies it,
            as transformers does; else round once at the end, as torch's own `rms_norm` does. The two differ
            in the last bit of about a quarter of bfloat16 values.
    """

    def __init__(self, width: int, *, eps: float, round_before_scale: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps
        self.round_before_scale = round_before_scale

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same shape and dtype."""
        if not self.round_before_scale:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate) * up
