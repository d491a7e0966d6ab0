"""Each fault happens once, where and when it was asked for, in engines like those that are served."""

from collections.abc import Sequence

import pytest
import torch

from python_backend_models.chunking import window_latents
from python_backend_models.engine import faults
from python_backend_models.engine.acoustic import FlowEngine, FlowWindow, NonFiniteError, VocoderEngine
from python_backend_models.engine.faults import UnknownFaultError
from python_backend_models.engine.talker import NonFiniteError as BrokenSongError
from python_backend_models.engine.talker import SongError
from tests.acoustic_models import make_acoustic
from tests.unit.test_talker import collect, make_engine, plan


def flow() -> FlowEngine:
    made = make_acoustic(seed=3)
    return FlowEngine(made.encoder, made.transformer, device="cpu", steps=2)


def vocoder() -> VocoderEngine:
    return VocoderEngine(make_acoustic(seed=3).vocoder, device="cpu")


def solve(engine: FlowEngine, count: int = 1) -> Sequence[object]:
    width = engine._encoder.layers * engine._encoder.config["condition_hidden_dim"]
    return engine.solve([FlowWindow(torch.zeros(4, width), seed, 0, None) for seed in range(count)])


def decode(engine: VocoderEngine) -> object:
    channels = engine._vocoder.config["latent_channels"]
    return engine.decode([torch.zeros(channels, window_latents(4))], [(0, 0)])[0]


@pytest.mark.parametrize("name", ["nan_backbone_logits", "inf_depth_logits"])
def test_a_spoiled_logit_ends_one_song(name: str) -> None:
    engine = make_engine()
    # Both songs are in every step; it calls for the backbone's logits once and for depth logits seven times.
    faults.arm(engine, f"{name}@{10 * (7 if 'depth' in name else 1)}")
    for key in (1, 2):
        engine.admit(key, plan(key, max_frames=30))
    songs = collect(engine, [1, 2])
    broken = [song for song in songs.values() if isinstance(song, BrokenSongError)]
    assert len(broken) == 1
    assert "not finite" in str(broken[0])


@pytest.mark.parametrize(("name", "words"), [("oom_step", "no memory"), ("oom_prefill", None)])
def test_a_failed_allocation_of_the_talker(name: str, words: str | None) -> None:
    engine = make_engine()
    faults.arm(engine, f"{name}@1")
    engine.admit(1, plan(1, max_frames=5))
    if words:  # the step itself: the engine's thread has to deal with it
        with pytest.raises(torch.OutOfMemoryError, match=words):
            collect(engine, [1])
    else:
        assert isinstance(collect(engine, [1])[1], SongError)
        engine.admit(2, plan(2, max_frames=5))
        assert isinstance(collect(engine, [2])[2], list)


def test_a_spoiled_latent_and_a_failed_solve() -> None:
    engine = flow()
    faults.arm(engine, "nan_latents@2")
    assert not isinstance(solve(engine)[0], Exception)
    assert isinstance(solve(engine)[0], NonFiniteError)
    assert not isinstance(solve(engine)[0], Exception)
    faults.arm(engine, "oom_solve@1")
    with pytest.raises(torch.OutOfMemoryError):
        solve(engine)
    assert not isinstance(solve(engine)[0], Exception)


def test_a_spoiled_sample_and_a_failed_decode() -> None:
    engine = vocoder()
    faults.arm(engine, "inf_waveform@1")
    assert isinstance(decode(engine), NonFiniteError)
    assert not isinstance(decode(engine), Exception)
    faults.arm(engine, "oom_decode@1")
    with pytest.raises(torch.OutOfMemoryError):
        decode(engine)


@pytest.mark.parametrize(
    "fault", ["nan_latents", "nan_latents@", "nan_latents@0", "nan_latents@1-", "oom_solve@1,oom_step@1"]
)
def test_a_fault_the_engine_does_not_have(fault: str) -> None:
    with pytest.raises(UnknownFaultError, match="nan_latents, oom_solve"):
        faults.arm(flow(), fault)


def test_several_faults_and_several_calls() -> None:
    engine = flow()
    faults.arm(engine, "nan_latents@4,oom_solve@2-3")
    results = []
    for _ in range(5):
        try:
            results.append(type(solve(engine)[0]).__name__)
        except torch.OutOfMemoryError:
            results.append("no memory")
    # The inner fault doesn't see the calls that the outer one broke.
    assert results == ["FlowResult", "no memory", "no memory", "FlowResult", "FlowResult"]
    assert type(solve(engine)[0]).__name__ == "NonFiniteError"


def test_no_fault_changes_nothing() -> None:
    engine = flow()
    integrate = engine._integrate
    faults.arm(engine, "")
    assert engine._integrate is integrate
