"""CUDA graphs of pure tensor functions: copy the inputs in, replay, hand a copy of the output out.

A function is recorded per set of input shapes, after warm-up runs that let libraries choose their kernels and
allocate their workspaces. Shapes that were not recorded run eagerly, and a recording that fails is logged and
leaves its shapes eager: slower, never wrong. The function must not read a tensor's value on the host and must
take everything that changes between calls as an input.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_LOG: Final = logging.getLogger(__name__)
_WARM_UPS: Final = 2

Output = Tensor | tuple[Tensor, ...]
TensorFunction = Callable[..., Output]
# Takes a function, its static inputs and what to run before, so that libraries are ready; returns what
# replays the function, and the static output that replaying fills.
Recorder = Callable[[TensorFunction, Sequence[Tensor], TensorFunction], tuple[Callable[[], object], Output]]
_Signature = tuple[tuple[torch.Size, torch.dtype], ...]


class CudaRecorder:
    """Records on a side stream into one memory pool, which its graphs share: they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(
        self, function: TensorFunction, inputs: Sequence[Tensor], warm_up: TensorFunction
    ) -> tuple[Callable[[], object], Output]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    warm_up(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process (another engine, a copy) may use CUDA while this one records.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function(*inputs)
        return graph.replay, output


@dataclass(frozen=True)
class Recording:
    """One recorded call. Not for two threads at once: they'd share its buffers."""

    inputs: Sequence[Tensor]
    output: Output
    replay: Callable[[], object]

    def __call__(self, *inputs: Tensor) -> Output:
        """Replay with these inputs.

        Raises:
            ValueError: their shapes or types are not the recorded ones.
        """
        if _signature(inputs) != _signature(self.inputs):
            raise ValueError(
                f"recorded for {_signature(self.inputs)}, called with {_signature(inputs)}: record it anew"
            )
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.replay()
        if isinstance(self.output, Tensor):
            return self.output.clone()
        return tuple(part.clone() for part in self.output)


class GraphedFunction:
    """A function that replays a graph where one was recorded for its inputs' shapes.

    Args:
        function: of tensors only, returning one or a tuple of them; may overwrite its inputs.
        recorder: None makes every call eager.
        warm_up: takes the same inputs and runs every kernel of the function at least once; for a function
            that does the same many times over. By default the function itself.
    """

    def __init__(
        self, function: TensorFunction, recorder: Recorder | None, *, warm_up: TensorFunction | None = None
    ) -> None:
        self._function = function
        self._warm_up = warm_up or function
        self._recorder = recorder
        self._recordings: dict[_Signature, Recording] = {}

    @property
    def recorded(self) -> int:
        """How many sets of shapes have a graph."""
        return len(self._recordings)

    def record(self, *inputs: Tensor) -> bool:
        """Record the function for these inputs' shapes; whether there is a graph for them now."""
        signature = _signature(inputs)
        if self._recorder is None or signature in self._recordings:
            return signature in self._recordings
        static = [given.clone() for given in inputs]
        try:
            replay, output = self._recorder(self._function, static, self._warm_up)
        except RuntimeError as error:  # torch's errors of capture and of memory
            _LOG.warning("no CUDA graph for %s, running it eagerly: %s", signature, error)
            return False
        self._recordings[signature] = Recording(static, output, replay)
        return True

    def __call__(self, *inputs: Tensor) -> Output:
        recording = self._recordings.get(_signature(inputs))
        return recording(*inputs) if recording else self._function(*inputs)


def _signature(tensors: Sequence[Tensor]) -> _Signature:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)
