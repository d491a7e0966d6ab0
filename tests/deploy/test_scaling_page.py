"""The arithmetic of docs/scaling.md, done again from the official configs."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from python_backend_models.chunking import windows
from python_backend_models.contract import WINDOW_FRAMES
from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.networks.vocoder import Vocoder
from python_backend_models.official import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
WINDOW_TFLOP, NEW_SECONDS, FRAMES_PER_SECOND = 209.3, 4, 25


@pytest.fixture(scope="module")
def frame_gb() -> float:
    """What a frame reads: the backbone with its head, the depth decoder's layers seven times, its heads."""
    with torch.device("meta"):
        backbone, depth = Backbone(CONFIGS["language_model"]), DepthDecoder(CONFIGS["rvq_depth_decoder"])
    read = sum(p.numel() for name, p in backbone.named_parameters() if "embed_tokens" not in name)
    for name, parameter in depth.named_parameters():
        times = 7 if name.startswith("layers.") else 1 if name.startswith("audio_heads.") else 0
        read += times * parameter.numel()
    return 2 * read / 1e9


@pytest.fixture(scope="module")
def second_tflop() -> float:
    with torch.device("meta"):
        vocoder = Vocoder(CONFIGS["vocoder"])
        left, right = windows(2 * WINDOW_FRAMES)[1].crop_samples
        kept = windows(2 * WINDOW_FRAMES)[1].latents - (left + right) // vocoder.hop_samples
        latents = torch.zeros(1, CONFIGS["vocoder"]["latent_channels"], kept + 2 * vocoder.reach_latents)
    with FlopCounterMode(display=False) as counter:
        vocoder(latents)
    return (WINDOW_TFLOP + counter.get_total_flops() / 1e12) / NEW_SECONDS


def test_what_a_frame_and_a_second_cost(frame_gb: float, second_tflop: float) -> None:
    assert f"depth decoder: {frame_gb:.1f} GB, so at 4.8 TB/s {frame_gb / 4.8:.1f} ms" in PAGE
    assert f"TFLOP / 4 s = {second_tflop:.1f} TFLOP, for each song" in PAGE
    assert f"`25 * {frame_gb:.1f} GB / bandwidth + N * {second_tflop:.1f} TFLOP / speed <= 1`" in PAGE


def test_songs_by_card(frame_gb: float, second_tflop: float) -> None:
    number = r"([\d.]+)"
    cells = ("[^|]+ GB", f"{number} TB/s", *[f"{number} TFLOP/s"] * 2, f"{number} s", number, number)
    rows = re.findall(r"\| " + r" \| ".join(cells) + r" \|", PAGE)
    assert len(rows) == 4
    for row in rows:
        bandwidth, tf32, fp16, *said = map(float, row)
        share = FRAMES_PER_SECOND * frame_gb / (1000 * bandwidth)
        songs = [(1 - share) * speed / second_tflop for speed in (tf32, fp16)]
        assert said == pytest.approx([share, *songs], abs=0.06)
        assert said[0] == pytest.approx(share, abs=0.006)
