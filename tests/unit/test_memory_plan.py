"""The memory plan against closed forms and published sizes, and its settings against what reads settings."""

import re

import pytest
import torch

from python_backend_models import memory_plan, official
from python_backend_models.engine.kv_cache import KVPool
from python_backend_models.engine.loading import batch_sizes, pool_pages
from python_backend_models.memory_plan import GPUS, PRECISIONS, main, plans
from python_backend_models.settings import DitSettings, Music3Settings, TalkerSettings, VocoderSettings, read

CPU = torch.device("cpu")


def test_weights_are_those_that_are_published() -> None:
    """In float32, GB; read off the official files for vllm-omni 0.30.0."""
    for folder, gigabytes in (("transformer", 9.728), ("condition_encoder", 0.101), ("vocoder", 0.217)):
        size = memory_plan.weight_bytes(folder, precision="float32") / 1e9
        assert size == pytest.approx(gigabytes, abs=6e-4)


def test_talker_weights_by_hand() -> None:
    hidden, inner, layers, head = 4096, 12288, 36, 128
    layer = hidden * head * (32 + 2 * 8) + 32 * head * hidden + 3 * hidden * inner + 2 * hidden + 2 * head
    drawable = 16384 + 1
    values = 200_000 * hidden + layers * layer + hidden + drawable * hidden
    assert memory_plan.weight_bytes("language_model", precision="bfloat16") == 2 * values


def test_half_precision_halves_the_blocks_products_alone() -> None:
    width, inner, blocks = 2048, 8192, 36
    products = blocks * (4 * width * width + width * 2 * inner + 2 * inner + inner * width + width)
    whole = memory_plan.weight_bytes("transformer", precision="float32")
    assert memory_plan.weight_bytes("transformer", precision="float16") == whole - 2 * products


def test_pages_and_song_state_by_hand() -> None:
    assert memory_plan.page_bytes() == 144 * 1024 * 256
    assert [memory_plan.pages_of(seconds) for seconds in (1, 30, 360)] == [2 * 2, 2 * 5, 2 * 37]
    pages_per_row = 10240 // 256
    ring = 302 * (8 * 4096 * 2 + 8 * 8)
    assert memory_plan.song_state_bytes() == ring + 2 * 4096 * 2 + 3 * 8 + 2 * pages_per_row * 4 + 2 * 4


def test_page_bytes_are_what_a_pool_allocates() -> None:
    config = official.CONFIGS["language_model"] | {"num_hidden_layers": 2}
    pool = KVPool(config, pages=3, page_tokens=256, dtype=torch.bfloat16, device=CPU)
    assert (pool.keys.nbytes + pool.values.nbytes) * 18 == (3 + 1) * memory_plan.page_bytes()


def test_activations_contain_the_published_tensors() -> None:
    """A full window: 90.4 MB of feed-forward values, 271 MB per tensor of the vocoder's last stage."""
    window = memory_plan.flow_bytes(1, precision="tf32")
    assert window > 2 * 90.4e6
    assert memory_plan.flow_bytes(8, precision="tf32") == 8 * window
    assert window / 2 < memory_plan.flow_bytes(1, precision="float16") < window
    # Of a window amid a song only part is decoded: 603 latents and 10 of reach, of 689.
    assert memory_plan.vocoder_bytes(1) == pytest.approx(4 * 270.9e6 * 623 / 689, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS)
def test_plans_fit_and_their_settings_are_accepted(gpu: int) -> None:
    found = plans(gpu)
    assert found
    for each in found:
        assert each.used_bytes <= GPUS[gpu] * 0.97
        environment = dict(part.split("=") for part in each.settings.split())
        if each.songs:
            talker = read(TalkerSettings, "talker", {}, environment)
            assert talker.live_songs == read(Music3Settings, "music3", {}, environment).live_songs
            assert talker.live_songs == each.songs
            # The loader accepts the pool and makes it exactly that large, whatever is free at the time.
            config = official.CONFIGS["language_model"]
            assert pool_pages(talker, config, torch.bfloat16, CPU) == each.pages
            assert each.songs * memory_plan.pages_of(60) <= each.pages
        if each.batch:
            dit = read(DitSettings, "dit", {}, environment)
            assert dit.precision in PRECISIONS
            assert read(VocoderSettings, "vocoder", {}, environment).batch_windows == dit.batch_windows
            assert max(size for size in (8, 4, 2, 1) if size <= dit.batch_windows) == each.batch


def test_a_plan_is_the_largest_that_fits() -> None:
    """A little less memory and it is another one, which is smaller."""
    whole = memory_plan.plan(GPUS[40], precision="tf32")
    assert whole is not None
    less = memory_plan.plan(GPUS[40] - 1e9, precision="tf32")
    assert less is not None
    assert (less.batch, less.pages) < (whole.batch, whole.pages)
    assert memory_plan.plan(GPUS[24], precision="tf32") is None
    assert [each.stages for each in plans(24)] == ["talker", "dit, vocoder", "dit, vocoder"]


def test_batch_setting_takes_sizes_away() -> None:
    assert batch_sizes(torch.device("cuda"), 8) == (8, 4, 2, 1)
    assert batch_sizes(torch.device("cuda"), 3) == (2, 1)
    assert batch_sizes(CPU, 8) == (1,)


def test_command_shows_arithmetic_and_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpu", "80"])
    shown = capsys.readouterr().out
    assert "36 layers x 2 x 8 heads x 128 x 2 B = 144 KiB" in shown
    assert re.findall(r"^\d+ +(\d+) GB +all", shown, re.MULTILINE) == ["80", "80"]
    assert "nothing was measured" in shown
