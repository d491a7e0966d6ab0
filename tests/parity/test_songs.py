"""Whole songs of one random checkpoint: codes, states and sound equal the references', in both profiles.

`vllm-omni`: its own talker class, draws, frame state and spans included, over transformers' Qwen3; then its
acoustic stage. `sglang-omni`: diffusers' autoregressive loop, which leaves the same frame out, with
vllm-omni's draws on the derived seed; then the same acoustic stage. Everything runs in float32.
"""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open
from torch import Tensor

from python_backend_models import checkpoint, offline, sampling
from python_backend_models.engine.runner import FrameRunner
from python_backend_models.engine.talker import SongPlan, TalkerEngine, WindowResult, ring_frames
from python_backend_models.pcm import to_int16
from python_backend_models.prompt import Prompt
from python_backend_models.tiny_checkpoint import component_configs, write_tiny_checkpoint
from python_backend_models.tiny_weights import tensor as tiny_tensor
from tests.acoustic_models import Acoustic
from tests.parity.acoustic_oracles import VllmOmniStage
from tests.parity.conftest import Fidelity
from tests.parity.talker_oracles import (
    AUDIO_END,
    ReferenceSong,
    Talker,
    VllmOmniTalker,
    diffusers_song,
)

SECTION = "Whole songs"
FRAMES, SEED = 300, 42
CAPTION, LYRICS = "Slow blues, brushed drums", "[Verse]\nThe night is long\n[Chorus]\nHold on"
# 31 bits of BLAKE2b of `minimax-ttm-ar:<seed>`; those of 0, 3 and 42 are in the tests of mlx-minimax-music3.
DERIVED_SEEDS = {0: 411363039, 1: 833759482, 3: 122074423, 7: 2092721875, 42: 1153769322}
ORACLES = {
    "vllm-omni": "vllm-omni 0.30.0 over transformers 5.24",
    "sglang-omni": "diffusers 0.42.1 with vllm-omni's draws",
}
PROFILES = tuple(ORACLES)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a component folder in float32, read without the project's loader."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("songs") / "checkpoint")


@pytest.fixture(scope="module")
def talker(root: Path) -> Talker:
    configs = component_configs("tiny")
    return Talker(
        configs["language_model"],
        configs["rvq_depth_decoder"],
        stored(root / "language_model"),
        stored(root / "rvq_depth_decoder"),
    )


@pytest.fixture(scope="module")
def prompt(root: Path) -> Prompt:
    return offline.PromptBuilder(root / "tokenizer" / "tokenizer.json").build(CAPTION, LYRICS)


@pytest.fixture(scope="module")
def references(talker: Talker, prompt: Prompt) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and states of the long song, by profile."""
    rows = prompt.ids, prompt.unconditional_ids
    song = VllmOmniTalker(talker).song(*rows, seed=SEED, max_frames=FRAMES)
    assert song.finish_reason == "length"
    assert song.spans == [(0, 200, False), (100, 300, True)]
    drawn, emitted = diffusers_song(talker, *rows, seed=DERIVED_SEEDS[SEED], max_frames=FRAMES)
    return {"vllm-omni": (song.codes, song.hidden), "sglang-omni": (drawn[1:], emitted)}


@pytest.fixture(scope="module")
def songs(root: Path) -> dict[str, offline.OfflineSong]:
    """The long song as the project makes it without a server, by profile."""
    made = {}
    for profile in PROFILES:
        models = offline.load_models(root, profile=profile, talker_dtype=torch.float32)
        made[profile] = offline.make_song(
            models, CAPTION, LYRICS, seed=SEED, max_frames=FRAMES, profile=profile
        )
    return made


@pytest.fixture(scope="module")
def engine_songs(root: Path, prompt: Prompt) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and states of the long song from the engine that serves; both profiles' in the same steps."""
    runner = FrameRunner(
        checkpoint.load(root, checkpoint.BACKBONE, dtype=torch.float32),
        checkpoint.load(root, checkpoint.DEPTH_DECODER, dtype=torch.float32),
        slots=2,
        pages=200,
        page_tokens=16,
        ring_frames=ring_frames(1),
    )
    engine = TalkerEngine(runner)
    codes: dict[str, Tensor] = {}
    hidden: dict[str, Tensor] = {}
    for key, profile in enumerate(PROFILES):
        engine.admit(
            key,
            SongPlan(
                prompt.ids,
                prompt.unconditional_ids,
                sampling.ar_draw_seed(SEED, profile=profile),
                FRAMES,
                lead_in_frames=sampling.lead_in_frames(profile),
            ),
        )
        engine.request_window(key)
        codes[profile], hidden[profile] = torch.full((FRAMES, 8), -1), torch.full((FRAMES, 8 * 64), torch.nan)
    finished = 0
    while finished < len(PROFILES):
        for key, result in engine.step()[0]:
            assert isinstance(result, WindowResult), result
            profile, window = PROFILES[key], result.window
            codes[profile][window.start_frame : window.end_frame] = result.codes
            hidden[profile][window.start_frame : window.end_frame] = result.hidden
            finished += window.is_last
            if not window.is_last:
                engine.request_window(key)
    return {profile: (codes[profile], hidden[profile]) for profile in PROFILES}


def wrong_frames(got: Tensor, expected: Tensor) -> int:
    assert got.shape == expected.shape
    return int((got != expected).any(dim=1).sum())


@pytest.mark.parametrize("profile", PROFILES)
def test_codes(
    profile: str,
    references: dict[str, tuple[Tensor, Tensor]],
    songs: dict[str, offline.OfflineSong],
    engine_songs: dict[str, tuple[Tensor, Tensor]],
    fidelity: Fidelity,
) -> None:
    expected_codes, expected_hidden = references[profile]
    assert len(expected_codes) == FRAMES
    assert songs[profile].finish_reason == "length"
    codes, hidden = engine_songs[profile]
    fidelity.record(
        section=SECTION,
        quantity=f"codes of {FRAMES} frames, profile {profile}",
        oracle=ORACLES[profile],
        cases=2 * FRAMES,
        largest_error=sum(wrong_frames(got, expected_codes) for got in (songs[profile].codes, codes)),
        tolerance="equal bits",
        note="frames that differ; the plain loop, and the engine with both profiles' songs in each step",
    )
    fidelity.record(
        section=SECTION,
        quantity=f"states of {FRAMES} frames, profile {profile}",
        oracle=ORACLES[profile],
        cases=FRAMES,
        largest_error=(hidden - expected_hidden).abs().max().item(),
        tolerance=1e-5,
        note="float32; the engine",
    )


def test_the_profiles_make_different_songs(references: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Else agreement with one reference would be agreement with the other."""
    (one, _), (other, _) = references.values()
    assert wrong_frames(one, other) > 0.99 * FRAMES
    assert wrong_frames(one[1:], other[:-1]) > 0.99 * FRAMES


def test_the_lead_in_frame_is_all_that_differs_at_equal_draw_seeds(
    talker: Talker, prompt: Prompt, references: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """vllm-omni's talker hands out the frame that diffusers only feeds back."""
    rows = prompt.ids, prompt.unconditional_ids
    song = VllmOmniTalker(talker).song(*rows, seed=DERIVED_SEEDS[SEED], max_frames=41)
    codes, hidden = references["sglang-omni"]
    assert torch.equal(song.codes[1:], codes[:40])
    torch.testing.assert_close(song.hidden[1:], hidden[:40], rtol=0, atol=1e-5)


@pytest.mark.parametrize("profile", PROFILES)
def test_sound(profile: str, root: Path, songs: dict[str, offline.OfflineSong], fidelity: Fidelity) -> None:
    """From the same hidden states, bfloat16 as they travel; noise from the request's seed in both."""
    configs = component_configs("tiny")
    components = (checkpoint.CONDITION_ENCODER, checkpoint.FLOW_TRANSFORMER, checkpoint.VOCODER)
    acoustic = Acoustic(
        *(checkpoint.load(root, component) for component in components),
        configs={component.folder: configs[component.folder] for component in components},
        tensors={component.folder: stored(root / component.folder) for component in components},
    )
    song = songs[profile]
    assert song.hidden.dtype == torch.bfloat16
    expected = VllmOmniStage(acoustic, steps=30).song(song.hidden.float(), seed=SEED)
    assert song.audio.shape == expected.t().shape
    assert expected.abs().max() > 0.3
    fidelity.record(
        section=SECTION,
        quantity=f"sound of {FRAMES} frames, profile {profile}",
        oracle="vllm-omni 0.30.0, its acoustic stage",
        cases=expected.numel(),
        largest_error=(song.audio.t() - expected).abs().max().item(),
        tolerance=1e-5,
        note="float32, 30 steps; from the same hidden states to 32 kHz",
    )


def written_by_libsndfile(samples: np.ndarray) -> np.ndarray:
    """As vllm-omni writes a WAV file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 32000, format="WAV", subtype="PCM_16")
    buffer.seek(0)
    return soundfile.read(buffer, dtype="int16")[0]


def truncated(samples: np.ndarray) -> np.ndarray:
    """sglang-omni's rule, sample by sample."""
    scale = np.float32(32767)
    return np.array(
        [int(np.float32(min(1.0, max(-1.0, x))) * scale) for x in samples.ravel().tolist()]
    ).reshape(samples.shape)


@pytest.mark.parametrize("profile", PROFILES)
def test_pcm(profile: str, songs: dict[str, offline.OfflineSong], fidelity: Fidelity) -> None:
    samples = songs[profile].audio.numpy()
    rule = {"vllm-omni": written_by_libsndfile, "sglang-omni": truncated}[profile]
    fidelity.record(
        section=SECTION,
        quantity=f"16-bit samples, profile {profile}",
        oracle={"vllm-omni": "libsndfile", "sglang-omni": "sglang-omni's rule"}[profile],
        cases=samples.size,
        largest_error=int((to_int16(samples, profile=profile) != rule(samples)).sum()),
        tolerance="equal bits",
        note="samples that differ",
    )


def test_songs_that_stop_by_themselves(
    root: Path, talker: Talker, prompt: Prompt, fidelity: Fidelity
) -> None:
    """The frame at which stop is drawn, and all codes before it."""
    cap, rows = 150, (prompt.ids, prompt.unconditional_ids)
    stop_row = tiny_tensor("language_model/lm_head.weight", (AUDIO_END + 1, 64), seed=0, stop_logit=8.0)[
        AUDIO_END
    ]
    head = talker.backbone_tensors["lm_head.weight"].clone()
    head[AUDIO_END] = stop_row
    stopping = Talker(
        talker.backbone_config,
        talker.depth_config,
        {**talker.backbone_tensors, "lm_head.weight": head},
        talker.depth_tensors,
    )
    reference = VllmOmniTalker(stopping)
    backbone = checkpoint.load(root, checkpoint.BACKBONE, dtype=torch.float32)
    backbone.lm_head.weight[0] = stop_row
    depth = checkpoint.load(root, checkpoint.DEPTH_DECODER, dtype=torch.float32)
    wrong, frames, reasons = 0, [], []
    for profile, seed in (("vllm-omni", 0), ("vllm-omni", 3), ("sglang-omni", 1), ("sglang-omni", 7)):
        left_out = 0 if profile == "vllm-omni" else 1
        expected: ReferenceSong = reference.song(
            *rows,
            seed=seed if profile == "vllm-omni" else DERIVED_SEEDS[seed],
            max_frames=cap + left_out,
        )
        codes, _, reason = offline.write_frames(
            backbone, depth, *rows, seed=seed, max_frames=cap, profile=profile
        )
        assert reason == expected.finish_reason
        wrong += wrong_frames(codes, expected.codes[left_out:])
        frames.append(len(codes))
        reasons.append(reason)
    assert reasons.count("stop") >= 3, (frames, reasons)
    fidelity.record(
        section=SECTION,
        quantity="codes and last frames of songs that stop by themselves",
        oracle=ORACLES["vllm-omni"],
        cases=sum(frames),
        largest_error=wrong,
        tolerance="equal bits",
        note=f"frames that differ; both profiles; songs of {', '.join(map(str, frames))} frames",
    )
