"""The acoustic engines on CUDA: graphs against eager, every precision against float32."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from python_backend_models import chunking
from python_backend_models.contract import CARRY_LATENTS, WINDOW_FRAMES
from python_backend_models.engine.acoustic import Carry, FlowEngine, FlowWindow, VocoderEngine
from tests.acoustic_models import make_acoustic

# Decibels above which a precision is worth offering; random weights, two blocks.
SNR_FLOOR_DB = {"tf32": 40, "bfloat16": 25, "float16": 40}


def engines(precision: str, *, graphs: bool) -> tuple[FlowEngine, VocoderEngine]:
    acoustic = make_acoustic(seed=5)
    return (
        FlowEngine(acoustic.encoder, acoustic.transformer, device="cuda", precision=precision, graphs=graphs),
        VocoderEngine(acoustic.vocoder, device="cuda", precision=precision, graphs=graphs),
    )


def windows(flow: FlowEngine) -> list[FlowWindow]:
    width = flow._encoder.layers * flow._encoder.config["condition_hidden_dim"]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, WINDOW_FRAMES, width, generator=generator).bfloat16()
    channels, condition = flow._transformer.latent_channels, flow._encoder.config["out_dim"]
    carry = Carry(
        torch.randn(channels, CARRY_LATENTS, generator=generator),
        torch.randn(condition, CARRY_LATENTS, generator=generator),
    )
    return [FlowWindow(hidden[i], i, i, carry if i else None) for i in range(4)]


def snr_db(exact: torch.Tensor, found: torch.Tensor) -> float:
    noise = (exact - found).double().square().sum().clamp_min(1e-30)
    return (10 * torch.log10(exact.double().square().sum() / noise)).item()


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_replayed_windows_equal_eager_ones(precision: str) -> None:
    (eager, eager_vocoder), (replayed, replayed_vocoder) = (
        engines(precision, graphs=graphs) for graphs in (False, True)
    )
    assert replayed._integrate.recorded > 0
    given = windows(eager)
    # As served: a graph is for the part of a window that the new sound depends on.
    first, later = (window.crop_samples for window in chunking.windows(2 * WINDOW_FRAMES)[:2])
    replays = counted_replays(replayed_vocoder)
    for index, (a, b) in enumerate(zip(eager.solve(given), replayed.solve(given), strict=True)):
        assert snr_db(a.latent, b.latent) > 60
        crops = [later if index else first]
        (wave_a,), (wave_b,) = (
            vocoder.decode([a.latent], crops) for vocoder in (eager_vocoder, replayed_vocoder)
        )
        assert snr_db(wave_a, wave_b) > 60
    assert len(replays) == len(given)


def counted_replays(vocoder: VocoderEngine) -> list[torch.Size]:
    """Fills with the shape of every call that replays a graph."""
    replays: list[torch.Size] = []
    function = vocoder._forward
    for signature, recording in function._recordings.items():

        def replay(shape: torch.Size = signature[0][0], run: Callable[[], object] = recording.replay) -> None:
            replays.append(shape)
            run()

        function._recordings[signature] = dataclasses.replace(recording, replay=replay)
    return replays


@pytest.mark.parametrize("precision", list(SNR_FLOOR_DB))
def test_precisions_stay_close_to_float32(precision: str) -> None:
    exact, exact_vocoder = engines("float32", graphs=False)
    flow, vocoder = engines(precision, graphs=False)
    given = windows(exact)
    latents = [result.latent for result in exact.solve(given)]
    for latent, found in zip(latents, flow.solve(given), strict=True):
        assert snr_db(latent, found.latent) > SNR_FLOOR_DB[precision]
    (exact_wave,), (wave,) = (each.decode([latents[0]], [(0, 0)]) for each in (exact_vocoder, vocoder))
    assert snr_db(exact_wave, wave) > SNR_FLOOR_DB[precision]
