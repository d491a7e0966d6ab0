"""The RVQ depth decoder: walks the residual codebooks c1..c7 of one frame, one position per codebook.

Position 0 is the backbone's hidden state, position 1 the embedding of c0, position k that of code k-1; the
output at position k predicts codebook k and is its share of the frame's conditioning. Eight positions at
most, so the cache is eight slots that live for one frame. Source: vllm-omni 0.30.0; sizes from
`rvq_depth_decoder/config.json`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_backend_models.contract import CODEBOOKS, RESIDUAL_CODES
from python_backend_models.networks.layers import Linear, RMSNorm, embedding, swiglu

_NORM_EPS = 1e-6


class Attention(nn.Module):
    """Causal multi-head attention over the frame's earlier positions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.to_qkv = Linear(hidden, 3 * hidden)
        self.to_out = Linear(hidden, hidden)

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`[rows, tokens, hidden]`; appends this call's keys and values to `cache`."""
        qkv = self.to_qkv(x).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
        cache.append((keys, values))
        if len(cache) > 1:
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        causal = queries.shape[2] > 1  # only the first call holds two positions, and nothing came before it
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
        return self.to_out(attended.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Pre-norm attention and SiLU-gated feed-forward, each with a residual."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.input_layernorm = RMSNorm(hidden, eps=_NORM_EPS, round_before_scale=False)
        self.attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps=_NORM_EPS, round_before_scale=False)
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.attn(self.input_layernorm(x), cache)
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(swiglu(self.gate_proj(normed), self.up_proj(normed)))


class DepthDecoder(nn.Module):
    """Four small layers, seven heads and the residual codes' embedding table.

    Args:
        config: `rvq_depth_decoder/config.json`.

    Raises:
        ValueError: the config asks for something that this network doesn't do.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        check_config(config)
        self.config = dict(config)
        hidden, self.codes = config["hidden_size"], config["audio_vocab_size"]
        residuals = config["num_codebooks"] - 1
        self.audio_embeddings = embedding(residuals * self.codes, hidden)
        self.projection = Linear(hidden, hidden)
        self.pos_embedding = embedding(config["max_position_embeddings"], hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_layers"]))
        self.norm = RMSNorm(hidden, eps=_NORM_EPS, round_before_scale=False)
        self.audio_heads = nn.ModuleList(Linear(hidden, self.codes) for _ in range(residuals))

    def start(self) -> list[list[tuple[Tensor, Tensor]]]:
        """An empty cache for one frame."""
        return [[] for _ in self.layers]

    def forward(
        self, inputs: Tensor, first_position: int, cache: list[list[tuple[Tensor, Tensor]]]
    ) -> Tensor:
        """Advance by the given positions.

        Args:
            inputs: `[rows, tokens, hidden]`, a hidden state or code embeddings.
            first_position: of `inputs[:, 0]` in the frame, 0 ... 7.
            cache: from `start`, extended in place.

        Returns:
            `[rows, hidden]`: the normed output at the last position.
        """
        positions = self.pos_embedding.weight[first_position : first_position + inputs.shape[1]]
        x = self.projection(inputs) + positions
        for layer, slots in zip(self.layers, cache, strict=True):
            x = layer(x, slots)
        return self.norm(x[:, -1])

    def logits(self, output: Tensor, codebook: int) -> Tensor:
        """Logits `[rows, 1024]` of codebook 1 ... 7 from the output at its position."""
        return self.audio_heads[codebook - 1](output)

    def embed(self, codes: Tensor, codebook: int) -> Tensor:
        """Embeddings `[..., hidden]` of codes of codebook 1 ... 7."""
        return self.audio_embeddings(codes + (codebook - 1) * self.codes)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config whose frames aren't those of this model.

    Raises:
        ValueError: naming the key and what is served.
    """
    for key, served in (("num_codebooks", CODEBOOKS), ("audio_vocab_size", RESIDUAL_CODES)):
        if config[key] != served:
            raise ValueError(f"{key} is {config[key]!r}, only {served} is served")
    if config["max_position_embeddings"] < CODEBOOKS:
        raise ValueError(
            f"max_position_embeddings is {config['max_position_embeddings']}, a frame needs {CODEBOOKS}"
        )
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ValueError(
            f"num_attention_heads is {config['num_attention_heads']}, "
            f"which does not divide hidden_size {config['hidden_size']}"
        )


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of `rvq_depth_decoder/` and its shape, by checkpoint name."""
    hidden, inner, codes = config["hidden_size"], config["intermediate_size"], config["audio_vocab_size"]
    residuals = config["num_codebooks"] - 1
    shapes: dict[str, tuple[int, ...]] = {
        "audio_embeddings.weight": (residuals * codes, hidden),
        "projection.weight": (hidden, hidden),
        "pos_embedding.weight": (config["max_position_embeddings"], hidden),
        "norm.weight": (hidden,),
    }
    shapes |= {f"audio_heads.{k}.weight": (codes, hidden) for k in range(residuals)}
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"attn.to_{part}.weight": (hidden, hidden) for part in ("q", "k", "v", "out")},
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    }
    for layer in range(config["num_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def convert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names to this module's: q, k and v of each layer become one matrix."""
    for name in tensors:
        if name.endswith("attn.to_q.weight"):
            prefix = name.removesuffix("q.weight")
            yield f"{prefix}qkv.weight", torch.cat([tensors[f"{prefix}{part}.weight"] for part in "qkv"])
        elif not name.endswith(("attn.to_k.weight", "attn.to_v.weight")):
            yield name, tensors[name]
