"""Loaders of the code that parity tests compare with: vllm-omni's Music 3 modules and diffusers' classes.

vllm-omni is installed without its dependencies, and its package pulls a whole serving engine in. The Music 3
modules are plain torch once a few engine imports are stand-ins, so each is executed alone, fresh for every
call: a test may set its size constants without touching another test. A missing oracle fails the test.
"""

import contextlib
import importlib
import importlib.machinery
import itertools
import logging
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from python_backend_models.resample import torchaudio_functional

PROJECT = Path(__file__).resolve().parents[2]
MUSIC3_FOLDER = Path("vllm_omni/model_executor/models/minimax_music3")

_STAND_INS = (
    "vllm",
    "vllm.config",
    "vllm.logger",
    "vllm.platforms",
    "vllm.model_executor",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.logits_processor",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.models",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.utils",
    "vllm.v1",
    "vllm.v1.outputs",
    "vllm_omni",
    "vllm_omni.config",
    "vllm_omni.config.stage_config",
    "vllm_omni.model_executor",
    "vllm_omni.model_executor.models",
    "vllm_omni.model_executor.models.output_templates",
)
_copies = itertools.count()


class OmniOutput(NamedTuple):
    """Shape of vllm-omni's stage output: the acoustic stage only fills the second field."""

    text_hidden_states: Any = None
    multimodal_outputs: Any = None
    intermediate_tensors: Any = None
    next_token_id: Any = None


class _StandIn(types.ModuleType):
    """A module in which every public name is an empty class, enough to import from and to subclass."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = OmniOutput if name == "OmniOutput" else type(name, (), {})
        setattr(self, name, made)
        return made


def reference_dir() -> Path:
    """Folder that vllm-omni's wheel is unpacked in.

    Raises:
        FileNotFoundError: it isn't there; the message says how to get it.
    """
    folder = Path(os.environ.get("MUSIC3_REFERENCE_DIR") or PROJECT / ".cache" / "reference")
    if not (folder / MUSIC3_FOLDER / "constants.py").is_file():
        raise FileNotFoundError(f"vllm-omni is not in {folder}: run ./build.sh test, which downloads it")
    return folder


@contextlib.contextmanager
def _modules(replaced: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Put modules into `sys.modules` for a while, then restore what was there."""
    before = {name: sys.modules.get(name) for name in replaced}
    sys.modules.update(replaced)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _stand_ins() -> dict[str, types.ModuleType]:
    made: dict[str, types.ModuleType] = {name: _StandIn(name) for name in _STAND_INS}
    for name, module in made.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    made["vllm.logger"].init_logger = logging.getLogger
    return made


def vllm_omni(module: str, **constants: Any) -> types.ModuleType:
    """A fresh copy of one of vllm-omni's `minimax_music3` modules.

    Args:
        module: file name without `.py`, e.g. `"dit"`.
        constants: module globals to overwrite before use, e.g. `_DIM=32`; each must exist.

    Raises:
        FileNotFoundError: vllm-omni is not installed.
        AttributeError: a constant the module doesn't have.
    """
    package_name = f"music3_reference_{next(_copies)}"
    package = types.ModuleType(package_name)
    package.__path__ = [str(reference_dir() / MUSIC3_FOLDER)]
    with _modules(_stand_ins()):
        sys.modules[package_name] = package
        loaded = importlib.import_module(f"{package_name}.{module}")
    for name, value in constants.items():
        if not hasattr(loaded, name):
            raise AttributeError(f"vllm-omni's {module} has no {name}")
        setattr(loaded, name, value)
    return loaded


@contextlib.contextmanager
def torchaudio_importable() -> Iterator[None]:
    """Let `import torchaudio` work inside, also where torchaudio's binary doesn't load."""
    functional = torchaudio_functional()
    made: dict[str, types.ModuleType] = {}
    for name in ("torchaudio", "torchaudio.functional"):
        made[name] = types.ModuleType(name)
        made[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    made["torchaudio"].functional = made["torchaudio.functional"]
    made["torchaudio.functional"].resample = functional.resample
    with _modules(made):
        yield


def library(name: str) -> types.ModuleType:
    """Import a module of diffusers or transformers, which import torchaudio if it is installed."""
    with torchaudio_importable():
        importlib.import_module("transformers.audio_utils")
        return importlib.import_module(name)


def diffusers_network(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """One of diffusers' Music 3 networks with a checkpoint's tensors.

    Args:
        name: `condition_encoder`, `transformer`, `rvq_depth_decoder` or `vocoder`.
        config: the component's config.json.
        tensors: by checkpoint name; loaded strictly.
    """
    home, class_name = {
        "condition_encoder": (
            "condition_embedders.condition_embedder_minimax_music3",
            "MiniMaxMusic3ConditionEncoder",
        ),
        "transformer": ("transformers.transformer_minimax_music3", "MiniMaxMusic3Transformer1DModel"),
        "rvq_depth_decoder": (
            "transformers.minimax_music3_rvq_depth_decoder",
            "MiniMaxMusic3RVQDepthDecoder",
        ),
        "vocoder": ("autoencoders.minimax_music3_vocoder", "MiniMaxMusic3Vocoder"),
    }[name]
    network = getattr(library(f"diffusers.models.{home}"), class_name)(**config)
    network.load_state_dict(dict(tensors), strict=True)
    return network.eval().requires_grad_(False)
