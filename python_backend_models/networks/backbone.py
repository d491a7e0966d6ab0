"""The Qwen3 backbone: one hidden state and one set of c0 logits per row and step.

Knows no cache layout: attention is a callable that stores a layer's keys and values and attends over what is
stored. Source: the Qwen3 architecture as in transformers; sizes from `language_model/config.json`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from python_backend_models.contract import (
    AUDIO_END,
    C0_CODES,
    C0_TOKEN_OFFSET,
    CONTEXT_TOKENS,
)
from python_backend_models.networks.layers import Linear, RMSNorm, embedding, swiglu

DRAWABLE_COLUMNS = 1 + C0_CODES


class Attend(Protocol):
    """Stores this call's keys and values, and attends with its queries over all stored so far, causally.

    Shapes: queries `[rows, tokens, heads, head_dim]`, keys and values `[rows, tokens, kv_heads, head_dim]`;
    returns `[rows, tokens, heads, head_dim]`. The softmax scale is `head_dim ** -0.5`.
    """

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention with per-head norms and rotary positions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.qkv_proj = Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, hidden)
        norm = {"eps": config["rms_norm_eps"], "round_before_scale": True}
        self.q_norm = RMSNorm(self.head_dim, **norm)
        self.k_norm = RMSNorm(self.head_dim, **norm)

    def forward(self, x: Tensor, *, rotary: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        queries, keys, values = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        # Both in one go: a frame on a GPU is thousands of kernels, most of them too small to fill it.
        normed = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=-2)
        queries, keys = rotate(normed, *rotary).split((self.heads, self.kv_heads), dim=-2)
        return self.o_proj(attend(layer, queries, keys, values).flatten(-2))


class MLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        norm = {"eps": config["rms_norm_eps"], "round_before_scale": True}
        self.input_layernorm = RMSNorm(config["hidden_size"], **norm)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], **norm)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *, rotary: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary=rotary, layer=layer, attend=attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding table, layers and final norm: the checkpoint's `model.` subtree."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"], round_before_scale=True)


class Backbone(nn.Module):
    """Qwen3 causal language model over composed frame embeddings.

    Only the 16,385 rows of the head that can be drawn are kept: stop first, then the c0 codes.

    Args:
        config: `language_model/config.json`.

    Raises:
        ValueError: the config asks for something that this network doesn't do, such as tied embeddings.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        check_config(config)
        self.config = dict(config)
        self.model = Decoder(config)
        self.lm_head = Linear(config["hidden_size"], DRAWABLE_COLUMNS)
        phases = rotary_phases(config["head_dim"], rope_theta(config))
        self.register_buffer("rotary_cos", phases.cos(), persistent=False)
        self.register_buffer("rotary_sin", phases.sin(), persistent=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings, `[...]` int64 to `[..., hidden]`; not scaled."""
        return self.model.embed_tokens(token_ids)

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, which both the head and the depth decoder read.

        Args:
            embeddings: `[rows, tokens, hidden]`.
            positions: `[rows, tokens]` int64, below 10,240.
            attend: where keys and values are kept.

        Returns:
            `[rows, tokens, hidden]`.
        """
        # Phases are computed in float32 and rounded last: bfloat16 positions above 256 would collide.
        rotary = tuple(
            table[positions].unsqueeze(-2).to(embeddings.dtype)
            for table in (self.rotary_cos, self.rotary_sin)
        )
        x = embeddings
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rotary=rotary, layer=index, attend=attend)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Drawable logits `[..., 1 + 16384]`: column 0 is stop, column `j` is c0 code `j - 1`."""
        return self.lm_head(hidden)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[..., heads, head_dim]`, pairing channel i with i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rotary_phases(head_dim: int, theta: float) -> Tensor:
    """Phases `[10240, head_dim]` float32; both halves are the same. Always on the CPU, so never on `meta`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    positions = torch.arange(CONTEXT_TOKENS, dtype=torch.float32, device="cpu")
    return torch.outer(positions, 1.0 / theta**exponents).repeat(1, 2)


def rope_theta(config: Mapping[str, Any]) -> float:
    """Rotary base, from either of the two places where config files of Qwen3 keep it."""
    return float((config.get("rope_parameters") or config)["rope_theta"])


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config that names a feature this network leaves out.

    Raises:
        ValueError: naming the key and the one value that is served.
    """
    rope = config.get("rope_parameters") or {}
    served = {
        "model_type": (config.get("model_type", "qwen3"), "qwen3"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "tie_word_embeddings": (bool(config.get("tie_word_embeddings")), False),
        "use_sliding_window": (bool(config.get("use_sliding_window")), False),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
        "rope_scaling": (config.get("rope_scaling"), None),
    }
    for key, (found, wanted) in served.items():
        if found != wanted:
            raise ValueError(f"{key} is {found!r}, only {wanted!r} is served")
    last_token = C0_TOKEN_OFFSET + C0_CODES
    if config["vocab_size"] < last_token:
        raise ValueError(f"vocab_size is {config['vocab_size']}, audio codes need at least {last_token}")


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of `language_model/` and its shape, by checkpoint name."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def convert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names to this module's: q, k and v become one matrix, the head keeps its drawable rows."""
    for name in tensors:
        if name == "lm_head.weight":
            head = tensors[name]
            yield (
                name,
                torch.cat(
                    (head[AUDIO_END : AUDIO_END + 1], head[C0_TOKEN_OFFSET : C0_TOKEN_OFFSET + C0_CODES])
                ),
            )
        elif name.endswith("self_attn.q_proj.weight"):
            prefix = name.removesuffix("q_proj.weight")
            parts = [tensors[f"{prefix}{part}_proj.weight"] for part in "qkv"]
            yield f"{prefix}qkv_proj.weight", torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            yield name, tensors[name]
