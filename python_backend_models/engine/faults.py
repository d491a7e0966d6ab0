"""Faults for tests: one value that isn't finite, or one allocation that fails, at a chosen place and time.

A fault is `NAME@N`, or `NAME@N-M`: it happens at the N-th call (from 1) of what it breaks, or from the N-th
to the M-th; several stand with commas between. Graphs must be off, as what is recorded is not called. The
setting `fault` refuses to work without a word in the environment.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from python_backend_models.engine.acoustic import FlowEngine, VocoderEngine
from python_backend_models.engine.talker import TalkerEngine

Engine = TalkerEngine | FlowEngine | VocoderEngine
_FAULT: Final = re.compile(r"(\w+)@([1-9]\d*)(?:-([1-9]\d*))?")
Make = Callable[[], Any]  # the call as it would have been


class UnknownFaultError(ValueError):
    """A fault that the engine doesn't have, or that isn't written as `NAME@N` or `NAME@N-M`."""


def arm(engine: Engine, faults: str) -> None:
    """Prepare an engine to fail; an empty text does nothing.

    Raises:
        UnknownFaultError: naming the faults that the engine has.
    """
    known = _faults(engine)
    for fault in filter(None, faults.split(",")):
        match = _FAULT.fullmatch(fault)
        if not match or match[1] not in known:
            raise UnknownFaultError(
                f"fault is {fault!r}, not one of {', '.join(known)} with @N or @N-M behind it"
            )
        owner, method, break_it = known[match[1]]
        calls = range(int(match[2]), int(match[3] or match[2]) + 1)
        setattr(owner, method, _at_calls(calls, getattr(owner, method), break_it))


def _faults(engine: Engine) -> dict[str, tuple[Any, str, Callable[[Make], Any]]]:
    """Name -> (object, method, what is done in the place of one call of the method)."""
    match engine:
        case TalkerEngine(runner=runner):
            return {
                "nan_backbone_logits": (runner.backbone, "logits", _spoiled(torch.nan)),
                "inf_depth_logits": (runner.depth, "logits", _spoiled(torch.inf)),
                "oom_prefill": (runner, "prefill", _no_memory),
                "oom_step": (runner, "step", _no_memory),
            }
        case FlowEngine():
            return {
                "nan_latents": (engine, "_integrate", _spoiled(torch.nan)),
                "oom_solve": (engine, "_integrate", _no_memory),
            }
        case VocoderEngine():
            return {
                "inf_waveform": (engine, "_forward", _spoiled(torch.inf)),
                "oom_decode": (engine, "_forward", _no_memory),
            }


def _at_calls(
    calls: range, function: Callable[..., Any], break_it: Callable[[Make], Any]
) -> Callable[..., Any]:
    counter = itertools.count(1)

    def faulty(*arguments: Any, **options: Any) -> Any:
        if next(counter) not in calls:
            return function(*arguments, **options)
        return break_it(lambda: function(*arguments, **options))

    return faulty


def _spoiled(value: float) -> Callable[[Make], Tensor]:
    """Spoil an element of the batch's first item, somewhere in its middle: no crop may hide it."""

    def spoil(make: Make) -> Tensor:
        result = make().clone()
        result[(0, *(size // 2 for size in result.shape[1:]))] = value
        return result

    return spoil


def _no_memory(make: Make) -> Any:
    raise torch.OutOfMemoryError("a test says that there is no memory")
