"""The flow transformer: velocity of a window's noisy latents, given the condition and the flow time.

Tensor names are the checkpoint's (`transformer/`), except that each block's q, k and v are one matrix. A
solve asks for the velocity 30 times with the same condition, so what doesn't change is computed once: the
condition's share of the input projection (`condition_tokens`), the time tokens and the rotary tables. The
input and output projections, each two linear maps in a row, are folded into one (`fold`).
Source: vllm-omni 0.30.0 and diffusers 0.42.1, which agree bit for bit.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROTARY_BASE = 10_000.0
_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Folded:
    """Both ends of the network as one matrix each, float32, right-hand factors of `tokens @ matrix`."""

    latent_in: Tensor  # [latent channels, width]
    latent_out: Tensor  # [width, latent channels]


class Attention(nn.Module):
    """Bidirectional attention; the first `rotary_dim` channels of each head's q and k are rotated."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width, bias=False)])

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """`[rows, tokens, width]` to the same shape."""
        qkv = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if qkv.device.type == "cpu":
            qkv = qkv.contiguous()  # a fifth off the attention's time there; GPU kernels take strides as well
        _rotate(qkv[:2], *rotary)
        q, k, v = qkv
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.to_out[0](attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Pre-norm attention and gated feed-forward, each with a residual.

    The four matrices may be in lower precision; norms and the residual stream stay float32.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        heads, inner = config["num_attention_heads"], config["ff_inner_dim"]
        width = heads * config["attention_head_dim"]
        self.norm1 = nn.LayerNorm(width, eps=_NORM_EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=_NORM_EPS)
        self.ff_in = nn.Linear(width, 2 * inner)
        self.ff_out = nn.Linear(inner, width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Adds to `x` `[rows, tokens, width]` in place and returns it."""
        dtype = self.ff_in.weight.dtype
        x.add_(self.attn(self.norm1(x).to(dtype), rotary))
        value, gate = self.ff_in(self.norm2(x).to(dtype)).chunk(2, dim=-1)
        return x.add_(self.ff_out(F.silu(gate).mul_(value)))


class TimeFeatures(nn.Module):
    """Cosines and sines of the flow time at trained frequencies."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features // 2, 1))

    def forward(self, times: Tensor) -> Tensor:
        """`[times]` to `[times, features]`."""
        phase = (2.0 * math.pi * times)[:, None] @ self.weight.t()
        return torch.cat((phase.cos(), phase.sin()), dim=-1)


class TimeEmbedding(nn.Module):
    """Two linear layers with a SiLU between."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(features, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(features)))


class FlowTransformer(nn.Module):
    """The velocity field.

    Args:
        config: `transformer/config.json`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        width = config["num_attention_heads"] * config["attention_head_dim"]
        self.latent_channels, self.condition_channels = config["in_channels"], config["condition_dim"]
        # The second block of latent channels is a place for something this checkpoint never fills: zeros.
        channels = 2 * self.latent_channels + self.condition_channels
        self.preprocess_conv = nn.Conv1d(channels, channels, 1, bias=False)
        self.proj_in = nn.Linear(channels, width, bias=False)
        self.time_proj = TimeFeatures(config["fourier_embedding_dim"])
        self.time_embed = TimeEmbedding(config["fourier_embedding_dim"], width)
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config["num_layers"]))
        self.proj_out = nn.Linear(width, self.latent_channels, bias=False)
        self.postprocess_conv = nn.Conv1d(self.latent_channels, self.latent_channels, 1, bias=False)
        self.requires_grad_(False)

    def fold(self) -> Folded:
        """The matrices of both ends, multiplied in float64."""
        before = _with_residual(self.preprocess_conv)[:, : self.latent_channels]
        latent_in = self.proj_in.weight.double() @ before
        latent_out = _with_residual(self.postprocess_conv) @ self.proj_out.weight.double()
        return Folded(latent_in.t().float().contiguous(), latent_out.t().float().contiguous())

    def condition_tokens(self, condition: Tensor) -> Tensor:
        """The condition's share of the input tokens.

        `[batch, condition, latents]` to `[batch, latents, width]`. The unconditional row's condition is
        zeros, and so is its share: neither map has a bias.
        """
        u = F.pad(condition.transpose(1, 2), (2 * self.latent_channels, 0))
        return self.proj_in(F.linear(u, self.preprocess_conv.weight[..., 0]).add_(u))

    def time_tokens(self, times: Tensor) -> Tensor:
        """Flow times `[times]`, 0 (noise) to 1 (data), to tokens `[times, width]`."""
        return self.time_embed(self.time_proj(times))

    def rotary(self, latents: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[1 + latents, rotary_dim / 2]`, float32, on the parameters' device."""
        exponents = torch.arange(0, self.config["rotary_dim"], 2, dtype=torch.float32)
        frequencies = 1.0 / (_ROTARY_BASE ** (exponents / self.config["rotary_dim"]))
        angles = torch.outer(torch.arange(1 + latents, dtype=torch.float32), frequencies)
        device = self.proj_in.weight.device
        return angles.cos().to(device), angles.sin().to(device)

    def velocities(
        self,
        latents: Tensor,
        time_token: Tensor,
        condition_tokens: Tensor,
        *,
        folded: Folded,
        rotary: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Velocities with and without the condition, evaluated in one batch.

        Args:
            latents: `[batch, latents, channels]`, time-major, unlike everywhere else: a token is a row.
            time_token: `[width]`; the first token of every row.
            condition_tokens: from the method of that name.
            folded, rotary: from `fold` and `rotary`, whose length must be 1 + latents.

        Returns:
            Two tensors `[batch, latents, channels]`.
        """
        batch, length, _ = latents.shape
        own = latents @ folded.latent_in
        tokens = own.new_empty(2 * batch, 1 + length, own.shape[-1])
        tokens[:, 0] = time_token
        tokens[:batch, 1:] = own + condition_tokens
        tokens[batch:, 1:] = own
        for block in self.transformer_blocks:
            tokens = block(tokens, rotary)
        with_condition, without = (tokens[:, 1:] @ folded.latent_out).chunk(2)
        return with_condition, without

    def forward(self, latents: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """The velocity by itself: `[batch, channels, latents]`, `[batch]`, `[batch, condition, latents]`.

        For checks and tools; a solve calls `velocities`.
        """
        rotary, folded = self.rotary(latents.shape[2]), self.fold()
        tokens = self.time_tokens(times)
        parts = [
            self.velocities(row[None].transpose(1, 2), token, share, folded=folded, rotary=rotary)[0]
            for row, token, share in zip(
                latents, tokens, self.condition_tokens(condition)[:, None], strict=True
            )
        ]
        return torch.cat(parts).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the leading channels of `[..., tokens, head]` in place, channel i together with i + half."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(turned)


def _with_residual(convolution: nn.Conv1d) -> Tensor:
    """Matrix of a 1x1 convolution plus identity, float64."""
    matrix = convolution.weight[..., 0].double()
    return matrix + torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of `transformer/` and its shape, by checkpoint name."""
    with torch.device("meta"):
        network = FlowTransformer(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in network.state_dict().items():
        if name.endswith("to_qkv.weight"):
            rows, columns = tensor.shape
            prefix = name.removesuffix("qkv.weight")
            shapes |= {f"{prefix}{part}.weight": (rows // 3, columns) for part in "qkv"}
        else:
            shapes[name] = tuple(tensor.shape)
    return shapes


def convert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names to this module's: q, k and v of each block become one matrix."""
    for name in tensors:
        if name.endswith("attn.to_q.weight"):
            prefix = name.removesuffix("q.weight")
            yield f"{prefix}qkv.weight", torch.cat([tensors[f"{prefix}{part}.weight"] for part in "qkv"])
        elif not name.endswith(("attn.to_k.weight", "attn.to_v.weight")):
            yield name, tensors[name]
