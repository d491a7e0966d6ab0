"""Faults for tests: one value that isn't finite, or one allocation that fails, at a chosen place and time.

A fault is `NAME@N`: it happens once, at the N-th call (from 1) of what it breaks. Graphs must be off, as what
is recorded is not called. The setting `fault` refuses to work without a word in the environment.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from python_backend_models.engine.acoustic import FlowEngine, VocoderEngine
from python_backend_models.engine.talker import TalkerEngine

Engine = TalkerEngine | FlowEngine | VocoderEngine
Make = Callable[[], Any]  # the call as it would have been


class UnknownFaultError(ValueError):
    """A fault that the engine doesn't have, or that isn't written as `NAME@N`."""


def arm(engine: Engine, fault: str) -> None:
    """Prepare an engine to fail once; an empty `fault` does nothing.

    Raises:
        UnknownFaultError: naming the faults that the engine has.
    """
    if not fault:
        return
    name, _, call = fault.partition("@")
    faults = _faults(engine)
    if name not in faults or not call.isdigit() or not int(call):
        raise UnknownFaultError(f"fault is {fault!r}, not one of {', '.join(faults)} with @N behind it")
    owner, method, break_it = faults[name]
    setattr(owner, method, _at_call(int(call), getattr(owner, method), break_it))


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


def _at_call(
    number: int, function: Callable[..., Any], break_it: Callable[[Make], Any]
) -> Callable[..., Any]:
    calls = 0

    def faulty(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
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
