"""Small random networks for tests that need no checkpoint on disk."""

from typing import Any

import torch
from torch import nn

from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder

BACKBONE_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "vocab_size": 168_100,
    "max_position_embeddings": 10240,
    "tie_word_embeddings": False,
}
DEPTH_CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "audio_vocab_size": 1024,
    "num_codebooks": 8,
    "max_position_embeddings": 16,
}


def randomize(module: nn.Module, *, seed: int, gain: float = 1.5) -> None:
    """Fill every parameter: matrices with variance gain^2 / fan-in, vectors around one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scaled = noise * (gain / parameter.shape[-1] ** 0.5) if parameter.dim() > 1 else 1 + 0.1 * noise
        parameter.data = scaled.to(parameter.dtype)


def small_backbone(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Backbone:
    """A random backbone with the real vocabulary span; stop is made improbable."""
    backbone = Backbone(BACKBONE_CONFIG | overrides)
    randomize(backbone, seed=seed)
    backbone.lm_head.weight.data[0] = 0
    return backbone.to(dtype).eval()


def small_depth_decoder(
    *, seed: int = 1, dtype: torch.dtype = torch.float32, **overrides: Any
) -> DepthDecoder:
    """A random depth decoder."""
    decoder = DepthDecoder(DEPTH_CONFIG | overrides)
    randomize(decoder, seed=seed)
    return decoder.to(dtype).eval()
