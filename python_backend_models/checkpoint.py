"""Strict, memory-mapped loading of the official checkpoint layout.

A checkpoint is a folder with one sub-folder per component, each with a `config.json` and safetensors files:
a single file, shards with an index, or shards alone. Every tensor the network needs must be there in its
shape and nothing else may be; anything off is named in a `CheckpointError`. Files are only read.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from python_backend_models.networks import (
    backbone,
    condition_encoder,
    depth_decoder,
    flow_transformer,
    vocoder,
)

Network = TypeVar("Network", bound=nn.Module)

_FLOAT_DTYPES = ("BF16", "F16", "F32")
_NAMES_SHOWN = 5


class CheckpointError(RuntimeError):
    """The checkpoint can't be served; the message says which file or tensor is wrong, and how."""


@dataclass(frozen=True)
class Component(Generic[Network]):
    """How one component folder becomes a network."""

    folder: str
    file_stem: str
    build: Callable[[Mapping[str, Any]], Network]
    shapes: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]
    convert: Callable[[Mapping[str, Tensor]], Iterable[tuple[str, Tensor]]]


_DIFFUSERS_STEM = "diffusion_pytorch_model"

BACKBONE = Component(
    "language_model", "model", backbone.Backbone, backbone.checkpoint_shapes, backbone.convert
)
DEPTH_DECODER = Component(
    "rvq_depth_decoder",
    _DIFFUSERS_STEM,
    depth_decoder.DepthDecoder,
    depth_decoder.checkpoint_shapes,
    depth_decoder.convert,
)
CONDITION_ENCODER = Component(
    "condition_encoder",
    _DIFFUSERS_STEM,
    condition_encoder.ConditionEncoder,
    condition_encoder.checkpoint_shapes,
    condition_encoder.convert,
)
FLOW_TRANSFORMER = Component(
    "transformer",
    _DIFFUSERS_STEM,
    flow_transformer.FlowTransformer,
    flow_transformer.checkpoint_shapes,
    flow_transformer.convert,
)
VOCODER = Component("vocoder", _DIFFUSERS_STEM, vocoder.Vocoder, vocoder.checkpoint_shapes, vocoder.convert)
COMPONENTS = (BACKBONE, DEPTH_DECODER, CONDITION_ENCODER, FLOW_TRANSFORMER, VOCODER)


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a component folder, mapped when asked for and unmapped when dropped.

    Each look-up opens its file anew: a mapping kept open would count every page once read as resident.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt", device="cpu") as stored:
            return stored.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load(
    root: Path,
    component: Component[Network],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Network:
    """Build a component's network and fill it from its folder, straight in the target device and dtype.

    Args:
        root: the checkpoint folder.
        device, dtype: where and how the weights are kept; `None` keeps the stored dtype.

    Raises:
        CheckpointError: a file is missing or unreadable, the config is not served, or a tensor is missing,
            extra, mis-shaped or not floating-point.
    """
    config = read_config(root, component.folder)
    with torch.device("meta"):
        network = _checked(component, lambda: component.build(config))
    tensors = open_component(root, component)
    wanted = set(network.state_dict())
    for name, tensor in component.convert(tensors):
        stored = tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True).contiguous()
        network.load_state_dict({name: stored}, strict=False, assign=True)
        wanted.discard(name)
    if wanted:
        raise CheckpointError(f"{component.folder}: no tensor fills {_listed(wanted)}")
    # Only buffers are left to move: they are computed, not stored.
    return network.to(device).eval().requires_grad_(False)


def read_config(root: Path, folder: str) -> dict[str, Any]:
    """A component's `config.json`.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    path = root / folder / "config.json"
    if not root.is_dir():
        raise CheckpointError(f"checkpoint folder {root} does not exist")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config


@dataclass(frozen=True)
class Survey:
    """What the file headers of a component folder say, and how it differs from what its config asks for.

    Attributes:
        files: the file of each tensor.
        dtypes: each tensor's, by safetensors' names.
        sizes: each tensor's number of values.
        faults: files that can't be read, and tensors of a wrong shape or kind, or in two files.
        missing, extra: names.
    """

    files: dict[str, Path]
    dtypes: dict[str, str]
    sizes: dict[str, int]
    faults: list[str]
    missing: list[str]
    extra: list[str]

    @property
    def good(self) -> bool:
        """Whether the component can be served."""
        return not (self.faults or self.missing or self.extra)


def survey_component(root: Path, component: Component[Any]) -> Survey:
    """Check names, shapes and dtypes from the file headers alone; no weight is read.

    Raises:
        CheckpointError: there is nothing to survey: no served config, or a file is missing.
    """
    config = read_config(root, component.folder)
    expected = _checked(component, lambda: component.shapes(config))
    survey = Survey({}, {}, {}, [], [], [])
    for path in _weight_files(root / component.folder, component.file_stem):
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118  not a mapping, only looks like one
                    if name in survey.files:
                        survey.faults.append(f"{name} is in both {survey.files[name]} and {path}")
                        continue
                    header = stored.get_slice(name)
                    survey.files[name], survey.dtypes[name] = path, header.get_dtype()
                    survey.sizes[name] = math.prod(header.get_shape())
                    if name in expected:
                        survey.faults.extend(_header_problems(name, header, expected[name]))
        except (SafetensorError, OSError) as error:
            survey.faults.append(f"{path}: not a readable safetensors file ({error})")
    survey.missing.extend(sorted(expected.keys() - survey.files.keys()))
    survey.extra.extend(sorted(survey.files.keys() - expected.keys()))
    return survey


def open_component(root: Path, component: Component[Any]) -> StoredTensors:
    """A component's tensors after checking names, shapes and dtypes from the file headers alone.

    Raises:
        CheckpointError: as in `load`; no weight has been read by then.
    """
    survey = survey_component(root, component)
    if not survey.good:
        problems = survey.faults[:_NAMES_SHOWN]
        if survey.missing:
            problems.append(f"missing: {_listed(survey.missing)}")
        if survey.extra:
            problems.append(f"unexpected: {_listed(survey.extra)}")
        raise CheckpointError(f"{root / component.folder}: " + "; ".join(problems))
    # Largest first: a tensor is there twice while it is copied, which is least noticed when little else is.
    return StoredTensors(
        {name: survey.files[name] for name in sorted(survey.files, key=lambda n: -survey.sizes[n])}
    )


def _checked(component: Component[Any], build: Callable[[], Any]) -> Any:
    try:
        return build()
    except KeyError as error:
        raise CheckpointError(f"{component.folder}/config.json: no key {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{component.folder}/config.json: {error}") from error


def _header_problems(name: str, stored: Any, shape: tuple[int, ...]) -> list[str]:
    found, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if found != shape:
        return [f"{name} has shape {list(found)}, not {list(shape)}"]
    if dtype not in _FLOAT_DTYPES:
        return [f"{name} has dtype {dtype}, not one of {', '.join(_FLOAT_DTYPES)}"]
    return []


def _weight_files(folder: Path, stem: str) -> list[Path]:
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            escaping = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
        if escaping:
            raise CheckpointError(f"{index}: {_listed(escaping)} is not a file of this folder")
        return _all_present(folder, names)
    if single.is_file():
        return [single]
    shards = {path.name for path in folder.glob(f"{stem}-*-of-*.safetensors")}
    counts = {match[1] for name in shards if (match := re.search(r"-of-(\d+)\.safetensors$", name))}
    if len(counts) != 1:
        raise CheckpointError(
            f"{folder}: neither {single.name}, {index.name} nor one complete set of shards is there"
        )
    count = counts.pop()
    return _all_present(
        folder,
        [f"{stem}-{shard:0{len(count)}d}-of-{count}.safetensors" for shard in range(1, int(count) + 1)],
    )


def _all_present(folder: Path, names: list[str]) -> list[Path]:
    paths = [folder / name for name in names]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{folder}: missing {_listed(absent)}")
    return paths


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return ", ".join(ordered[:_NAMES_SHOWN]) + more
