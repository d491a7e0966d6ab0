"""The tiny checkpoint: the official layout as other libraries read it, the same bytes, a useful song."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from python_backend_models import checkpoint, contract, offline, tiny_checkpoint, tiny_weights
from python_backend_models.tiny_checkpoint import (
    LAYOUT,
    MARKER,
    SIZES,
    component_configs,
    write_tiny_checkpoint,
)
from tests.parity.oracles import library

CAPTION, LYRICS = "Slow blues, brushed drums", "[Verse]\nThe night is long\n[Chorus]\nHold on"

# Keys of the official config.json files (revision fbdf52fb), without the libraries' own.
OFFICIAL_KEYS = {
    "language_model": "attention_bias attention_dropout dtype head_dim hidden_act hidden_size "
    "intermediate_size max_position_embeddings model_type num_attention_heads num_hidden_layers "
    "num_key_value_heads rms_norm_eps rope_parameters tie_word_embeddings vocab_size",
    "rvq_depth_decoder": "audio_vocab_size hidden_size intermediate_size max_position_embeddings "
    "num_attention_heads num_codebooks num_layers",
    "condition_encoder": "condition_hidden_dim input_hop_length input_sampling_rate num_condition_layers "
    "out_dim output_hop_length output_sampling_rate",
    "transformer": "attention_head_dim condition_dim ff_inner_dim fourier_embedding_dim in_channels "
    "num_attention_heads num_layers rotary_dim",
    "vocoder": "decoder_hidden_dim decoder_input_dim latent_channels sampling_rate upsampling_ratios",
}
# What no size may change, from the same files.
OFFICIAL_VALUES = {
    "language_model": {"vocab_size": 200_000, "max_position_embeddings": 10_240, "rms_norm_eps": 1e-6},
    "rvq_depth_decoder": {"audio_vocab_size": 1024, "num_codebooks": 8, "max_position_embeddings": 16},
    "condition_encoder": {
        "num_condition_layers": 8,
        "input_hop_length": 960,
        "input_sampling_rate": 24_000,
        "output_hop_length": 512,
        "output_sampling_rate": 44_100,
    },
    "transformer": {"in_channels": 128},
    "vocoder": {"latent_channels": 128, "upsampling_ratios": [8, 8, 4, 2], "sampling_rate": 44_100},
}


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def models(root: Path) -> offline.OfflineModels:
    return offline.load_models(root)


def stored(root: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(root.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping, only looks like one
                yield f"{path.parent.name}/{name}", file.get_tensor(name)


@pytest.mark.parametrize("size", SIZES)
def test_configs_have_the_official_form(size: str) -> None:
    configs = component_configs(size)
    assert configs.keys() == OFFICIAL_KEYS.keys()
    for folder, config in configs.items():
        own = {key for key in config if not key.startswith("_")} - {"architectures"}
        assert own == set(OFFICIAL_KEYS[folder].split())
        assert {key: config[key] for key in OFFICIAL_VALUES[folder]} == OFFICIAL_VALUES[folder]
    hidden = configs["language_model"]["hidden_size"]
    assert configs["rvq_depth_decoder"]["hidden_size"] == hidden
    assert configs["condition_encoder"]["condition_hidden_dim"] == hidden
    assert configs["transformer"]["condition_dim"] == configs["condition_encoder"]["out_dim"]


def test_files(root: Path) -> None:
    stem = "diffusion_pytorch_model"
    assert set(digests(root)) == {
        *(f"{folder}/config.json" for folder in LAYOUT),
        "language_model/model-00001-of-00002.safetensors",
        "language_model/model-00002-of-00002.safetensors",
        "language_model/model.safetensors.index.json",
        f"transformer/{stem}-00001-of-00002.safetensors",
        f"transformer/{stem}-00002-of-00002.safetensors",
        f"transformer/{stem}.safetensors.index.json",
        *(f"{folder}/{stem}.safetensors" for folder in ("rvq_depth_decoder", "condition_encoder", "vocoder")),
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "model_index.json",
        MARKER,
    }
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in root.rglob("*"))


def test_dtypes_are_the_official_ones(root: Path) -> None:
    for name, tensor in stored(root):
        talker = name.startswith(("language_model/", "rvq_depth_decoder/"))
        assert tensor.dtype == (torch.bfloat16 if talker else torch.float32), name


def test_no_tensor_is_constant_or_wild(root: Path) -> None:
    for name, tensor in stored(root):
        values = tensor.float()
        assert values.isfinite().all(), name
        assert values.abs().max() < 20, name
        assert not (values == 1).all(), name
        if values.numel() > 1:
            assert values.std() > 1e-3, name


def test_index_lists_what_is_there(root: Path) -> None:
    for index in sorted(root.rglob("*.index.json")):
        listed = json.loads(index.read_text())
        found, size = {}, 0
        for path in index.parent.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    found[name] = path.name
                    tensor = file.get_tensor(name)
                    size += tensor.numel() * tensor.element_size()
        assert listed["weight_map"] == found
        assert listed["metadata"]["total_size"] == size
        assert len(set(found.values())) > 1


def test_other_libraries_read_it(root: Path) -> None:
    transformers, diffusers = library("transformers"), library("diffusers")
    language_model, report = transformers.Qwen3ForCausalLM.from_pretrained(
        root / "language_model", output_loading_info=True
    )
    assert not any(report.values()), report
    own = checkpoint.load(root, checkpoint.BACKBONE)
    assert torch.equal(language_model.lm_head.weight[contract.AUDIO_END], own.lm_head.weight[0])
    for folder, name in {
        "rvq_depth_decoder": "MiniMaxMusic3RVQDepthDecoder",
        "condition_encoder": "MiniMaxMusic3ConditionEncoder",
        "transformer": "MiniMaxMusic3Transformer1DModel",
        "vocoder": "MiniMaxMusic3Vocoder",
    }.items():
        _, report = getattr(diffusers, name).from_pretrained(root / folder, output_loading_info=True)
        assert not any(report.values()), (folder, report)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(root / "scheduler")
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 30, 30).tolist())
    torch.testing.assert_close(scheduler.timesteps, torch.arange(30) / 30, atol=1e-6, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
    for token, token_id in contract.SPECIAL_TOKEN_IDS.items():
        assert tokenizer.convert_tokens_to_ids(token) == token_id
        assert tokenizer.encode(token) == [token_id]


def test_the_same_arguments_give_the_same_bytes(root: Path, tmp_path: Path) -> None:
    assert digests(write_tiny_checkpoint(tmp_path / "again")) == digests(root)


def test_the_seed_changes_every_tensor() -> None:
    for folder, (module, *_) in LAYOUT.items():
        for name, shape in module.checkpoint_shapes(component_configs("tiny")[folder]).items():
            if len(shape) and shape[0] <= 10_000:
                path = f"{folder}/{name}"
                one, other = (tiny_weights.tensor(path, shape, seed=seed, stop_logit=None) for seed in (0, 1))
                assert not torch.equal(one, other), path


def test_writing_again_changes_nothing(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert write_tiny_checkpoint(root) == root
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of one element: what is tested is where files go."""
    small = {"language_model": LAYOUT["condition_encoder"]}
    monkeypatch.setattr(tiny_checkpoint, "LAYOUT", small)
    configs = {"language_model": component_configs("tiny")["condition_encoder"]}
    monkeypatch.setattr(tiny_checkpoint, "component_configs", lambda size: configs)
    monkeypatch.setattr(tiny_weights, "tensor", lambda path, shape, **_: torch.ones(shape))


@pytest.mark.usefixtures("instant")
def test_other_arguments_replace_an_earlier_one(tmp_path: Path) -> None:
    root = write_tiny_checkpoint(tmp_path / "deep" / "checkpoint")
    (root / "stale").touch()
    write_tiny_checkpoint(root, seed=5)
    assert json.loads((root / MARKER).read_text())["seed"] == 5
    assert not (root / "stale").exists()
    assert [path.name for path in root.parent.iterdir()] == ["checkpoint"]


@pytest.mark.usefixtures("instant")
def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (write_tiny_checkpoint(tmp_path / "empty") / MARKER).is_file()


@pytest.mark.usefixtures("instant")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        write_tiny_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.usefixtures("instant")
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: str, shape: tuple[int, ...], **_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_weights, "tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_tiny_checkpoint(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_unknown_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed: tiny, small, mid"):
        write_tiny_checkpoint(tmp_path / "x", size="huge")


def test_command_line_refuses_politely(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    command = [sys.executable, "-m", "python_backend_models.tiny_checkpoint", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stderr.startswith("tiny_checkpoint: ")
    assert "Traceback" not in finished.stderr


def test_song_is_audible_bounded_and_stereo(models: offline.OfflineModels) -> None:
    song = offline.make_song(models, CAPTION, LYRICS, max_frames=210)
    audio = song.audio
    loudness = (audio - audio.mean(dim=0)).square().mean(dim=0).sqrt()
    assert song.finish_reason == "length"
    assert len(song.codes) == 210
    assert ((loudness > 0.05) & (loudness < 0.5)).all()
    # Every tenth of it, so no part is silent.
    parts = audio[: len(audio) // 10 * 10].reshape(10, -1, 2).std(dim=1)
    assert (parts > 0.05).all()
    assert audio.abs().max() < 2
    assert torch.corrcoef(audio.t())[0, 1].abs() < 0.5
    # Codes vary in every codebook.
    assert all(len(song.codes[:, k].unique()) > 100 for k in range(contract.CODEBOOKS))


def test_song_depends_on_caption_lyrics_and_seed(models: offline.OfflineModels) -> None:
    song = offline.make_song(models, CAPTION, LYRICS, seed=3, max_frames=40)
    again = offline.make_song(models, CAPTION, LYRICS, seed=3, max_frames=40)
    assert torch.equal(song.codes, again.codes)
    assert torch.equal(song.audio, again.audio)
    for caption, lyrics, seed in (
        (CAPTION + ".", LYRICS, 3),
        (CAPTION, LYRICS + "!", 3),
        (CAPTION, LYRICS, 4),
    ):
        other = offline.make_song(models, caption, lyrics, seed=seed, max_frames=40)
        assert (other.codes != song.codes).float().mean() > 0.7
        together = torch.stack((song.audio[:, 0], other.audio[:, 0]))
        assert torch.corrcoef(together)[0, 1] < 0.9


def test_stop_logit_lets_songs_end(models: offline.OfflineModels, root: Path) -> None:
    shape = (contract.C0_TOKEN_OFFSET, 64)
    rows = [
        tiny_weights.tensor("language_model/lm_head.weight", shape, seed=0, stop_logit=stop)
        for stop in (None, 8.0)
    ]
    assert not rows[0][contract.AUDIO_END].any()
    backbone = checkpoint.load(root, checkpoint.BACKBONE)
    backbone.lm_head.weight[0] = rows[1][contract.AUDIO_END].bfloat16()
    prompt = models.prompts.build(CAPTION, LYRICS)
    for seed in (0, 1):
        codes, _, reason = offline.write_frames(
            backbone, models.depth, prompt.ids, prompt.unconditional_ids, seed=seed, max_frames=400
        )
        assert reason == "stop"
        assert 5 < len(codes) < 400
