"""The official checkpoint: its tensor list, what loading one of that kind costs, and that it stays as it is.

The digests are those that appautomaton/mlx-minimax-music3 (Apache-2.0) pinned from the official checkpoint at
revision fbdf52fb: SHA-256 over the sorted lines `name|shape|dtype`, for the acoustic half with convolutions
channels-last and weight norm folded.
"""

import hashlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from python_backend_models import checkpoint, official
from python_backend_models.networks import backbone
from python_backend_models.tiny_checkpoint import LAYOUT, write_tiny_checkpoint
from tests.acoustic_models import channels_last
from tests.parity import oracles
from tests.parity.conftest import Fidelity

SECTION = "Checkpoint"
PINNED = "digest of the official checkpoint, pinned by mlx-minimax-music3"
# Tensors in the pinned form, and the digest over them.
DIGESTS = {
    "language_model": (399, "b6c914a58f8fdb196a0f8e7326dba7799ce5cae4c76ca679f3a2bd60780d1a05"),
    "rvq_depth_decoder": (47, "aa462f06d2a53deb4c430ecbe9ee038d72943c954e1bb0c228760e58f18a7729"),
    "condition_encoder": (4, "c0d1c18e03e39fafcabb1bd28dad8477ff26abdeb18433d634632244fbaff803"),
    "transformer": (441, "3ad8e6ed9386a88f435a6b7aa63d3fb65688f31eba025c1b9b651d068972bc3f"),
    "vocoder": (91, "f6d971e8568d50e77b1b4f90d1c098f7e869c5b443c081b84d653ce2a3686bfb"),
}
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
COMPONENTS = {component.folder: component for component in checkpoint.COMPONENTS}
Shapes = Mapping[str, tuple[int, ...]]


def digest(shapes: Shapes, dtype: str) -> str:
    lines = [f"{name}|{tuple(shape)}|{dtype}" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("folder", DIGESTS)
def test_tensor_names_shapes_and_dtypes(folder: str, fidelity: Fidelity) -> None:
    count, expected = DIGESTS[folder]
    component, config, dtype = COMPONENTS[folder], official.CONFIGS[folder], DTYPES[LAYOUT[folder][2]]
    stored = component.shapes(config)
    talker = folder in ("language_model", "rvq_depth_decoder")
    pinned = stored if talker else channels_last(stored)
    assert len(pinned) == count
    fidelity.record(
        section=SECTION,
        quantity=f"tensor names, shapes and dtypes of {folder}",
        oracle=PINNED,
        cases=count,
        largest_error=digest(pinned, dtype) != expected,
        tolerance="equal bits",
        note="full size",
    )


@pytest.mark.parametrize("folder", DIGESTS)
def test_full_size_modules_take_exactly_these_tensors(folder: str) -> None:
    """On `meta`, so nothing is allocated: 44 GB otherwise."""
    component, config = COMPONENTS[folder], official.CONFIGS[folder]
    with torch.device("meta"):
        network = component.build(config)
        stored = {
            name: torch.empty(shape, dtype=LAYOUT[folder][2])
            for name, shape in component.shapes(config).items()
        }
        converted = dict(component.convert(stored))
    assert {name: t.shape for name, t in converted.items()} == {
        name: t.shape for name, t in network.state_dict().items()
    }
    assert {tensor.dtype for tensor in converted.values()} == {LAYOUT[folder][2]}


def reference_module(folder: str, config: Mapping[str, Any]) -> nn.Module:
    if folder == "language_model":
        transformers = oracles.library("transformers")
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    name = {
        "rvq_depth_decoder": "MiniMaxMusic3RVQDepthDecoder",
        "condition_encoder": "MiniMaxMusic3ConditionEncoder",
        "transformer": "MiniMaxMusic3Transformer1DModel",
        "vocoder": "MiniMaxMusic3Vocoder",
    }[folder]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's older weight_norm
        return getattr(oracles.library("diffusers"), name)(**config)


@pytest.mark.parametrize("folder", DIGESTS)
def test_other_libraries_classes_have_the_same_tensors(folder: str, fidelity: Fidelity) -> None:
    config = official.CONFIGS[folder]
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in reference_module(folder, config).state_dict().items()}
    found = COMPONENTS[folder].shapes(config)
    fidelity.record(
        section=SECTION,
        quantity=f"tensor names and shapes of {folder}",
        oracle="transformers 5.24" if folder == "language_model" else "diffusers 0.42.1",
        cases=len(expected),
        largest_error=len(set(found.items()) ^ set(expected.items())),
        tolerance="equal bits",
        note="full size; tensors that differ",
    )


# ------------------------------------------------------------------- memory

# 2 GB; the embedding table and the head, of which a tenth is kept, are a sixth each.
LARGE = official.CONFIGS["language_model"] | {
    "hidden_size": 1024,
    "intermediate_size": 5376,
    "num_hidden_layers": 24,
    "vocab_size": 168_100,
}
SHARDS = 4
MOST_MORE = 0.15  # peak resident memory beyond the weights, as a part of them
NOISE = np.random.default_rng(0).bytes(1 << 22)

MEASURED_LOAD = """
import re, sys, torch
from pathlib import Path
from python_backend_models import checkpoint

def resident_bytes(key):
    return 1024 * int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = resident_bytes("VmRSS")
network = checkpoint.load(Path(sys.argv[1]), checkpoint.BACKBONE)
growth = resident_bytes("VmHWM") - before
tables = network.model.embed_tokens.weight, network.model.layers[-1].mlp.up_proj.weight
print(growth, sum(p.numel() * p.element_size() for p in network.parameters()))
print(*(int(table.view(torch.int16).sum()) for table in tables))
"""


def write_large_model(folder: Path) -> None:
    """Random bits as bfloat16, in shards with an index.

    The embedding table comes last, where it would be there twice when all else is there already.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LARGE))
    shapes = backbone.checkpoint_shapes(LARGE)
    names = sorted(shapes, key=lambda name: (name == "model.embed_tokens.weight", name))
    per_shard = -(-len(names) // SHARDS)
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = names[shard * per_shard : (shard + 1) * per_shard]
        write_tensors(folder / file, {name: shapes[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_tensors(path: Path, shapes: Shapes) -> None:
    """A safetensors file by hand: whoever makes two gigabytes of tensors first needs much longer."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            whole, rest = divmod(2 * math.prod(shape), len(NOISE))
            for _ in range(whole):
                file.write(NOISE)
            file.write(NOISE[:rest])


def sum_of_bits(shape: tuple[int, ...]) -> int:
    """Of a tensor of that file, as 16-bit integers."""
    whole, rest = divmod(2 * math.prod(shape), len(NOISE))
    bits = np.frombuffer(NOISE, np.int16)
    return whole * int(bits.sum(dtype=np.int64)) + int(bits[: rest // 2].sum(dtype=np.int64))


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder that others can read, and that is gone afterwards: pytest keeps its own, and to itself."""
    folder = Path(tempfile.mkdtemp(prefix="music3-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o700)
    shutil.rmtree(folder)


def run(script: str, root: Path) -> list[list[str]]:
    finished = subprocess.run(
        [sys.executable, "-c", script, str(root)],
        cwd=oracles.PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [line.split() for line in finished.stdout.splitlines()]


def test_loading_two_gigabytes(own_folder: Path, fidelity: Fidelity) -> None:
    write_large_model(own_folder / "language_model")
    stored_bytes = sum(path.stat().st_size for path in own_folder.rglob("*.safetensors"))
    assert 1.9e9 < stored_bytes < 2.2e9
    (growth, kept_bytes), table_sums = run(MEASURED_LOAD, own_folder)
    assert [int(found) for found in table_sums] == [
        sum_of_bits(shape) for shape in ((168_100, 1024), (5376, 1024))
    ]
    fidelity.record(
        section=SECTION,
        quantity="peak resident memory beyond its weights while a 2 GB language model loads",
        oracle="the size of the weights as they are kept",
        cases=1,
        largest_error=int(growth) / int(kept_bytes) - 1,
        tolerance=MOST_MORE,
        note=f"as a part of them; the whole growth is {int(growth) / stored_bytes:.2f} times the stored size",
    )


# ---------------------------------------------------------------- read only

READ_ONLY_LOAD = """
import os, sys
from pathlib import Path
from python_backend_models import checkpoint

root = Path(sys.argv[1])
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
for folder in (root, *(path for path in root.iterdir() if path.is_dir())):
    try:
        (folder / "probe").touch()
    except PermissionError:
        continue
    raise SystemExit(f"{folder} can be written to")
for component in checkpoint.COMPONENTS:
    network = checkpoint.load(root, component)
    print(component.folder, sum(p.numel() for p in network.parameters()))
"""


def listing(root: Path) -> dict[str, tuple[str, int, int]]:
    """Digest, time of change and mode of every file."""
    return {
        str(path.relative_to(root)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
            path.stat().st_mode,
        )
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_read_only_folder_loads_and_stays_as_it_is(own_folder: Path, fidelity: Fidelity) -> None:
    root = write_tiny_checkpoint(own_folder / "checkpoint")
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = listing(root)
    loaded = run(READ_ONLY_LOAD, root)
    assert [folder for folder, _ in loaded] == list(COMPONENTS)
    assert all(int(parameters) > 1000 for _, parameters in loaded)
    after = listing(root)
    fidelity.record(
        section=SECTION,
        quantity="files of a read-only checkpoint after all components were loaded from it",
        oracle="SHA-256, time and mode of each before",
        cases=len(before),
        largest_error=len(set(before.items()) ^ set(after.items())),
        tolerance="equal bits",
        note="files that differ",
    )
