"""The solve and whole songs against vllm-omni's stage and diffusers' pipeline, fed with equal noise."""

import pytest
import torch
from torch import Tensor

from python_backend_models import chunking
from python_backend_models.engine.acoustic import (
    FlowEngine,
    FlowResult,
    FlowWindow,
    VocoderEngine,
    noise_seed,
)
from python_backend_models.resample import StreamingResampler
from tests.acoustic_models import Acoustic, make_acoustic
from tests.parity.acoustic_oracles import DiffusersStage, VllmOmniStage, random_sizes, vllm_omni_flow
from tests.parity.conftest import Fidelity

SIZES = (4, 5, 6)
SONG_STEPS = 4


def sized(seed: int) -> Acoustic:
    return make_acoustic(random_sizes(seed=seed), seed=100 * seed)


def song(acoustic: Acoustic, frames: int, *, seed: int) -> Tensor:
    width = 8 * acoustic.configs["condition_encoder"]["condition_hidden_dim"]
    return torch.randn(frames, width, generator=torch.Generator().manual_seed(seed))


def window_noise(acoustic: Acoustic, window: chunking.Window, *, seed: int) -> Tensor:
    """A window's noise as the reference draws it; its seed is checked against the reference's elsewhere."""
    generator = torch.Generator().manual_seed(noise_seed(seed, window.index))
    return torch.randn(acoustic.configs["transformer"]["in_channels"], window.latents, generator=generator)


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return (got - expected).abs().max().item()


def rendered(acoustic: Acoustic, hidden: Tensor, *, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Latents and 44.1 kHz sound of each window, one window after the other."""
    flow = FlowEngine(acoustic.encoder, acoustic.transformer, device="cpu", steps=SONG_STEPS)
    vocoder = VocoderEngine(acoustic.vocoder, device="cpu")
    latents, sounds, carry = [], [], None
    for window in chunking.windows(len(hidden)):
        span = hidden[window.start_frame : window.end_frame]
        (solved,) = flow.solve([FlowWindow(span, seed, window.index, carry)])
        assert isinstance(solved, FlowResult), solved
        (sound,) = vocoder.decode([solved.latent], [window.crop_samples])
        assert isinstance(sound, Tensor), sound
        latents.append(solved.latent)
        sounds.append(sound)
        carry = solved.carry
    return latents, sounds


def test_noise_seeds(fidelity: Fidelity) -> None:
    derive = VllmOmniStage(sized(4), steps=1).derive_seed
    seeds = [0, 1, 7, 42, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    seeds += torch.randint(2**62, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    cases = [(seed, window) for seed in seeds for window in (0, 1, 9, 10, 88)]
    fidelity.record(
        quantity="noise seeds of windows",
        oracle="vllm-omni 0.30.0",
        cases=len(cases),
        largest_error=sum(noise_seed(*case) != derive(case[0], "dit", case[1]) for case in cases),
        tolerance="equal bits",
        note="error: how many differ",
    )


def test_solve(fidelity: Fidelity) -> None:
    errors: dict[bool, list[float]] = {False: [], True: []}
    for size in SIZES:
        acoustic = sized(size)
        reference = vllm_omni_flow(acoustic)
        engine = FlowEngine(acoustic.encoder, acoustic.transformer, device="cpu")
        carry = None
        for index, frames in enumerate((200, 200, 137)):
            hidden = song(acoustic, frames, seed=10 * size + index)
            (got,) = engine.solve([FlowWindow(hidden, size, index, carry)])
            assert isinstance(got, FlowResult)
            aligned = reference.aligned_condition(hidden[None])
            latent = reference(
                aligned,
                generator=torch.Generator().manual_seed(noise_seed(size, index)),
                initial_latent=None if carry is None else carry.latent[None],
                initial_condition=None if carry is None else carry.condition[None],
            )
            errors[carry is not None].append(error(got.latent, latent[0]))
            if frames == 200:
                assert torch.equal(got.carry.condition, aligned[0, :, 345:517])
                carry = got.carry
    for with_carry, found in errors.items():
        fidelity.record(
            quantity=f"solve of a window in 30 steps, {'with' if with_carry else 'without'} carry",
            oracle="vllm-omni 0.30.0",
            cases=len(found),
            largest_error=max(found),
            tolerance=1e-5,
            note="float32; latents",
        )


def test_solve_of_diffusers_pipeline(fidelity: Fidelity) -> None:
    latent_errors, sound_errors = [], []
    for size, frames in zip(SIZES, (90, 301, 250), strict=True):
        acoustic = sized(size)
        hidden = song(acoustic, frames, seed=size)
        noises = [window_noise(acoustic, window, seed=size) for window in chunking.windows(frames)]
        theirs, theirs_sound = DiffusersStage(acoustic).song(hidden, noises=noises, steps=SONG_STEPS)
        ours, ours_sound = rendered(acoustic, hidden, seed=size)
        latent_errors += [error(got, expected[0]) for got, expected in zip(ours, theirs, strict=True)]
        sound_errors.append(error(torch.cat(ours_sound, dim=1), theirs_sound[0]))
    for quantity, found in (
        ("latents of a song's windows", latent_errors),
        ("sound of a song at 44.1 kHz", sound_errors),
    ):
        fidelity.record(
            quantity=quantity,
            oracle="diffusers 0.42.1, its modular pipeline",
            cases=len(found),
            largest_error=max(found),
            tolerance=1e-5,
            note=f"float32; {SONG_STEPS} steps; songs of 90, 301 and 250 frames; equal noise",
        )


def test_song_of_the_whole_stage(fidelity: Fidelity) -> None:
    # The reference hands a held-back window over together with the last one, so it pushes both at once.
    # None of these lengths is one of the few where that changes the resampler's last sample.
    errors = []
    for size, frames in zip(SIZES, (200, 450, 313), strict=True):
        acoustic = sized(size)
        hidden = song(acoustic, frames, seed=size)
        expected = VllmOmniStage(acoustic, steps=SONG_STEPS).song(hidden, seed=size)
        resampler, windows = StreamingResampler(), chunking.windows(frames)
        _, sounds = rendered(acoustic, hidden, seed=size)
        chunks = [
            resampler.push(sound, flush=window.is_last) for window, sound in zip(windows, sounds, strict=True)
        ]
        got = torch.cat(chunks, dim=1)
        assert got.shape[1] == chunking.song_samples_32k(frames)
        errors.append(error(got, expected))
    fidelity.record(
        quantity="sound of a song at 32 kHz",
        oracle="vllm-omni 0.30.0, its acoustic stage",
        cases=len(errors),
        largest_error=max(errors),
        tolerance=1e-5,
        note=f"float32; {SONG_STEPS} steps; songs of 200, 450 and 313 frames; hidden states in, sound out",
    )


@pytest.mark.parametrize("profile", ["solo", "batched"])
def test_songs_solved_together_equal_the_reference_s_serial_ones(profile: str, fidelity: Fidelity) -> None:
    acoustic = sized(4)
    reference = vllm_omni_flow(acoustic)
    engine = FlowEngine(
        acoustic.encoder,
        acoustic.transformer,
        device="cpu",
        steps=SONG_STEPS,
        batch_sizes=(1,) if profile == "solo" else (8, 4, 2, 1),
    )
    windows = [FlowWindow(song(acoustic, 200, seed=seed), seed, 0, None) for seed in range(7)]
    errors = []
    for given, got in zip(windows, engine.solve(windows), strict=True):
        assert isinstance(got, FlowResult)
        expected = reference(
            reference.aligned_condition(given.hidden[None]),
            generator=torch.Generator().manual_seed(noise_seed(given.seed, 0)),
            num_steps=SONG_STEPS,
        )
        errors.append(error(got.latent, expected[0]))
    fidelity.record(
        quantity="windows of seven songs solved together",
        oracle="vllm-omni 0.30.0, one by one",
        cases=len(errors),
        largest_error=max(errors),
        tolerance=1e-5,
        note=f"float32; {profile}",
    )
