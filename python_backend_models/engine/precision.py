"""Named precisions and attention kernels of a stage, and whether a device can honour them.

`float32` and `tf32` keep float32 weights; `bfloat16` and `float16` hold the weights of matrix products and
convolutions, and run those, in that type; what lies directly between two products (the gate of the
feed-forward) is rounded to it as well. Norms, softmax, snakes, time features, residual streams and solver
state are float32 in every precision. TF32 is a process-wide switch of torch, so it is set around each call.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_WEIGHT_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PRECISIONS: Final = tuple(_WEIGHT_DTYPES)
_TF32_CAPABILITY: Final = (8, 0)
_PROBE_WIDTH: Final = 16
_ATTENTION_BACKENDS: Final[dict[str, SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ATTENTION: Final = ("auto", *_ATTENTION_BACKENDS)


@dataclass(frozen=True)
class Precision:
    """A precision that its device can honour; made by `resolve`."""

    name: str
    device: torch.device

    @property
    def weight_dtype(self) -> torch.dtype:
        return _WEIGHT_DTYPES[self.name]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Set torch's process-wide switches for products of float32 and half matrices, and put them back."""
        if self.device.type != "cuda":
            yield
            return
        matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        before = matmul.fp32_precision, convolution.fp32_precision
        halves = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
        matmul.fp32_precision = convolution.fp32_precision = "tf32" if self.name == "tf32" else "ieee"
        matmul.allow_fp16_reduced_precision_reduction = False
        matmul.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            matmul.fp32_precision, convolution.fp32_precision = before
            matmul.allow_fp16_reduced_precision_reduction = halves[0]
            matmul.allow_bf16_reduced_precision_reduction = halves[1]


def resolve(name: str, device: torch.device) -> Precision:
    """The precision of that name on that device.

    Raises:
        ValueError: there is no such precision, or the device can't compute in it.
    """
    if name not in _WEIGHT_DTYPES:
        raise ValueError(f"unknown precision {name!r}: one of {', '.join(PRECISIONS)}")
    if name == "tf32" and not _has_tf32(device):
        raise ValueError(f"precision tf32 needs an NVIDIA GPU from Ampere on, not {_describe(device)}")
    if name in ("bfloat16", "float16"):
        try:
            _probe(_WEIGHT_DTYPES[name], device)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"precision {name} is not available on {_describe(device)}: {error}") from error
    return Precision(name, device)


@dataclass(frozen=True)
class Attention:
    """An attention kernel that its device has; made by `resolve_attention`."""

    name: str

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Let `scaled_dot_product_attention` run this kernel and no other."""
        return sdpa_kernel(_ATTENTION_BACKENDS[self.name])


def resolve_attention(
    name: str, precision: Precision, *, tokens: int, heads: int, head_dim: int
) -> Attention:
    """The kernel of that name; for `auto` the first that runs, in the order flash, cudnn, efficient, math.

    Args:
        name: one of `ATTENTION`.
        precision: whose weight dtype the queries have.
        tokens, heads, head_dim: of the attention that will run.

    Raises:
        ValueError: no such kernel, or the device has none for these sizes and this precision.
    """
    if name not in ATTENTION:
        raise ValueError(f"unknown attention {name!r}: one of {', '.join(ATTENTION)}")
    queries = torch.zeros(2, heads, tokens, head_dim, dtype=precision.weight_dtype, device=precision.device)
    reasons = []
    for candidate in _ATTENTION_BACKENDS if name == "auto" else (name,):
        try:
            with torch.inference_mode(), warnings.catch_warnings(), Attention(candidate).active():
                warnings.simplefilter("ignore", UserWarning)  # torch explains there why it has no kernel
                F.scaled_dot_product_attention(queries, queries, queries)
        except RuntimeError as error:
            reasons.append(f"{candidate}: {error}")
        else:
            return Attention(candidate)
    where = _describe(precision.device)
    raise ValueError(
        f"attention {name} is not available in {precision.name} on {where}: {'; '.join(reasons)}"
    )


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type}"


def _probe(dtype: torch.dtype, device: torch.device) -> None:
    """Run one of each kind of kernel the stages use."""
    if dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise NotImplementedError("only emulated")
    x = torch.zeros(1, _PROBE_WIDTH, _PROBE_WIDTH, dtype=dtype, device=device)
    F.linear(x, x[0])
    F.conv1d(x, x.transpose(0, 1).contiguous()[..., :1].expand(-1, _PROBE_WIDTH, -1))
    F.conv_transpose1d(x, x[0, :, None, :4].contiguous(), stride=2)
    F.scaled_dot_product_attention(x[None], x[None], x[None])
