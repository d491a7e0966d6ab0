"""The condition encoder: a window's hidden states, mixed over layers and stretched to the latents' rate.

Tensor names are the checkpoint's (`condition_encoder/`). Source: vllm-omni 0.30.0 and diffusers 0.42.1, which
agree bit for bit.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_backend_models.contract import LATENTS_PER_FRAME

_KERNEL_FRAMES = 3


class ConditionEncoder(nn.Module):
    """Softmax mix of the layers' hidden states, one convolution over frames, nearest-neighbour stretch.

    Args:
        config: `condition_encoder/config.json`.

    Raises:
        ValueError: the config's rates are not 441 latents per 128 frames.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        per_frame = Fraction(
            config["output_sampling_rate"] * config["input_hop_length"],
            config["input_sampling_rate"] * config["output_hop_length"],
        )
        if per_frame != Fraction(*LATENTS_PER_FRAME):
            raise ValueError(f"condition_encoder: {per_frame} latents per frame, not 441/128")
        self.config = dict(config)
        self.layers = config["num_condition_layers"]
        self.latents_per_frame = per_frame
        self.layer_weight_logits = nn.Parameter(torch.empty(self.layers), requires_grad=False)
        self.layer_scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.proj = nn.Conv1d(
            config["condition_hidden_dim"], config["out_dim"], _KERNEL_FRAMES, padding=_KERNEL_FRAMES // 2
        ).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, frames, layers * hidden]` to `[batch, condition, latents]`, in the parameters' dtype.

        Frames outside the window count as zeros even where the song has some. The stretch reads frame
        floor(j * frames / latents), computed in float32: for 13 of the 200 lengths that is a frame
        earlier than exact arithmetic at some latents, and the checkpoint has only ever seen that.
        """
        hidden = hidden.to(self.proj.weight.dtype).unflatten(-1, (self.layers, -1))
        weights = torch.softmax(self.layer_weight_logits, dim=0)
        mixed = self.layer_scale * torch.einsum("btlh,l->bht", hidden, weights)
        latents = max(1, int(hidden.shape[1] * self.latents_per_frame))
        return F.interpolate(self.proj(mixed), size=latents, mode="nearest")


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of `condition_encoder/` and its shape, by checkpoint name."""
    width = config["out_dim"]
    return {
        "layer_weight_logits": (config["num_condition_layers"],),
        "layer_scale": (1,),
        "proj.weight": (width, config["condition_hidden_dim"], _KERNEL_FRAMES),
        "proj.bias": (width,),
    }


def convert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names to this module's: they are the same."""
    yield from tensors.items()
