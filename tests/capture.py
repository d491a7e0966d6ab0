"""What stands in for CUDA graphs where there is no GPU.

A trace of the kernels stands in for the graph: like one, it keeps every value that the function took from
anywhere but its inputs and the tensors it closes over. A dispatch mode stands in for CUDA, which refuses some
operations while recording.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from python_backend_models.engine.graphs import Output, TensorFunction


class TraceRecorder:
    """Records like a CUDA graph: kernels and constants as they were, inputs and output in fixed places."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(
        self, function: TensorFunction, inputs: Sequence[Tensor], warm_up: TensorFunction
    ) -> tuple[Callable[[], object], Output]:
        with torch.no_grad():
            warm_up(*[given.clone() for given in inputs])
            trace = make_fx(lambda *given: function(*given))(*[given.clone() for given in inputs])
            output = tree_map(torch.clone, function(*[given.clone() for given in inputs]))

        def replay() -> None:
            self.replays += 1
            tree_map(Tensor.copy_, output, trace(*inputs))

        return replay, output


class ForbiddenInGraphs(TorchDispatchMode):
    """Fails on what a CUDA graph can't hold: reading values on the host, shapes that depend on them, and
    copies between host and device, among them tensors made of Python numbers.
    """

    FORBIDDEN = (
        "_local_scalar_dense",
        "_pin_memory",
        "_to_copy",
        "_unique2",
        "lift_fresh",
        "masked_select",
        "nonzero",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        # A cast stays on the device; only a copy that names one could leave it.
        allowed = name not in self.FORBIDDEN or (name == "_to_copy" and kwargs.get("device") is None)
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in torch.utils._pytree.tree_leaves(args[1:])
        )
        if by_mask or not allowed:
            raise AssertionError(f"{func} can't be in a CUDA graph")
        return func(*args, **kwargs)
