"""The benchmarks' count of matrix products against torch's own counter of operations and against formulas."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.products import Product, bare_seconds, products_of
from python_backend_models.engine.acoustic import FlowEngine, FlowWindow, VocoderEngine
from tests.acoustic_models import make_acoustic


def flop(products: dict[Product, int], kind: str | None = None) -> int:
    return sum(each.flop * count for each, count in products.items() if kind in (None, each.kind))


def test_a_solve_is_counted_whole() -> None:
    networks = make_acoustic(seed=1)
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=3)
    window = FlowWindow(torch.randn(20, 32), 0, 0, None)
    found = products_of(lambda: engine.solve([window]))
    tokens, width, inner, steps, blocks, heads, head = 69, 16, 12, 3, 2, 2, 8
    attention = steps * blocks * 2 * 2 * 2 * heads * tokens * tokens * head
    assert flop(found, "attention") == attention
    per_block = 4 * width * width + 3 * width * inner
    ends = steps * (68 * 4 * width + 2 * 68 * width * 4)  # latents in once for both rows, out for each
    condition = 68 * (14 * 14 + 14 * width)
    linear = 2 * (steps * blocks * 2 * tokens * per_block + ends + condition)
    assert flop(found, "linear") == linear
    assert flop(found, "convolution") == 2 * 20 * 4 * 3 * 6


def test_convolutions_are_counted_as_torch_counts_them() -> None:
    networks = make_acoustic(seed=2)
    engine = VocoderEngine(networks.vocoder, device="cpu")
    latent = torch.randn(4, 30)
    with FlopCounterMode(display=False) as counter:
        engine.decode([latent], [(0, 0)])
    found = products_of(lambda: engine.decode([latent], [(0, 0)]))
    assert {product.kind for product in found} == {"convolution"}
    assert flop(found) == counter.get_total_flops() > 0


def test_every_kind_is_timed() -> None:
    products = {
        Product("linear", 1, 3, 4, 5, True): 2,
        Product("attention", 2, 3, 4, 5, True): 1,
        Product("attention", 2, 3, 5, 4, False): 1,
    }
    ticks = iter(range(1000))
    # A clock that ticks once a reading: each product takes one tick, as often as it occurs.
    assert bare_seconds(products, clock=lambda: next(ticks)) == {"linear": 2, "attention": 2}
