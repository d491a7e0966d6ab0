"""Random weights for a checkpoint whose song is worth testing with.

Every tensor has its own generator, seeded with its name, so it depends on nothing else. The scales keep
activations near 1 all the way, so that each part of the network is heard in the result, and no tensor is left
at a value (all ones, all zeros) that would hide a loader's mistake.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from python_backend_models import contract

# Of c0 and residual logits: enough that a frame's draws depend on its hidden state more than on the noise.
LOGIT_STD = 2.5
# Channel 0 of every token and composed frame, before the layers add to it. The stop row reads that channel,
# so its logit is about the same at every frame.
STEADY_INPUT = 2.0
# Of a composed frame: 8 ** -0.5 * (c0's steady input + seven of these) is the steady input again.
STEADY_RESIDUAL = STEADY_INPUT * (math.sqrt(contract.CODEBOOKS) - 1) / (contract.CODEBOOKS - 1)
# That channel behind the final norm, measured in size tiny; more layers add to the others and shrink it.
STEADY_HIDDEN = 1.4


def tensor(path: str, shape: tuple[int, ...], *, seed: int, stop_logit: float | None) -> Tensor:
    """One tensor, float32.

    Args:
        path: `folder/tensor name`.
        shape: its shape in the checkpoint.
        seed: of the checkpoint.
        stop_logit: as in `write_tiny_checkpoint`.
    """
    folder, name = path.split("/")
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    normal = torch.randn(shape, generator=generator)
    made = _RULES[folder](name, normal)
    if path == "language_model/lm_head.weight":
        # Zero is far below the 50th largest of 16,384 logits of the others.
        made[contract.AUDIO_END] = 0.0
        if stop_logit is not None:
            made[contract.AUDIO_END, 0] = stop_logit / STEADY_HIDDEN
    return made


def _fan_in(normal: Tensor, gain: float = 1.0) -> Tensor:
    """Scaled so that inputs of size 1 give outputs of size `gain`."""
    return normal.mul_(gain / math.sqrt(math.prod(normal.shape[1:])))


def _near(value: float, normal: Tensor, spread: float = 0.1) -> Tensor:
    """About `value`, within a factor of 2."""
    return normal.mul_(spread).clamp_(-0.5, 0.5).add_(1.0).mul_(value)


def _talker_layer(name: str, normal: Tensor) -> Tensor:
    """Both talker networks' layers: attention peaky enough to find a word among thousands."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return _near(1.5, normal)
    if normal.dim() == 1:
        return _near(1.0, normal)
    if name.endswith(("o_proj.weight", "to_out.weight")):
        return _fan_in(normal, 0.7)
    return _fan_in(normal)


def _steady(normal: Tensor, value: float) -> Tensor:
    normal[:, 0] = value
    return normal


def _language_model(name: str, normal: Tensor) -> Tensor:
    if name == "model.embed_tokens.weight":
        return _steady(normal, STEADY_INPUT)
    if name == "lm_head.weight":
        return _fan_in(normal, LOGIT_STD)
    made = _talker_layer(name, normal)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        made[0] = 0.0  # nothing is added to the steady channel
    return made


def _depth_decoder(name: str, normal: Tensor) -> Tensor:
    if name == "audio_embeddings.weight":
        return _steady(normal, STEADY_RESIDUAL)
    if name == "pos_embedding.weight":
        return normal.mul_(0.5)
    if name.startswith("audio_heads."):
        return _fan_in(normal, LOGIT_STD)
    return _talker_layer(name, normal)


def _condition_encoder(name: str, normal: Tensor) -> Tensor:
    if name == "layer_weight_logits":
        return normal.mul_(0.7)
    if name == "layer_scale":
        return _near(1.4, normal)
    return normal.mul_(0.1) if normal.dim() == 1 else _fan_in(normal, 1.5)


def _flow_transformer(name: str, normal: Tensor) -> Tensor:
    if name == "proj_in.weight":
        # The condition is to weigh more than the noise, whatever the widths.
        channels = 256
        normal[:, :channels] *= 0.7 * math.sqrt(normal.shape[1] / channels)
        normal[:, channels:] *= 1.4 * math.sqrt(normal.shape[1] / (normal.shape[1] - channels))
        return _fan_in(normal)
    if name in ("preprocess_conv.weight", "postprocess_conv.weight"):
        return _fan_in(normal, 0.3)
    if name == "time_proj.weight":
        return normal
    if normal.dim() == 1:
        return _near(1.0, normal) if name.endswith(("norm1.weight", "norm2.weight")) else normal.mul_(0.05)
    if name.endswith(("to_q.weight", "to_k.weight")):
        return _fan_in(normal, 1.3)
    if name.endswith(("to_out.0.weight", "ff_out.weight")):
        return _fan_in(normal, 0.7)
    return _fan_in(normal, 0.5 if name == "proj_out.weight" else 1.0)


# The gain that keeps the size of a signal through a transposed convolution is sqrt(stride / 2).
_VOCODER_GAIN = {
    "conv_in.weight_g": 1.0,
    "blocks.0.conv_t1.weight_g": 2.0,
    "blocks.1.conv_t1.weight_g": 2.0,
    "blocks.2.conv_t1.weight_g": 1.4,
    "blocks.3.conv_t1.weight_g": 1.0,
    "conv_out.weight_g": 0.07,
}


def _vocoder(name: str, normal: Tensor) -> Tensor:
    if name.endswith("alpha"):
        return _near(1.0, normal, spread=0.3)
    if name.endswith("bias"):
        return normal.mul_(0.05)
    if name == "dec_in_proj.weight":
        return _fan_in(normal)
    if name.endswith("weight_g"):
        return _near(_VOCODER_GAIN.get(name, 0.7 if "conv1" in name else 0.4), normal)
    # Weight norm makes the size of weight_v irrelevant. The last convolution's taps add up to nothing, so
    # that the snakes' positive mean does not end up as a constant.
    return normal - normal.mean(dim=-1, keepdim=True) if name == "conv_out.weight_v" else normal


_RULES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "language_model": _language_model,
    "rvq_depth_decoder": _depth_decoder,
    "condition_encoder": _condition_encoder,
    "transformer": _flow_transformer,
    "vocoder": _vocoder,
}
