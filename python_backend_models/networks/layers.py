"""Building blocks that the talker's two networks share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The number of rows that the weight's layout is chosen for; any other number works.
_PACKED_ROWS = 16


class Linear(nn.Module):
    """Bias-free projection.

    On a CPU, `pack` reorders the weight for oneDNN once instead of in every call. That makes small batches
    faster (1.5 times in bfloat16, measured with torch 2.13), and it makes a row's result independent of how
    many rows there are, from two on, which `F.linear` in float32 isn't: a song always has two rows, so its
    codes can't depend on its batch-mates.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Reorder the weight for this CPU and let go of the original: no moving or saving after that.

        Without oneDNN, or on another device, nothing happens.
        """
        if self._packed is None and self.weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACKED_ROWS)
            del self.weight

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if self._packed is None:
            return F.linear(x, self.weight)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, None, "none", [], "")


def pack_linears(network: nn.Module) -> None:
    """`Linear.pack` throughout a network."""
    for module in network.modules():
        if isinstance(module, Linear):
            module.pack()


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
        # Without a weight it rounds what it normalised. Two kernels on a GPU; spelt out they are eight.
        return self.weight * F.rms_norm(x, self.weight.shape, None, self.eps)


def embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding table that is left for a checkpoint to fill.

    torch's constructor would fill it with normal numbers, and for one on `meta` it imports its compiler to
    do so: seconds, and some 70 MB.
    """
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=True)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate) * up
