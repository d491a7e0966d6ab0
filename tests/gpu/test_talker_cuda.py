"""The talker on CUDA: the paged kernel and the graphs against the plain paths."""

import pytest
import torch

from python_backend_models.engine.frame_step import DepthLoop
from python_backend_models.engine.graphs import GraphedFunction
from python_backend_models.engine.kv_cache import (
    KVPool,
    MaskedDecodeAttention,
    PagedDecodeAttention,
    PrefillAttention,
    decode_slots,
    paged_kernel_works,
)
from python_backend_models.engine.runner import FrameRunner
from python_backend_models.engine.talker import TalkerEngine, ring_frames
from tests.small_models import BACKBONE_CONFIG, small_backbone, small_depth_decoder
from tests.unit.test_talker import Songs, collect, joined, plan

CONFIG = BACKBONE_CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
# Attention of unit noise in bfloat16: a few units, half a percent each.
TOLERANCE = 5e-2


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def pool_with_noise(pages: int) -> KVPool:
    pool = KVPool(CONFIG, pages=pages, page_tokens=256, dtype=torch.bfloat16, device="cuda")
    pool.keys.normal_()
    pool.values.normal_()
    return pool


def test_paged_decode_equals_masked_decode() -> None:
    pool = pool_with_noise(40)
    assert paged_kernel_works(pool, 8)
    tables = torch.randperm(40, device="cuda")[:36].add(1).view(6, 6).to(torch.int32)
    lengths = torch.tensor([1, 2, 255, 256, 257, 1400], device="cuda")
    slots = decode_slots(pool, tables, lengths - 1)
    inputs = (noise(6, 1, 8, 128), noise(6, 1, 2, 128), noise(6, 1, 2, 128))
    masked = MaskedDecodeAttention(pool, slots, tables, lengths)(1, *inputs)
    paged = PagedDecodeAttention(pool, slots, tables, lengths)(1, *inputs)
    torch.testing.assert_close(paged.float(), masked.float(), rtol=0, atol=TOLERANCE)


def test_a_row_of_the_paged_kernel_does_not_depend_on_the_others() -> None:
    pool = pool_with_noise(40)
    tables = torch.randperm(40, device="cuda")[:36].add(1).view(6, 6).to(torch.int32)
    lengths = torch.tensor([900, 2, 255, 256, 257, 1400], device="cuda")
    inputs = (noise(6, 1, 8, 128), noise(6, 1, 2, 128), noise(6, 1, 2, 128))
    slots = decode_slots(pool, tables, lengths - 1)
    together = PagedDecodeAttention(pool, slots, tables, lengths)(0, *inputs)
    for row in range(6):
        one = slice(row, row + 1)
        alone = PagedDecodeAttention(pool, slots[one], tables[one], lengths[one])(
            0, *(i[one] for i in inputs)
        )
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize(("first", "tokens"), [(0, 40), (0, 512), (512, 300), (300, 1)])
def test_paged_prefill_equals_masked_prefill(first: int, tokens: int) -> None:
    pool = pool_with_noise(8)
    inputs = (noise(1, tokens, 8, 128), noise(1, tokens, 2, 128), noise(1, tokens, 2, 128))
    outputs = [
        PrefillAttention(pool, [5, 3, 7, 1], first_position=first, tokens=tokens, paged=paged)(0, *inputs)
        for paged in (False, True)
    ]
    torch.testing.assert_close(outputs[1].float(), outputs[0].float(), rtol=0, atol=TOLERANCE)


def make_engine(graphs: str) -> TalkerEngine:
    runner = FrameRunner(
        small_backbone(dtype=torch.bfloat16, head_dim=64).cuda(),
        small_depth_decoder(dtype=torch.bfloat16).cuda(),
        slots=8,
        pages=40,
        page_tokens=256,
        ring_frames=ring_frames(1),
        graphs=graphs,
    )
    runner.capture()
    assert runner.graphs == graphs
    return TalkerEngine(runner, read_interval_frames=4)


def sing(graphs: str, *, replayed: bool) -> Songs:
    engine = make_engine(graphs)
    if not replayed:  # as many lanes as with graphs: kernels may differ by the number of rows
        runner = engine.runner
        runner._frame = GraphedFunction(runner._frame_function, None)
        runner._step.depth_loop = DepthLoop(runner.backbone, runner.depth)
    for key in range(8):
        engine.admit(key, plan(key, tokens=30 + key, max_frames=120 + 30 * key))
    return collect(engine, list(range(8)))


@pytest.mark.parametrize("graphs", ["frame", "depth"])
def test_replayed_songs_equal_eager_ones(graphs: str) -> None:
    eager, replayed = (sing(graphs, replayed=replayed) for replayed in (False, True))
    for key, windows in eager.items():
        assert torch.equal(joined(windows)[0], joined(replayed[key])[0]), key


def test_a_step_does_not_stop_the_host() -> None:
    """torch raises where an operation would make the host wait for the device."""
    engine = make_engine("off")
    runner = engine.runner
    lanes = runner._lanes([0, 1], 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            runner._frame_function(lanes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
