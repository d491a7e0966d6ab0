"""The engines against golden vectors, published noise, a plain solver, and their promises about batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from python_backend_models.engine import acoustic
from python_backend_models.engine.acoustic import (
    Carry,
    FlowEngine,
    FlowResult,
    FlowWindow,
    NonFiniteError,
    VocoderEngine,
    draw_noise,
    noise_seed,
)
from tests.acoustic_models import MICRO, Acoustic, make_acoustic
from tests.unit.test_condition_encoder import golden_hidden
from tests.unit.test_flow_transformer import golden_noise

CPU = torch.device("cpu")
# (seed, window) -> generator seed, and the first values it draws on a CPU. Source: vllm-omni 0.30.0, run.
NOISE = {
    (0, 0): (1172308609478234070, [0.47694436, -1.26155698, 1.72321272, -0.28366324]),
    (0, 1): (5227974074385879887, [-0.43713245, 0.55618024, 0.95544118, -2.18219423]),
    (7, 0): (492056280515100207, [1.12234902, -0.19404638, 0.34781599, 1.40158391]),
    (42, 3): (279382401196928957, [1.00444388, -2.06590295, -1.17004049, 1.86866021]),
    (2**64 - 1, 10): (5410265384588367571, [0.01433071, -1.62051523, -1.40838695, 0.52070242]),
}
GOLDEN_SOLVE = {
    0: [0.5128795, -1.0991421, -0.2396461, 0.7923509],
    6: [-0.7257509, -0.7961943, 1.3364972, 1.6567755],
    16: [-0.3506728, -2.2851717, -0.3281321, 1.9098854],
}
GOLDEN_SOLVE_WITH_CARRY = {
    0: [0.0, -0.0558831, -0.1073146, -0.1501974],
    6: [-0.7400690, -0.7941200, 1.3473186, 1.6688076],
    16: [-0.3468429, -2.2878630, -0.3308797, 1.9084623],
}
# Sample -> left and right; then the mean magnitudes.
GOLDEN_SOUND = {
    0: [0.3282712, 0.3270168],
    1: [0.2920328, 0.2903681],
    511: [-0.1522129, -0.1292945],
    4352: [0.1500336, 0.1535110],
    8703: [0.7081931, 0.7095316],
}
GOLDEN_MEAN_MAGNITUDES = [0.3968804, 0.3987372]


@pytest.fixture(scope="module")
def networks() -> Acoustic:
    return make_acoustic(seed=11)


@pytest.fixture(scope="module")
def engine(networks: Acoustic) -> FlowEngine:
    return FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=6, batch_sizes=(8, 4, 2, 1))


def hidden(frames: int, *, seed: int) -> Tensor:
    return torch.randn(frames, 32, generator=torch.Generator().manual_seed(seed))


def window(frames: int, *, seed: int, index: int = 0, carry: Carry | None = None) -> FlowWindow:
    return FlowWindow(hidden(frames, seed=seed), seed, index, carry)


def solved(engine: FlowEngine, windows: Sequence[FlowWindow]) -> list[FlowResult]:
    results = engine.solve(windows)
    for result in results:
        assert isinstance(result, FlowResult), result
    return results  # type: ignore[return-value]


def mixed_windows(engine: FlowEngine) -> list[FlowWindow]:
    """Five full windows, two of them not the first of their songs, and three short ones."""
    first, other = solved(engine, [window(200, seed=1), window(200, seed=2)])
    return [
        window(200, seed=3),
        window(150, seed=1, index=1, carry=first.carry),
        window(200, seed=1, index=1, carry=first.carry),
        window(7, seed=4),
        window(200, seed=5),
        window(150, seed=6, index=1, carry=other.carry),
        window(200, seed=2, index=1, carry=other.carry),
        window(200, seed=7),
    ]


@pytest.mark.parametrize(("seed", "index"), NOISE)
def test_published_noise(seed: int, index: int) -> None:
    generator_seed, values = NOISE[seed, index]
    assert noise_seed(seed, index) == generator_seed
    noise = draw_noise(seed, index, (128, 689), device=CPU)
    torch.testing.assert_close(noise[0, :4], torch.tensor(values), atol=1e-8, rtol=0)


@pytest.mark.parametrize(("with_carry", "expected"), [(False, GOLDEN_SOLVE), (True, GOLDEN_SOLVE_WITH_CARRY)])
def test_golden_solve(
    monkeypatch: pytest.MonkeyPatch, with_carry: bool, expected: dict[int, list[float]]
) -> None:
    monkeypatch.setattr(acoustic, "draw_noise", lambda _seed, _index, shape, **_: golden_noise(*shape))
    networks = make_acoustic()
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=4)
    flat = torch.arange(36, dtype=torch.float64)
    carry = Carry((0.2 * flat[:24].sin()).float().reshape(4, 6), (0.1 * flat.cos()).float().reshape(6, 6))
    (result,) = solved(engine, [FlowWindow(golden_hidden(5)[0], 0, 0, carry if with_carry else None)])
    for latent, values in expected.items():
        torch.testing.assert_close(result.latent[:, latent], torch.tensor(values), atol=2e-6, rtol=0)


def test_golden_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acoustic, "draw_noise", lambda _seed, _index, shape, **_: golden_noise(*shape))
    networks = make_acoustic()
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=4)
    (result,) = solved(engine, [FlowWindow(golden_hidden(5)[0], 0, 0, None)])
    (sound,) = VocoderEngine(networks.vocoder, device="cpu").decode([result.latent], [(0, 0)])
    assert isinstance(sound, Tensor)
    assert sound.shape == (2, 8704)
    for sample, values in GOLDEN_SOUND.items():
        torch.testing.assert_close(sound[:, sample], torch.tensor(values), atol=5e-6, rtol=0)
    torch.testing.assert_close(
        sound.abs().mean(dim=1), torch.tensor(GOLDEN_MEAN_MAGNITUDES), atol=2e-6, rtol=0
    )


def plain_solve(networks: Acoustic, given: FlowWindow, *, steps: int) -> tuple[Tensor, Tensor]:
    """The published recipe, written out: latent and the condition it was solved with."""
    condition = networks.encoder(given.hidden[None])
    x = draw_noise(given.seed, given.window_index, (4, condition.shape[2]), device=CPU)[None]
    left, eps = 0, x
    if given.carry is not None:
        left = min(given.carry.latent.shape[1], x.shape[2])
        eps = x[..., :left].clone()
        condition[..., :left] = given.carry.condition[:, :left]
    for step in range(steps):
        t = torch.tensor([step / steps])
        if left:
            x[..., :left] = (1 - (1 - 1e-6) * t) * eps + t * given.carry.latent[:, :left]
        with_condition = networks.transformer(x, t, condition)
        without = networks.transformer(x, t, torch.zeros_like(condition))
        x = x + (1 / steps) * (1.7 * with_condition - 0.7 * without)
    if left:
        x[..., :left] = given.carry.latent[:, :left]
    return x[0], condition[0]


def test_solve_is_the_published_recipe(networks: Acoustic, engine: FlowEngine) -> None:
    for given in mixed_windows(engine):
        latent, condition = plain_solve(networks, given, steps=6)
        (result,) = solved(engine, [given])
        torch.testing.assert_close(result.latent, latent, atol=1e-5, rtol=0)
        length = latent.shape[1]
        carried = slice(max(0, length - 344), max(0, length - 172))
        assert torch.equal(result.carry.latent, result.latent[:, carried])
        assert torch.equal(result.carry.condition, condition[:, carried])


def test_a_window_begins_with_what_it_was_given_bit_for_bit(engine: FlowEngine) -> None:
    (first,) = solved(engine, [window(200, seed=1)])
    assert first.carry.latent.shape == (4, 172)
    assert first.carry.condition.shape == (6, 172)
    (second,) = solved(engine, [window(120, seed=1, index=1, carry=first.carry)])
    assert torch.equal(second.latent[:, :172], first.latent[:, 345:517])


def test_any_batch_gives_the_solo_result(engine: FlowEngine) -> None:
    windows = mixed_windows(engine)
    alone = [solved(engine, [given])[0] for given in windows]
    for together in (windows, windows[::-1], windows[2:5]):
        for given, result in zip(together, solved(engine, together), strict=True):
            expected = alone[next(place for place, other in enumerate(windows) if other is given)]
            torch.testing.assert_close(result.latent, expected.latent, atol=1e-5, rtol=0)
            torch.testing.assert_close(result.carry.latent, expected.carry.latent, atol=1e-5, rtol=0)
            assert torch.equal(result.carry.condition, expected.carry.condition)


def test_equal_lengths_share_a_solve_and_batches_are_never_padded(
    networks: Acoustic, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=1, batch_sizes=(4, 2, 1))
    batches: list[tuple[int, int]] = []
    solve = engine._transformer.velocities

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        batches.append(tuple(x.shape[:2]))
        return solve(x, *args, **kwargs)

    monkeypatch.setattr(engine._transformer, "velocities", counting)
    solved(engine, [window(frames, seed=frames) for frames in [9] * 7 + [4] * 2])
    assert batches == [(4, 31), (2, 31), (1, 31), (2, 13)]


def test_a_window_that_goes_bad_harms_no_other(engine: FlowEngine) -> None:
    good = window(20, seed=1)
    broken = window(20, seed=2)
    broken.hidden[3, 5] = torch.nan
    endless = window(20, seed=3)
    endless.hidden[0, 0] = torch.inf
    (expected,) = solved(engine, [good])
    results = engine.solve([broken, good, endless, good])
    assert isinstance(results[0], NonFiniteError)
    assert isinstance(results[2], NonFiniteError)
    for place in (1, 3):
        assert torch.equal(results[place].latent, expected.latent)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (FlowWindow(torch.zeros(0, 32), 0, 0, None), "hidden must be"),
        (FlowWindow(torch.zeros(201, 32), 0, 0, None), "hidden must be"),
        (FlowWindow(torch.zeros(5, 31), 0, 0, None), "hidden must be"),
        (FlowWindow(torch.zeros(32), 0, 0, None), "hidden must be"),
        (FlowWindow(torch.zeros(5, 32), 0, 1, Carry(torch.zeros(4, 6), torch.zeros(6, 5))), "carry must be"),
        (FlowWindow(torch.zeros(5, 32), 0, 1, Carry(torch.zeros(5, 6), torch.zeros(6, 6))), "carry must be"),
        (FlowWindow(torch.zeros(5, 32), -1, 0, None), "negative"),
        (FlowWindow(torch.zeros(5, 32), 2**64, 0, None), "too big"),
    ],
)
def test_a_malformed_window_is_named_in_its_place(engine: FlowEngine, bad: FlowWindow, message: str) -> None:
    results = engine.solve([window(5, seed=1), bad])
    assert isinstance(results[0], FlowResult)
    assert isinstance(results[1], ValueError | OverflowError)
    assert message in str(results[1])


def test_no_windows_no_results(engine: FlowEngine, networks: Acoustic) -> None:
    assert engine.solve([]) == []
    assert VocoderEngine(networks.vocoder, device="cpu").decode([], []) == []


CROPS = [(0, 0), (44032, 132096), (0, 132096), (44032, 0), (1, 511), (512 * 300, 512 * 388)]


@pytest.mark.parametrize("crop", CROPS)
def test_decoding_only_what_is_kept_gives_the_same_sound(networks: Acoustic, crop: tuple[int, int]) -> None:
    latent = torch.randn(4, 689, generator=torch.Generator().manual_seed(1))
    whole = networks.vocoder(latent[None])[0]
    (sound,) = VocoderEngine(networks.vocoder, device="cpu").decode([latent], [crop])
    assert isinstance(sound, Tensor)
    expected = whole[:, crop[0] : whole.shape[1] - crop[1]]
    torch.testing.assert_close(sound, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("batch_sizes", [(1,), (4, 2, 1), (8, 1)])
def test_vocoder_batches_give_the_solo_sound(networks: Acoustic, batch_sizes: tuple[int, ...]) -> None:
    engine = VocoderEngine(networks.vocoder, device="cpu", batch_sizes=batch_sizes)
    generator = torch.Generator().manual_seed(2)
    latents = [torch.randn(4, length, generator=generator) for length in (40, 300, 40, 300, 40, 40, 689)]
    latents[4][0, 0] = torch.nan
    crops = [(0, 0), (44032, 512), (512, 0), (44032, 512), (0, 0), (0, 512), (44032, 132096)]
    results = engine.decode(latents, crops)
    assert isinstance(results.pop(4), NonFiniteError)
    del latents[4], crops[4]
    for latent, crop, sound in zip(latents, crops, results, strict=True):
        (alone,) = VocoderEngine(networks.vocoder, device="cpu").decode([latent], [crop])
        assert sound.shape == (2, 512 * latent.shape[1] - sum(crop))
        torch.testing.assert_close(sound, alone, atol=2e-6, rtol=0)
        assert sound.abs().max() <= 1.0


@pytest.mark.parametrize(
    ("latent", "crop"),
    [
        (torch.zeros(3, 9), (0, 0)),
        (torch.zeros(4, 0), (0, 0)),
        (torch.zeros(4), (0, 0)),
        (torch.zeros(4, 9), (512 * 4, 512 * 5)),
        (torch.zeros(4, 9), (-1, 0)),
    ],
)
def test_a_malformed_latent_is_named_in_its_place(
    networks: Acoustic, latent: Tensor, crop: tuple[int, int]
) -> None:
    engine = VocoderEngine(networks.vocoder, device="cpu")
    results = engine.decode([latent, torch.zeros(4, 5)], [crop, (0, 0)])
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], Tensor)


@pytest.mark.parametrize(
    ("precision", "message"), [("tf32", "precision tf32"), ("int4", "'int4': one of float32, tf32")]
)
def test_a_precision_that_cannot_be_honoured_is_refused_by_name(
    networks: Acoustic, precision: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FlowEngine(networks.encoder, networks.transformer, device="cpu", precision=precision)
    with pytest.raises(ValueError, match=message):
        VocoderEngine(networks.vocoder, device="cpu", precision=precision)


def test_networks_of_different_checkpoints_are_refused() -> None:
    other = {**MICRO, "condition_encoder": MICRO["condition_encoder"] | {"out_dim": 8}}
    with pytest.raises(ValueError, match="8 channels"):
        FlowEngine(make_acoustic(other, seed=1).encoder, make_acoustic().transformer, device="cpu")


def test_batch_sizes_must_reach_down_to_one(networks: Acoustic) -> None:
    with pytest.raises(ValueError, match="batch sizes"):
        VocoderEngine(networks.vocoder, device="cpu", batch_sizes=(4, 2))


def test_compiled_stages_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced and functionalised as ever, but run by PyTorch's kernels: no compiler is needed here.
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **kw: compile_module(module, backend="aot_eager", **kw)
    )
    plain, compiled = make_acoustic(seed=12), make_acoustic(seed=12)
    engines = [
        (
            FlowEngine(networks.encoder, networks.transformer, device="cpu", steps=2, compiled=on),
            VocoderEngine(networks.vocoder, device="cpu", compiled=on),
        )
        for networks, on in ((plain, False), (compiled, True))
    ]
    assert all(block._compiled_call_impl for block in compiled.transformer.transformer_blocks)
    for frames in (9, 30):
        got, expected = (solved(flow, [window(frames, seed=frames)])[0] for flow, _ in engines)
        torch.testing.assert_close(got.latent, expected.latent, atol=1e-5, rtol=0)
    got, expected = (vocoder.decode([expected.latent], [(0, 512)])[0] for _, vocoder in engines)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_compiler_that_does_not_work_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise OSError("no such compiler")

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **kw: compile_module(module, backend=broken, **kw)
    )
    networks = make_acoustic(seed=13)
    with pytest.raises(ValueError, match=r"(?s)compiled: .*no such compiler"):
        FlowEngine(networks.encoder, networks.transformer, device="cpu", compiled=True)
    with pytest.raises(ValueError, match=r"(?s)compiled: .*no such compiler"):
        VocoderEngine(networks.vocoder, device="cpu", compiled=True)
