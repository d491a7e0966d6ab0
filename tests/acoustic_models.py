"""Small acoustic networks for tests, built from checkpoint tensors the way a loader builds them."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from python_backend_models.networks import condition_encoder, flow_transformer, vocoder

RATES = {
    "input_sampling_rate": 24000,
    "input_hop_length": 960,
    "output_sampling_rate": 44100,
    "output_hop_length": 512,
}
# The reduced sizes that the golden vectors were computed with.
MICRO: dict[str, dict[str, Any]] = {
    "condition_encoder": {"condition_hidden_dim": 4, "num_condition_layers": 8, "out_dim": 6, **RATES},
    "transformer": {
        "in_channels": 4,
        "condition_dim": 6,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "ff_inner_dim": 12,
        "rotary_dim": 4,
        "fourier_embedding_dim": 8,
    },
    "vocoder": {
        "latent_channels": 4,
        "decoder_input_dim": 6,
        "decoder_hidden_dim": 16,
        "upsampling_ratios": [8, 8, 4, 2],
        "sampling_rate": 44100,
    },
}
_MODULES: dict[str, tuple[ModuleType, type[nn.Module]]] = {
    "condition_encoder": (condition_encoder, condition_encoder.ConditionEncoder),
    "transformer": (flow_transformer, flow_transformer.FlowTransformer),
    "vocoder": (vocoder, vocoder.Vocoder),
}
_AROUND_ONE = ("alpha", "norm1.weight", "norm2.weight", "layer_scale")


@dataclass(frozen=True)
class Acoustic:
    """The three networks and what they were built from."""

    encoder: condition_encoder.ConditionEncoder
    transformer: flow_transformer.FlowTransformer
    vocoder: vocoder.Vocoder
    configs: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, Tensor]]


def build(component: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The component's network with these checkpoint tensors, loaded strictly."""
    module, network_class = _MODULES[component]
    with torch.device("meta"):
        network = network_class(config)
    network.load_state_dict(dict(module.convert(tensors)), strict=True, assign=True)
    return network.eval().requires_grad_(False)


def shapes(component: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return _MODULES[component][0].checkpoint_shapes(config)


def wave_tensors(component: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The golden vectors' weights: a sine over the flat index, its phase from the tensor's name."""
    made = {}
    for name, shape in shapes(component, config).items():
        index = torch.arange(math.prod(shape), dtype=torch.float64)
        wave = torch.sin(0.7 * index + sum(name.encode()) % 97)
        if name.endswith(_AROUND_ONE):
            wave = 1 + 0.3 * wave
        elif name.endswith("weight_g"):
            wave = 0.6 + 0.1 * wave
        else:
            wave = 0.3 * wave
        made[name] = wave.reshape(shape).float()
    return made


def random_tensors(component: str, config: Mapping[str, Any], *, seed: int) -> dict[str, Tensor]:
    """Random weights that keep activations near one, and velocities too, as those of a trained flow are."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(component, config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(_AROUND_ONE):
            noise = 1 + 0.3 * noise.tanh()
        elif name.endswith("weight_g"):
            noise = 0.6 + 0.1 * noise.tanh()
        elif noise.ndim > 1:
            noise = noise / math.sqrt(math.prod(shape[1:]))
            noise *= 0.25 if name == "proj_out.weight" else 1.0  # the residual stream is unnormed there
        else:
            noise = 0.2 * noise
        made[name] = noise
    return made


def make_acoustic(configs: Mapping[str, Mapping[str, Any]] = MICRO, *, seed: int | None = None) -> Acoustic:
    """The three networks: with the golden vectors' weights, or with random ones from `seed`."""
    tensors = {
        name: wave_tensors(name, config) if seed is None else random_tensors(name, config, seed=seed + place)
        for place, (name, config) in enumerate(configs.items())
    }
    encoder, transformer, decoder = (build(name, configs[name], tensors[name]) for name in _MODULES)
    return Acoustic(encoder, transformer, decoder, configs, tensors)


def official_digest(mapped: Mapping[str, tuple[int, ...]]) -> str:
    """Digest as the official schema was pinned: sha256 over sorted `name|shape|F32` lines."""
    lines = [f"{name}|{tuple(shape)}|F32" for name, shape in sorted(mapped.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def channels_last(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes as appautomaton/mlx-minimax-music3 maps them, which is what it pinned.

    Weight norm is folded into `weight`; convolutions get their channels last, transposed ones too.
    """
    mapped = {}
    for name, shape in stored.items():
        if name.endswith("weight_g"):
            continue
        if len(shape) == 3 and not name.endswith("alpha"):
            out, inner, kernel = (1, 2, 0) if "conv_t" in name else (0, 2, 1)
            shape = (shape[out], shape[inner], shape[kernel])
        mapped[name.removesuffix("_v")] = shape
    return mapped
