"""What bfloat16 costs the talker: signal-to-noise ratio of its states against float32, with floors.

The weights are those of a bfloat16 checkpoint in both cases, so what is measured is arithmetic. The frames
are equal, too: a draw that falls otherwise would make another song, not noise.
"""

import math

import pytest
import torch
from torch import Tensor

from python_backend_models.engine.frame_step import compose_feedback
from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.offline import _DenseAttention
from tests.parity.conftest import Fidelity
from tests.parity.talker_oracles import own_backbone, own_depth_decoder, random_talker, stored_in_bfloat16

SIZES = (1, 5, 9)
FRAMES, PROMPT_TOKENS, ROWS = 64, 40, 2
# Random weights, CPU. What is lost grows with depth, so the full-size figures come from a GPU.
FLOORS_DB = {"backbone": 35.0, "depth decoder": 35.0}


def codes(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = [16384, *[1024] * 7]
    return torch.stack([torch.randint(0, size, (FRAMES,), generator=generator) for size in sizes], dim=1)


def backbone_states(seed: int, backbone: Backbone, depth: DepthDecoder) -> Tensor:
    """States at a prompt's last token and after each of 64 frames, `[rows, frames + 1, hidden]`."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 151_643, (ROWS, PROMPT_TOKENS), generator=generator)
    attend = _DenseAttention(len(backbone.model.layers))
    positions = torch.arange(PROMPT_TOKENS + FRAMES).expand(ROWS, -1)
    states = [backbone(backbone.embed(prompt), positions[:, :PROMPT_TOKENS], attend)[:, -1:]]
    for frame, feedback in enumerate(compose_feedback(backbone, depth, codes(seed))):
        now = positions[:, PROMPT_TOKENS + frame : PROMPT_TOKENS + frame + 1]
        states.append(backbone(feedback.expand(ROWS, 1, -1), now, attend))
    return torch.cat(states, dim=1)


def depth_states(seed: int, backbone: Backbone, depth: DepthDecoder) -> Tensor:
    """The seven states of each of 64 frames from equal backbone states, `[frames, 7, hidden]`."""
    frames, weight = codes(seed), backbone.model.embed_tokens.weight
    hidden = torch.randn(FRAMES, 1, weight.shape[1], generator=torch.Generator().manual_seed(seed))
    inputs = [hidden.bfloat16().to(weight.dtype), backbone.embed(frames[:, :1] + 151_675)]
    inputs += [depth.embed(frames[:, k : k + 1], k) for k in range(1, 7)]
    cache = depth.start()
    states = [depth(torch.cat(inputs[:2], dim=1), 0, cache)]
    states += [depth(inputs[k], k, cache) for k in range(2, 8)]
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("network", FLOORS_DB)
@torch.inference_mode()
def test_signal_to_noise_ratio(network: str, fidelity: Fidelity) -> None:
    run = {"backbone": backbone_states, "depth decoder": depth_states}[network]
    ratios_db = []
    for seed in SIZES:
        talker = stored_in_bfloat16(random_talker(seed=seed))
        exact, low = (
            run(seed, own_backbone(talker, dtype=dtype), own_depth_decoder(talker, dtype=dtype)).double()
            for dtype in (torch.float32, torch.bfloat16)
        )
        ratios_db.append(20 * math.log10((exact.norm() / (low - exact).norm()).item()))
    floor_db = FLOORS_DB[network]
    fidelity.record(
        section="Precision",
        quantity=f"{network} in bfloat16",
        oracle="the same network in float32",
        cases=len(SIZES),
        largest_error=10 ** (-min(ratios_db) / 20),
        tolerance=10 ** (-floor_db / 20),
        note=f"relative; SNR {min(ratios_db):.1f} dB, floor {floor_db:.0f} dB; CPU, random weights",
    )
