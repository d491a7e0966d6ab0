"""Which matrix products a computation consists of, and how long `torch.matmul` takes for them alone.

Attention counts as its two products, a convolution as the product of its unfolded input with its weight. All
else that the computation does (norms, softmax, sines, copies) is what keeps it from its products' rate.
"""

import collections
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, order=True)
class Product:
    """`[batch, rows, inner] @ [batch, inner, columns]`."""

    kind: str  # linear, attention or convolution
    batch: int
    rows: int
    inner: int
    columns: int
    transposed: bool  # whether the right-hand factor is stored as [columns, inner]

    @property
    def flop(self) -> int:
        """Floating-point operations, two per multiplication."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def products_of(run: Callable[[], object]) -> collections.Counter[Product]:
    """Every product that a call computes, with how often."""
    recorder = _Recorder()
    with recorder:
        run()
    return recorder.found


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[Product] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "matmul"):
            self._matmul(args[0], args[1])
        elif name == "addmm":
            self._matmul(args[1], args[2])
        elif name == "linear":
            self._matmul(args[0], args[1].t())
        elif "scaled_dot_product" in name:
            self._attention(*args[:3])
        result = func(*args, **(kwargs or {}))
        # Shapes are known after the call; its form says which of the two convolutions it is.
        if name in ("convolution", "conv1d", "conv_transpose1d"):
            self._convolution(args[0], args[1], result, turned=_is_transposed(name, args))
        return result

    def _matmul(self, a: Tensor, b: Tensor) -> None:
        batch = prod(b.shape[:-2])
        rows = a.numel() // a.shape[-1] // batch
        turned = b.stride(-1) != 1
        self.found[Product("linear", batch, rows, a.shape[-1], b.shape[-1], turned)] += 1

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        batch, queries, keys = prod(q.shape[:-2]), q.shape[-2], k.shape[-2]
        self.found[Product("attention", batch, queries, q.shape[-1], keys, True)] += 1
        self.found[Product("attention", batch, queries, keys, v.shape[-1], False)] += 1

    def _convolution(self, x: Tensor, weight: Tensor, result: Tensor, *, turned: bool) -> None:
        positions = (x if turned else result).shape[2]
        inner = x.shape[1] if turned else prod(weight.shape[1:])
        columns = prod(weight.shape[1:]) if turned else weight.shape[0]
        self.found[Product("convolution", 1, x.shape[0] * positions, inner, columns, not turned)] += 1


def _is_transposed(name: str, args: tuple[Any, ...]) -> bool:
    return name == "conv_transpose1d" or (name == "convolution" and bool(args[6]))


def bare_seconds(
    products: Mapping[Product, int], *, clock: Callable[[], float] = time.perf_counter, repeats: int = 5
) -> dict[str, float]:
    """Seconds of the products by kind: for each the median of bare `torch.matmul`s, times how often."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for product, count in products.items():
        a = torch.randn(product.batch, product.rows, product.inner)
        if product.transposed:
            b = torch.randn(product.batch, product.columns, product.inner).transpose(1, 2)
        else:
            b = torch.randn(product.batch, product.inner, product.columns)
        if product.batch == 1:
            a, b = a[0], b[0]
        measured = []
        with torch.inference_mode():
            torch.matmul(a, b)
            for _ in range(repeats):
                start = clock()
                torch.matmul(a, b)
                measured.append(clock() - start)
        seconds[product.kind] += count * statistics.median(measured)
    return dict(seconds)
