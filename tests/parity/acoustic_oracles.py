"""The references' acoustic networks and stages, built from the same checkpoint tensors as the project's."""

import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.acoustic_models import RATES, Acoustic
from tests.parity import oracles


def random_sizes(*, seed: int) -> dict[str, dict[str, Any]]:
    """Component configs of one random small size."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    head, condition, latent = one_of(8, 12, 16), one_of(24, 40, 56), one_of(4, 8, 12)
    return {
        "condition_encoder": {
            "condition_hidden_dim": one_of(12, 20, 32),
            "num_condition_layers": 8,
            "out_dim": condition,
            **RATES,
        },
        "transformer": {
            "in_channels": latent,
            "condition_dim": condition,
            "num_layers": one_of(2, 3, 4),
            "num_attention_heads": one_of(2, 3, 4),
            "attention_head_dim": head,
            "ff_inner_dim": one_of(48, 80, 96),
            "rotary_dim": head // 2,
            "fourier_embedding_dim": one_of(16, 32),
        },
        "vocoder": {
            "latent_channels": latent,
            "decoder_input_dim": one_of(12, 24),
            "decoder_hidden_dim": one_of(32, 48, 64),
            "upsampling_ratios": [8, 8, 4, 2],
            "sampling_rate": 44100,
        },
    }


def vllm_omni_flow(acoustic: Acoustic) -> nn.Module:
    """vllm-omni's condition encoder and solver; what its size constants say is set to the configs first."""
    encoder, transformer = acoustic.configs["condition_encoder"], acoustic.configs["transformer"]
    hidden, layers = encoder["condition_hidden_dim"], encoder["num_condition_layers"]
    dit = oracles.vllm_omni(
        "dit",
        _DIM=transformer["num_attention_heads"] * transformer["attention_head_dim"],
        _NUM_LAYERS=transformer["num_layers"],
        _HEAD_DIM=transformer["attention_head_dim"],
        _FF_INNER_DIM=transformer["ff_inner_dim"],
        _FOURIER_DIM=transformer["fourier_embedding_dim"],
        _ROTARY_DIM=transformer["rotary_dim"],
        _CONDITION_DIM=transformer["condition_dim"],
        _TRANSFORMER_IN_DIM=2 * transformer["in_channels"] + transformer["condition_dim"],
        DIT_LATENT_CHANNELS=transformer["in_channels"],
        BACKBONE_HIDDEN_SIZE=hidden,
        AR_HIDDEN_SIZE=layers * hidden,
        NUM_CODEBOOKS=layers,
    )
    flow = dit.MiniMaxMusic3FlowMatchingDiT()
    flow.condition_encoder.load_state_dict(dict(acoustic.tensors["condition_encoder"]), strict=True)
    flow.transformer.load_state_dict(
        dit.remap_transformer_state(dict(acoustic.tensors["transformer"])), strict=True
    )
    return flow.eval().requires_grad_(False)


def vllm_omni_vocoder(acoustic: Acoustic, *, folded: bool) -> nn.Module:
    """vllm-omni's vocoder, its weight norms as stored or folded by its own function."""
    config = acoustic.configs["vocoder"]
    dav = oracles.vllm_omni(
        "dav",
        _DECODER_INPUT_DIM=config["decoder_input_dim"],
        _DECODER_HIDDEN_DIM=config["decoder_hidden_dim"],
        _UPSAMPLING_RATIOS=tuple(config["upsampling_ratios"]),
        _STREAM_CHANNELS=config["latent_channels"] // 2,
        DIT_LATENT_CHANNELS=config["latent_channels"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's older weight_norm, which the reference uses
        vocoder = dav.MiniMaxMusic3Vocoder()
    vocoder.load_state_dict(dict(acoustic.tensors["vocoder"]), strict=True)
    if folded:
        assert dav.remove_weight_norm(vocoder) == 30
    return vocoder.eval().requires_grad_(False)


def diffusers_network(acoustic: Acoustic, component: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return oracles.diffusers_network(component, acoustic.configs[component], acoustic.tensors[component])


class VllmOmniStage:
    """vllm-omni's whole acoustic stage: spans of hidden states in, 32 kHz sound out."""

    def __init__(self, acoustic: Acoustic, *, steps: int) -> None:
        module = oracles.vllm_omni("acoustic")
        self.derive_seed = module._derive_seed
        stage = module.MiniMaxMusic3AcousticForConditionalGeneration.__new__(
            module.MiniMaxMusic3AcousticForConditionalGeneration
        )
        nn.Module.__init__(stage)
        stage.vllm_config = types.SimpleNamespace(device_config=types.SimpleNamespace(device="cpu"))
        stage.dit = vllm_omni_flow(acoustic)
        stage.vocoder = vllm_omni_vocoder(acoustic, folded=True)
        stage.dit_steps, stage.dit_cfg_scale = steps, 1.7
        stage._states = {}
        self._stage = stage
        self._chunk_windows = oracles.vllm_omni("chunking").chunk_windows

    def spans(self, frames: int) -> Iterator[tuple[int, int, bool]]:
        """First frame, end frame and finality of each hand-over; the last holds all that is left."""
        windows = self._chunk_windows(frames)
        early = [window for window in windows if frames > window.start + 200]
        for window in early:
            yield window.start, window.end, False
        yield windows[len(early)].start, frames, True

    def song(self, hidden: Tensor, *, seed: int) -> Tensor:
        """Sound `[2, samples]` of a song's hidden states `[frames, layers * hidden]`."""
        with oracles.torchaudio_importable():
            pieces = [
                self._stage._decode_span(
                    "song",
                    hidden[start:end],
                    {"num_processed_tokens": start, "last_chunk": final, "audio_seed": seed},
                )
                for start, end, final in self.spans(len(hidden))
            ]
        self._stage.on_requests_finished(["song"])
        return torch.cat(pieces, dim=-1)


class DiffusersStage:
    """diffusers' condition encoder, solver and vocoder, as the blocks of its modular pipeline."""

    def __init__(self, acoustic: Acoustic) -> None:
        package = "diffusers.modular_pipelines"
        home = f"{package}.minimax_music3"
        self._denoise = oracles.library(f"{home}.denoise")
        self._state = oracles.library(f"{package}.modular_pipeline").PipelineState
        self._components = types.SimpleNamespace(
            _execution_device=torch.device("cpu"),
            condition_encoder=diffusers_network(acoustic, "condition_encoder"),
            transformer=diffusers_network(acoustic, "transformer"),
            vocoder=diffusers_network(acoustic, "vocoder"),
            scheduler=oracles.library("diffusers.schedulers").FlowMatchEulerDiscreteScheduler(
                num_train_timesteps=1, shift=1.0, invert_sigmas=True
            ),
            guider=oracles.library("diffusers.guiders").ClassifierFreeGuidance(guidance_scale=1.7),
            num_channels_latents=acoustic.configs["transformer"]["in_channels"],
            latent_hop_length=512,
        )
        self._prepare = oracles.library(f"{home}.before_denoise").MiniMaxMusic3PrepareChunksStep()
        self._solve = self._denoise.MiniMaxMusic3ChunkDenoiseStep()
        self._solve.set_progress_bar_config(disable=True)
        self._decode = oracles.library(f"{home}.decoders").MiniMaxMusic3VocoderDecodeStep()

    @property
    def vocoder(self) -> nn.Module:
        return self._components.vocoder

    def latents(self, hidden: Tensor, *, noises: Sequence[Tensor], steps: int) -> list[Tensor]:
        """The windows' latents `[1, channels, latents]` of a song's hidden states, from the given noise."""
        return self._solved(hidden, noises, steps).get("latent_chunks")

    def song(self, hidden: Tensor, *, noises: Sequence[Tensor], steps: int) -> tuple[list[Tensor], Tensor]:
        """The windows' latents, and the sound `[1, 2, samples]` at 44.1 kHz."""
        _, state = self._decode(self._components, self._solved(hidden, noises, steps))
        return state.get("latent_chunks"), state.get("audios")

    def _solved(self, hidden: Tensor, noises: Sequence[Tensor], steps: int) -> Any:
        state = self._state()
        state.set("frame_hiddens", hidden[None])
        state.set("num_inference_steps", steps)
        state.set("output_type", "pt")
        draws = [noise[None].clone() for noise in noises]
        with mock.patch.object(self._denoise, "randn_tensor", side_effect=draws):
            for step in (self._prepare, self._solve):
                _, state = step(self._components, state)
        return state
