"""The vocoder: latents to stereo sound at 44.1 kHz, 512 samples per latent.

A DAC-style decoder. The two channels are two independent streams of half the latent channels each. Tensor
names are the checkpoint's (`vocoder/`), except that each convolution's weight norm is folded into one weight.
Source: vllm-omni 0.30.0 and diffusers 0.42.1.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from python_backend_models.contract import CHANNELS

_KERNEL = 7
_DILATIONS = (1, 3, 9)
_ALPHA_FLOOR = 1e-9


class Snake(nn.Module):
    """`x + sin(alpha x)^2 / (alpha + 1e-9)` with one alpha per channel, always in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[streams, channels, time]` to the same shape."""
        wave = (x * self.alpha).sin_().square_()
        return wave.mul_((self.alpha + _ALPHA_FLOOR).reciprocal()).add_(x)


class Convolution(nn.Conv1d):
    """Length-preserving convolution; its sum may run in lower precision, its input and output are float32."""

    def __init__(self, channels: int, out_channels: int, kernel: int, *, dilation: int = 1) -> None:
        padding = (kernel - 1) * dilation // 2
        super().__init__(channels, out_channels, kernel, padding=padding, dilation=dilation)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).float()


class Upsampling(nn.ConvTranspose1d):
    """Transposed convolution that multiplies the length by `stride`; precision as in `Convolution`."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__(channels, out_channels, 2 * stride, stride=stride, padding=math.ceil(stride / 2))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).float()


class ResidualUnit(nn.Module):
    """Two snake-activated convolutions, the first dilated, with a residual."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv1 = Convolution(channels, channels, _KERNEL, dilation=dilation)
        self.snake2 = Snake(channels)
        self.conv2 = Convolution(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.snake2(self.conv1(self.snake1(x)))).add_(x)


class Block(nn.Module):
    """Upsampling followed by three residual units of growing reach."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv_t1 = Upsampling(channels, channels // 2, stride)
        self.res_unit1, self.res_unit2, self.res_unit3 = (
            ResidualUnit(channels // 2, dilation) for dilation in _DILATIONS
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.res_unit3(self.res_unit2(self.res_unit1(self.conv_t1(self.snake1(x)))))


class Vocoder(nn.Module):
    """Latents to waveform.

    Args:
        config: `vocoder/config.json`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        width, strides = config["decoder_hidden_dim"], config["upsampling_ratios"]
        self.dec_in_proj = Convolution(config["latent_channels"] // CHANNELS, config["decoder_input_dim"], 1)
        self.conv_in = Convolution(config["decoder_input_dim"], width, _KERNEL)
        self.blocks = nn.ModuleList(Block(width >> stage, stride) for stage, stride in enumerate(strides))
        width >>= len(strides)
        self.snake_out = Snake(width)
        self.conv_out = Convolution(width, 1, _KERNEL)

    @property
    def hop_samples(self) -> int:
        """Samples per latent."""
        return math.prod(self.config["upsampling_ratios"])

    @property
    def reach_latents(self) -> int:
        """How far a latent's influence on the sound goes beyond its own samples, rounded up.

        10 for the official checkpoint: every sum below is over what one layer reaches, in latents.
        """
        rate = 1
        reach = Fraction(_KERNEL // 2)
        for stride in self.config["upsampling_ratios"]:
            reach += Fraction(1, rate)
            rate *= stride
            reach += Fraction(_KERNEL // 2 * sum(_DILATIONS), rate)
        return math.ceil(reach + Fraction(_KERNEL // 2, rate))

    def forward(self, latents: Tensor) -> Tensor:
        """`[batch, channels, latents]` float32 to `[batch, 2, 512 * latents]`, between -1 and 1.

        The first half of the channels is the left side, the second half the right.
        """
        streams = latents.reshape(CHANNELS * latents.shape[0], -1, latents.shape[2])
        x = self.conv_in(self.dec_in_proj(streams))
        for block in self.blocks:
            x = block(x)
        return self.conv_out(self.snake_out(x)).tanh_().reshape(latents.shape[0], CHANNELS, -1)


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of `vocoder/` and its shape, by checkpoint name."""
    with torch.device("meta"):
        network = Vocoder(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in network.state_dict().items():
        if name.endswith(".weight") and name != "dec_in_proj.weight":
            shapes[f"{name}_g"] = (tensor.shape[0], 1, 1)
            shapes[f"{name}_v"] = tuple(tensor.shape)
        else:
            shapes[name] = tuple(tensor.shape)
    return shapes


def convert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names to this module's: each `weight_v` and `weight_g` become one weight.

    The norm is over all but the first dimension, which for a transposed convolution is the input's.
    """
    for name in tensors:
        if name.endswith("weight_v"):
            stem = name.removesuffix("_v")
            direction = tensors[name]
            yield stem, direction * (tensors[f"{stem}_g"] / torch.norm_except_dim(direction, 2, 0))
        elif not name.endswith("weight_g"):
            yield name, tensors[name]
