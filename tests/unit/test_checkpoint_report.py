"""The report on a checkpoint: one of the official size whose weight files are holes, and small ones."""

import hashlib
import json
import math
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from python_backend_models import official
from python_backend_models.checkpoint import COMPONENTS
from python_backend_models.checkpoint_report import inspect_checkpoint, main
from python_backend_models.contract import SPECIAL_TOKEN_IDS
from python_backend_models.tiny_checkpoint import LAYOUT, tokenizer_description, write_tiny_checkpoint

SIZES = {"BF16": 2, "F32": 4}
# SHA-256 over the sorted lines `name|shape|dtype` of the official checkpoint's talker, at revision fbdf52fb;
# published in the fixture of appautomaton/mlx-minimax-music3 (Apache-2.0).
DIGESTS = {
    "language_model": "b6c914a58f8fdb196a0f8e7326dba7799ce5cae4c76ca679f3a2bd60780d1a05",
    "rvq_depth_decoder": "aa462f06d2a53deb4c430ecbe9ee038d72943c954e1bb0c228760e58f18a7729",
}


def write_hollow(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """A safetensors file whose weights are a hole: full size, and no bytes on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official checkpoint as far as headers tell."""
    root = tmp_path_factory.mktemp("official")
    for component in COMPONENTS:
        folder = root / component.folder
        folder.mkdir()
        config = official.CONFIGS[component.folder]
        (folder / "config.json").write_text(json.dumps({"_class_name": "Something", **config}))
        write_hollow(
            folder / f"{component.file_stem}.safetensors",
            component.shapes(config),
            official.DTYPES[component.folder],
        )
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer_description()))
    return root


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def problems(root: Path, *, any_size: bool = True) -> list[str]:
    reports = inspect_checkpoint(root, any_size=any_size)
    return [f"{report.folder}: {problem}" for report in reports for problem in report.problems]


def faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def test_the_official_checkpoint_is_recognized_by_its_headers(
    hollow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = faults()
    assert main([str(hollow)]) == 0
    # Reading the weights through a mapping is a fault per page, even with 64 KiB brought in by each: 435,000.
    assert faults() - before < 200_000
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("complete: 28.51 GB")
    assert "fbdf52fb" in shown
    assert "language_model      17.17 GB  399 tensors, BF16, in 1 file" in shown


@pytest.mark.parametrize("folder", DIGESTS)
def test_what_is_recognized_is_what_others_pinned(hollow: Path, folder: str) -> None:
    """The hollow files' own headers, read without this project's code."""
    (path,) = (hollow / folder).glob("*.safetensors")
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    listed = [f"{name}|{tuple(each['shape'])}|{each['dtype']}" for name, each in sorted(header.items())]
    assert hashlib.sha256("\n".join(listed).encode()).hexdigest() == DIGESTS[folder]


def test_a_small_checkpoint_is_good_only_if_any_size_is(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny), "--any-size"]) == 0
    assert "not compared with the official ones" in capsys.readouterr().out
    assert main([str(tiny)]) == 1
    shown = capsys.readouterr().out
    assert "config.json: hidden_size is 64, must be 4096" in shown
    assert shown.splitlines()[-1].endswith("this checkpoint can't be served as it is")
    sizes = [line for line in problems(tiny, any_size=False) if "config.json" in line]
    assert len({line.split(":")[0] for line in sizes}) == len(COMPONENTS)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_everything_that_is_wrong_is_said_at_once(tiny: Path) -> None:
    vocoder = tiny / "vocoder" / "diffusion_pytorch_model.safetensors"
    lost = [f"blocks.0.res_unit{unit}.conv{number}.bias" for unit in (1, 2, 3) for number in (1, 2)]

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in lost:
            del tensors[name]
        tensors["blocks.9.bias"] = torch.zeros(3)
        tensors["conv_in.bias"] = torch.zeros(5)
        tensors["conv_out.bias"] = torch.zeros(1, dtype=torch.int64)

    rewrite(vocoder, spoil)
    (tiny / "language_model" / "model-00002-of-00002.safetensors").unlink()
    (tiny / "rvq_depth_decoder" / "config.json").write_text("[]")
    shard = tiny / "transformer" / "diffusion_pytorch_model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])  # a download that broke off
    found = problems(tiny)
    for name in lost:
        assert f"vocoder: tensor {name} is missing" in found
    assert "vocoder: tensor blocks.9.bias is not one of this model's" in found
    assert any("conv_in.bias has shape [5], not [64]" in each for each in found)
    assert any("conv_out.bias has dtype I64" in each for each in found)
    assert any(each.startswith("language_model: ") and "model-00002-of-00002" in each for each in found)
    assert any(each.startswith("rvq_depth_decoder: ") and "not a JSON object" in each for each in found)
    assert any(each.startswith("transformer: ") and f"{shard.name}: not a readable" in each for each in found)
    assert not any(each.startswith(("condition_encoder", "tokenizer")) for each in found)


def test_weights_that_git_lfs_did_not_fetch_are_named(tiny: Path) -> None:
    path = tiny / "condition_encoder" / "diffusion_pytorch_model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100676644\n")
    assert (
        f"condition_encoder: {path.name} is a Git LFS pointer: its weights were not downloaded"
        in problems(tiny)
    )


def test_a_folder_that_is_missing_is_named(tiny: Path) -> None:
    shutil.rmtree(tiny / "condition_encoder")
    shutil.rmtree(tiny / "tokenizer")
    found = problems(tiny)
    assert len(found) == 2
    assert "condition_encoder/config.json: No such file" in found[0]
    assert "tokenizer/tokenizer.json: No such file" in found[1]
    assert main([str(tiny / "nowhere")]) == 1


def test_other_types_than_the_official_are_named_unless_any_size_is_good(
    hollow: Path, tmp_path: Path
) -> None:
    root = tmp_path / "half"
    shutil.copytree(hollow, root, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copy)
    for component in COMPONENTS:
        name = f"{component.folder}/{component.file_stem}.safetensors"
        (root / name).symlink_to(hollow / name)
    (encoder,) = (root / "condition_encoder").glob("*.safetensors")
    encoder.unlink()
    shapes = next(c for c in COMPONENTS if c.folder == "condition_encoder").shapes(
        official.CONFIGS["condition_encoder"]
    )
    write_hollow(encoder, shapes, "BF16")
    assert problems(root) == []
    assert sorted(problems(root, any_size=False)) == sorted(
        f"condition_encoder: tensor {name} is BF16, not F32" for name in shapes
    )


def test_every_official_key_of_a_config_counts(hollow: Path, tmp_path: Path) -> None:
    root = tmp_path / "changed"
    shutil.copytree(hollow, root, ignore=shutil.ignore_patterns("*.safetensors"))
    config = official.CONFIGS["language_model"]
    changed = {key: value for key, value in config.items() if key != "rms_norm_eps"}
    changed["rope_parameters"] = {"rope_theta": 10_000.0, "rope_type": "default"}
    (root / "language_model" / "config.json").write_text(json.dumps(changed))
    found = problems(root, any_size=False)
    assert "language_model: config.json: rms_norm_eps is missing, must be 1e-06" in found
    assert "language_model: config.json: rope_parameters.rope_theta is 10000.0, must be 1000000.0" in found


def test_parts_that_do_not_fit_each_other_are_named(tiny: Path) -> None:
    other = write_tiny_checkpoint(tiny.parent / "small", size="small")
    shutil.rmtree(tiny / "transformer")
    shutil.copytree(other / "transformer", tiny / "transformer")
    assert problems(tiny) == [
        "transformer: config.json: condition_dim is 128, but condition_encoder's out_dim is 32"
    ]


@pytest.mark.parametrize("token", SPECIAL_TOKEN_IDS)
def test_each_special_id_is_checked(tiny: Path, token: str) -> None:
    path = tiny / "tokenizer" / "tokenizer.json"
    description = json.loads(path.read_text())
    for added in description["added_tokens"]:
        if added["content"] == token:
            added["id"] += 1
    path.write_text(json.dumps(description))
    expected = SPECIAL_TOKEN_IDS[token]
    assert problems(tiny) == [f"tokenizer: tokenizer.json: {token} is {expected + 1}, must be {expected}"]


def test_layout_is_the_one_that_is_written() -> None:
    assert {component.folder for component in COMPONENTS} == set(LAYOUT)
