"""Loading: every layout of files gives the same network, and whatever is off is named."""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from python_backend_models import checkpoint, contract
from python_backend_models.checkpoint import CheckpointError
from tests.small_models import BACKBONE_CONFIG, DEPTH_CONFIG

STEM = "diffusion_pytorch_model"
DEPTH = checkpoint.DEPTH_DECODER
Tensors = dict[str, Tensor]


def random_tensors(component: checkpoint.Component[Any], config: Mapping[str, Any]) -> Tensors:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in component.shapes(config).items()
    }


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(DEPTH, DEPTH_CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The depth decoder's folder, with its config alone."""
    made = tmp_path / DEPTH.folder
    made.mkdir()
    (made / "config.json").write_text(json.dumps(DEPTH_CONFIG))
    return made


def write_shards(folder: Path, tensors: Tensors, *, count: int = 3, index: bool = True) -> list[Path]:
    """Tensors dealt out to shards like cards; the index as transformers and diffusers write it."""
    names = list(tensors)
    files = [f"{STEM}-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)]
    for shard, file in enumerate(files):
        save_file({name: tensors[name] for name in names[shard::count]}, folder / file)
    if index:
        weight_map = {name: files[place % count] for place, name in enumerate(names)}
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [folder / file for file in files]


def write_single(folder: Path, tensors: Tensors) -> Path:
    path = folder / f"{STEM}.safetensors"
    save_file(tensors, path)
    return path


def write_links(folder: Path, tensors: Tensors) -> None:
    """A hub's download cache: the files lie elsewhere under other names."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(write_shards(folder, tensors)):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))


LAYOUTS: dict[str, Callable[[Path, Tensors], Any]] = {
    "one file": write_single,
    "shards with an index": write_shards,
    "shards without an index": lambda folder, tensors: write_shards(folder, tensors, index=False),
    "links into a cache": write_links,
}


def assert_same_network(state: Mapping[str, Tensor], tensors: Tensors) -> None:
    """Every stored tensor is there under its name, and q, k and v are one matrix."""
    expected = {name: t for name, t in tensors.items() if not name.endswith(("to_q.weight", "to_k.weight"))}
    for name in [name for name in expected if name.endswith("to_v.weight")]:
        del expected[name]
        prefix = name.removesuffix("v.weight")
        expected[f"{prefix}qkv.weight"] = torch.cat([tensors[f"{prefix}{part}.weight"] for part in "qkv"])
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_network(folder: Path, tensors: Tensors, layout: str) -> None:
    LAYOUTS[layout](folder, tensors)
    network = checkpoint.load(folder.parent, DEPTH)
    assert_same_network(network.state_dict(), tensors)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_a_loaded_network_needs_its_files_no_more(folder: Path, tensors: Tensors) -> None:
    path = write_single(folder, tensors)
    network = checkpoint.load(folder.parent, DEPTH)
    size = path.stat().st_size
    path.write_bytes(b"\0" * size)  # in place: a mapping that was still open would see it
    assert_same_network(network.state_dict(), tensors)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16, torch.float32])
def test_dtypes(folder: Path, tensors: Tensors, stored: torch.dtype, wanted: torch.dtype | None) -> None:
    written = {name: tensor.to(stored) for name, tensor in tensors.items()}
    write_single(folder, written)
    network = checkpoint.load(folder.parent, DEPTH, dtype=wanted)
    assert_same_network(
        network.state_dict(), {name: tensor.to(wanted or stored) for name, tensor in written.items()}
    )
    assert {p.dtype for p in network.parameters()} == {wanted or stored}


def test_backbone_keeps_the_drawable_rows_of_its_head(tmp_path: Path) -> None:
    config = BACKBONE_CONFIG | {"hidden_size": 8, "head_dim": 4}
    tensors = random_tensors(checkpoint.BACKBONE, config)
    folder = tmp_path / "language_model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    network = checkpoint.load(tmp_path, checkpoint.BACKBONE)
    head = tensors["lm_head.weight"]
    assert network.lm_head.weight.shape == (16385, 8)
    for column, token in ((0, 151670), (1, 151675), (2, 151676), (16384, 168058)):
        assert torch.equal(network.lm_head.weight[column], head[token])
    assert torch.equal(network.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    attention = network.model.layers[1].self_attn
    for start, end, part in ((0, 16, "q"), (16, 24, "k"), (24, 32, "v")):
        stored = tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert torch.equal(attention.qkv_proj.weight[start:end], stored)
    assert network.rotary_cos.dtype == torch.float32
    assert len(network.rotary_cos) == contract.CONTEXT_TOKENS


def test_the_folder_stays_as_it_is(folder: Path, tensors: Tensors) -> None:
    write_shards(folder, tensors)

    def listing() -> dict[str, tuple[str, int, int]]:
        return {
            path.name: (
                hashlib.sha256(path.read_bytes()).hexdigest(),
                path.stat().st_mtime_ns,
                stat.S_IMODE(path.stat().st_mode),
            )
            for path in folder.iterdir()
        }

    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    before = listing()
    checkpoint.load(folder.parent, DEPTH)
    assert listing() == before
    folder.chmod(0o755)


# ------------------------------------------------------------------ tensors


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


HEAD = "audio_heads.3.weight"
SPOILED: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (without(HEAD), r"missing: audio_heads\.3\.weight$"),
    "missing part of a fused matrix": (
        without("layers.0.attn.to_k.weight"),
        r"missing: layers\.0\.attn\.to_k",
    ),
    "extra": (replaced("layers.2.norm.weight", torch.ones(4)), r"unexpected: layers\.2\.norm\.weight$"),
    "transposed": (
        replaced(HEAD, torch.ones(32, 1024)),
        r"3\.weight has shape \[32, 1024\], not \[1024, 32\]",
    ),
    "one row short": (replaced(HEAD, torch.ones(1023, 32)), r"shape \[1023, 32\], not \[1024, 32\]"),
    "flat": (replaced(HEAD, torch.ones(32 * 1024)), r"shape \[32768\], not"),
    "integers": (
        replaced(HEAD, torch.ones(1024, 32, dtype=torch.int8)),
        r"audio_heads\.3\.weight has dtype I8, not one of BF16, F16, F32",
    ),
    "doubles": (replaced(HEAD, torch.ones(1024, 32, dtype=torch.float64)), r"has dtype F64, not one of"),
    "eight-bit floats": (
        replaced(HEAD, torch.ones(1024, 32).to(torch.float8_e4m3fn)),
        r"has dtype F8_E4M3, not one of",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("layout", ["one file", "shards without an index"])
def test_spoiled_tensors_are_named(folder: Path, tensors: Tensors, case: str, layout: str) -> None:
    spoil, message = SPOILED[case]
    spoiled = dict(tensors)
    spoil(spoiled)
    LAYOUTS[layout](folder, spoiled)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(folder.parent, DEPTH)
    assert str(folder) in str(caught.value)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    write_single(folder, {"norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"missing: audio_embeddings\.weight, .* and 23 more"):
        checkpoint.load(folder.parent, DEPTH)


def test_the_network_takes_every_tensor_that_its_shapes_name(folder: Path, tensors: Tensors) -> None:
    """A converter that forgets one is found at load, not at the first song."""
    write_single(folder, tensors)
    forgetful = checkpoint.Component(
        DEPTH.folder,
        STEM,
        DEPTH.build,
        DEPTH.shapes,
        lambda stored: (pair for pair in DEPTH.convert(stored) if pair[0] != HEAD),
    )
    with pytest.raises(CheckpointError, match=r"no tensor fills audio_heads\.3\.weight"):
        checkpoint.load(folder.parent, forgetful)


# -------------------------------------------------------------------- files


def test_a_tensor_in_two_shards_is_refused(folder: Path, tensors: Tensors) -> None:
    paths = write_shards(folder, tensors)
    save_file({name: tensors[name] for name in ("norm.weight", "projection.weight")}, paths[1])
    with pytest.raises(CheckpointError, match=r"\.weight is in both .*00001-of-.* and .*00002-of-"):
        checkpoint.load(folder.parent, DEPTH)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_gap_in_the_shards_is_named(folder: Path, tensors: Tensors, index: bool, shard: int) -> None:
    gone = write_shards(folder, tensors, index=index)[shard]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"missing {gone.name}"):
        checkpoint.load(folder.parent, DEPTH)


def test_a_dangling_link_is_named(folder: Path, tensors: Tensors) -> None:
    write_links(folder, tensors)
    (folder.parent / "blobs" / "2").unlink()
    with pytest.raises(CheckpointError, match=r"missing .*-00003-of-00003"):
        checkpoint.load(folder.parent, DEPTH)


def test_two_sets_of_shards_are_refused(folder: Path, tensors: Tensors) -> None:
    write_shards(folder, tensors, index=False)
    write_shards(folder, tensors, count=2, index=False)
    with pytest.raises(CheckpointError, match="nor one complete set of shards"):
        checkpoint.load(folder.parent, DEPTH)


def test_no_weights_at_all(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"neither {STEM}.safetensors, .* is there"):
        checkpoint.load(folder.parent, DEPTH)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": ["a"]}',
        '{"weight_map": {"norm.weight": 3}}',
        '{"weight_map": {"norm.weight": null, "projection.weight": "a.safetensors"}}',
        b"\xff\xfe",
    ],
)
def test_a_broken_index_is_named(folder: Path, tensors: Tensors, content: str | bytes) -> None:
    write_shards(folder, tensors)
    index = folder / f"{STEM}.safetensors.index.json"
    index.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index"):
        checkpoint.load(folder.parent, DEPTH)


@pytest.mark.parametrize("elsewhere", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(folder: Path, tensors: Tensors, elsewhere: str) -> None:
    write_shards(folder, tensors)
    index = folder / f"{STEM}.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"][HEAD] = elsewhere
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        checkpoint.load(folder.parent, DEPTH)


@pytest.mark.parametrize("kept", [0, 5, 8, 200, -1])
def test_a_truncated_file_is_named(folder: Path, tensors: Tensors, kept: int) -> None:
    path = write_shards(folder, tensors)[1]
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{path.name}: not a readable safetensors file"):
        checkpoint.load(folder.parent, DEPTH)


def test_a_file_that_is_something_else_is_named(folder: Path) -> None:
    (folder / f"{STEM}.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        checkpoint.load(folder.parent, DEPTH)


# ------------------------------------------------------------------- config


def test_no_checkpoint_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint folder .*nowhere does not exist"):
        checkpoint.load(tmp_path / "nowhere", DEPTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, only False is served"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}},
            "rope_type is 'yarn', only 'default'",
        ),
        ({"vocab_size": 151_936}, "vocab_size is 151936, audio codes need at least 168059"),
        ({"rope_parameters": {}}, "no key 'rope_theta'"),
    ],
)
def test_a_backbone_that_is_not_served_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "language_model").mkdir()
    (tmp_path / "language_model" / "config.json").write_text(json.dumps(BACKBONE_CONFIG | change))
    with pytest.raises(
        CheckpointError, match=rf"^language_model/config\.json: (rope_parameters\.)?{message}"
    ):
        checkpoint.load(tmp_path, checkpoint.BACKBONE)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"rvq_depth_decoder/config\.json: No such file"):
        checkpoint.load(folder.parent, DEPTH)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not JSON"), ("\udcff", "not JSON"), ("[1]", "not a JSON object")]
)
def test_an_unreadable_config(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_bytes(os.fsencode(content))
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        checkpoint.load(folder.parent, DEPTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"no key 'hidden_size'"),
        ({"num_codebooks": 9}, r"num_codebooks is 9, only 8 is served"),
        ({"num_attention_heads": 5}, r"num_attention_heads is 5, which does not divide hidden_size 32"),
        ({"max_position_embeddings": 7}, r"max_position_embeddings is 7, a frame needs 8"),
        ({"num_layers": "four"}, r"rvq_depth_decoder/config\.json: "),
    ],
)
def test_a_config_that_is_not_served_is_named(
    folder: Path, tensors: Tensors, change: dict[str, Any], message: str
) -> None:
    config = {key: value for key, value in (DEPTH_CONFIG | change).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_single(folder, tensors)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder.parent, DEPTH)
