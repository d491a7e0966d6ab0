"""The acoustic stages against vllm-omni's and diffusers', and against bare matrix products.

One random mid-size checkpoint in float32, loaded by all three sides, which must agree on what they compute.
Windows of one song and of eight, the vocoder, the share of `torch.matmul`'s rate, growth with batch and
length, and what each saving of work saves. Prints tables; writes JSON and a plot.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.products import bare_seconds, products_of
from benchmarks.report import RESULTS, alternate, clock_of, median_ratio, table, write_json
from python_backend_models import checkpoint
from python_backend_models.chunking import window_latents, windows
from python_backend_models.contract import EULER_STEPS, VOCODER_RATE_HZ, WINDOW_FRAMES
from python_backend_models.engine.acoustic import (
    FlowEngine,
    FlowWindow,
    VocoderEngine,
    draw_noise,
    noise_seed,
)
from tests.acoustic_models import Acoustic
from tests.parity.acoustic_oracles import DiffusersStage, vllm_omni_flow, vllm_omni_vocoder

SONGS_TOGETHER = 8
BATCHES = (1, 2, 4, 8)
LENGTHS_FRAMES = (25, 50, 100, 150, 200)
CPU = torch.device("cpu")
# Of a whole solve, so little that the growth tables don't take all day; a step costs the same in any.
GROWTH_STEPS = 4
# All sides must mean the same by a window; random weights of this size differ by 1e-5.
AGREEMENT = 1e-3
FIRST, AMID = windows(3 * WINDOW_FRAMES)[:2]


def load(root: Path) -> Acoustic:
    """The three networks and the checkpoint's own tensors, for the references."""
    encoder, transformer, vocoder = (
        checkpoint.load(root, component, device=CPU)
        for component in (checkpoint.CONDITION_ENCODER, checkpoint.FLOW_TRANSFORMER, checkpoint.VOCODER)
    )
    components = (checkpoint.CONDITION_ENCODER, checkpoint.FLOW_TRANSFORMER, checkpoint.VOCODER)
    configs = {each.folder: checkpoint.read_config(root, each.folder) for each in components}
    for config in configs.values():
        for key in [key for key in config if key.startswith("_")]:
            del config[key]
    tensors = {each.folder: dict(checkpoint.open_component(root, each)) for each in components}
    return Acoustic(encoder, transformer, vocoder, configs, tensors)


class Sides:
    """The same windows solved and decoded by this project's engines, vllm-omni's code and diffusers'."""

    def __init__(self, acoustic: Acoustic, *, steps: int) -> None:
        self.steps = steps
        self.acoustic = acoustic
        self.flow = FlowEngine(acoustic.encoder, acoustic.transformer, device=CPU, steps=steps)
        self.vocoder = VocoderEngine(acoustic.vocoder, device=CPU)
        self.vllm_omni = vllm_omni_flow(acoustic)
        self.vllm_omni_vocoder = vllm_omni_vocoder(acoustic, folded=True)
        self.diffusers = DiffusersStage(acoustic)

    def window(self, seed: int, frames: int = WINDOW_FRAMES) -> FlowWindow:
        """A first window of the song of that seed."""
        width = 8 * self.acoustic.configs["condition_encoder"]["condition_hidden_dim"]
        generator = torch.Generator().manual_seed(seed)
        return FlowWindow(torch.randn(frames, width, generator=generator), seed, 0, None)

    def solvers(self, count: int) -> dict[str, Callable[[], list[Tensor]]]:
        """Latents of the first windows of `count` songs, by each side."""
        given = [self.window(seed) for seed in range(count)]
        channels = self.acoustic.configs["transformer"]["in_channels"]

        def ours() -> list[Tensor]:
            return [result.latent for result in checked(self.flow.solve(given))]

        @torch.inference_mode()
        def vllm_omni() -> list[Tensor]:
            return [
                self.vllm_omni(
                    self.vllm_omni.aligned_condition(window.hidden[None]),
                    generator=torch.Generator().manual_seed(noise_seed(window.seed, 0)),
                    num_steps=self.steps,
                )[0]
                for window in given
            ]

        @torch.inference_mode()
        def diffusers() -> list[Tensor]:
            solved = []
            for window in given:
                shape = (channels, window_latents(len(window.hidden)))
                noise = draw_noise(window.seed, 0, shape, device=CPU)
                solved += self.diffusers.latents(window.hidden, noises=[noise], steps=self.steps)
            return [latent[0] for latent in solved]

        return {"this engine": ours, "vllm-omni": vllm_omni, "diffusers": diffusers}

    def decoders(self, crop: tuple[int, int]) -> dict[str, Callable[[], list[Tensor]]]:
        """Sound of a full window, by each side; the references decode it all and crop."""
        latent = self.latent()

        def cropped(sound: Tensor) -> list[Tensor]:
            return [sound[0, :, crop[0] : sound.shape[-1] - crop[1]]]

        with_inference = torch.inference_mode()
        return {
            "this engine": lambda: checked(self.vocoder.decode([latent], [crop])),
            "vllm-omni": with_inference(lambda: cropped(self.vllm_omni_vocoder(latent[None]))),
            "diffusers": with_inference(lambda: cropped(self.diffusers.vocoder(latent[None]))),
        }

    def latent(self, latents: int = window_latents(WINDOW_FRAMES)) -> Tensor:
        """A random latent of a window, of the size that solved ones have."""
        channels = self.acoustic.configs["vocoder"]["latent_channels"]
        return torch.randn(channels, latents, generator=torch.Generator().manual_seed(5))


def checked(results: Sequence[Any]) -> list[Any]:
    """The results; an exception among them is raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


def compare(
    runs: Mapping[str, Callable[[], list[Tensor]]], *, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Median seconds of each side, ours against the faster one in the same rounds, largest difference."""
    outputs: dict[str, list[Tensor]] = {}
    seconds = alternate(
        {name: lambda n=name, r=run: outputs.update({n: r()}) for name, run in runs.items()},
        rounds=rounds,
        warm_up=0,
        clock=clock,
    )
    difference = max(
        (mine - other).abs().max().item()
        for others in outputs.values()
        for mine, other in zip(outputs["this engine"], others, strict=True)
    )
    if not difference < AGREEMENT:
        raise RuntimeError(f"the sides do not compute the same: they differ by {difference:.1e}")
    fastest = [min(pair) for pair in zip(seconds["vllm-omni"], seconds["diffusers"], strict=True)]
    return {
        **{name: statistics.median(values) for name, values in seconds.items()},
        "faster reference / this engine": median_ratio(fastest, seconds["this engine"]),
        "largest difference": difference,
    }


def share_of_products(
    run: Callable[[], object], *, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """How near a computation comes to the rate of its matrix products alone."""
    products = products_of(run)
    flop = sum(product.flop * count for product, count in products.items())
    shares, rates, bare_rates, parts = [], [], [], []
    for _ in range(rounds):
        (seconds,) = alternate({"run": run}, rounds=1, warm_up=0, clock=clock)["run"]
        bare = bare_seconds(products, clock=clock, repeats=3)
        total = sum(bare.values())
        shares.append(total / seconds)
        rates.append(flop / seconds / 1e9)
        bare_rates.append(flop / total / 1e9)
        parts.append(sum(bare.get(kind, 0.0) for kind in ("linear", "convolution")) / seconds)
    return {
        "GFLOP": flop / 1e9,
        "GFLOP/s": statistics.median(rates),
        "torch.matmul GFLOP/s": statistics.median(bare_rates),
        "share": statistics.median(shares),
        "weights' products / time": statistics.median(parts),
    }


def growth(sides: Sides, *, rounds: int, clock: Callable[[], float]) -> dict[str, list[dict[str, float]]]:
    """Time of a window, solved and decoded, by batch size and by length."""
    acoustic = sides.acoustic
    batched = FlowEngine(
        acoustic.encoder, acoustic.transformer, device=CPU, steps=GROWTH_STEPS, batch_sizes=(8, 4, 2, 1)
    )
    vocoder = VocoderEngine(acoustic.vocoder, device=CPU, batch_sizes=(8, 4, 2, 1))
    given = [sides.window(seed) for seed in range(max(BATCHES))]
    latent, crop = sides.latent(), AMID.crop_samples
    flow_s = alternate(
        {str(n): lambda n=n: checked(batched.solve(given[:n])) for n in BATCHES}, rounds=rounds, clock=clock
    )
    vocoder_s = alternate(
        {str(n): lambda n=n: checked(vocoder.decode([latent] * n, [crop] * n)) for n in BATCHES},
        rounds=rounds,
        clock=clock,
    )
    by_batch = [
        {
            "windows": n,
            "ms per step and window": 1e3 * statistics.median(flow_s[str(n)]) / n / GROWTH_STEPS,
            "vocoder ms per window": 1e3 * statistics.median(vocoder_s[str(n)]) / n,
        }
        for n in BATCHES
    ]
    lengths = {str(frames): [sides.window(3, frames)] for frames in LENGTHS_FRAMES}
    short = {str(frames): [sides.latent(window_latents(frames))] for frames in LENGTHS_FRAMES}
    flow_s = alternate(
        {name: lambda w=window: checked(batched.solve(w)) for name, window in lengths.items()},
        rounds=rounds,
        clock=clock,
    )
    vocoder_s = alternate(
        {name: lambda z=latents: checked(vocoder.decode(z, [(0, 0)])) for name, latents in short.items()},
        rounds=rounds,
        clock=clock,
    )
    by_length = [
        {
            "frames": frames,
            "latents": window_latents(frames),
            "ms per step": 1e3 * statistics.median(flow_s[str(frames)]) / GROWTH_STEPS,
            "vocoder ms": 1e3 * statistics.median(vocoder_s[str(frames)]),
        }
        for frames in LENGTHS_FRAMES
    ]
    return {"by_batch": by_batch, "by_length": by_length}


def savings(sides: Sides, *, rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """What a window would take longer without each saving, as a share of its solve."""
    network, steps = sides.acoustic.transformer, sides.steps
    latents = window_latents(WINDOW_FRAMES)
    x, condition = sides.latent()[None], sides.acoustic.encoder(sides.window(1).hidden[None])
    tokens, folded, rotary = x.transpose(1, 2), network.fold(), network.rotary(latents)
    share, time_token = network.condition_tokens(condition), network.time_tokens(torch.tensor([0.5]))[0]
    rows = torch.randn(2, 1 + latents, share.shape[2])

    def ends_unfolded() -> None:
        """Both guidance rows through the two maps at either end, as they are stored."""
        network.proj_in(network.preprocess_conv(wide).add_(wide).transpose(1, 2))
        out = network.proj_out(rows[:, 1:]).transpose(1, 2)
        network.postprocess_conv(out).add_(out)

    wide = torch.randn(2, network.preprocess_conv.in_channels, latents)

    def ends_folded() -> None:
        own = tokens @ folded.latent_in
        torch.cat((own + share, own))
        rows[:, 1:] @ folded.latent_out

    def blocks(given: Tensor) -> None:
        given = given.clone()
        for block in network.transformer_blocks:
            given = block(given, rotary)

    runs = {
        "solve": lambda: checked(sides.flow.solve([sides.window(1)])),
        "condition": lambda: network.condition_tokens(condition),
        "ends unfolded": ends_unfolded,
        "ends folded": ends_folded,
        "time": lambda: network.time_tokens(torch.tensor([0.5])),
        "rotary": lambda: network.rotary(latents),
        "rows together": lambda: blocks(rows),
        "rows apart": lambda: (blocks(rows[:1]), blocks(rows[1:])),
        "whole": lambda: checked(sides.vocoder.decode([sides.latent()], [(0, 0)])),
        "kept": lambda: checked(sides.vocoder.decode([sides.latent()], [AMID.crop_samples])),
    }
    del time_token
    with torch.inference_mode():
        measured = {
            name: statistics.median(values)
            for name, values in alternate(runs, rounds=rounds, clock=clock).items()
        }
    per_solve = {
        "condition's share of the input once, not in every step": (steps - 1) * measured["condition"],
        "both ends folded to one matrix each": steps * (measured["ends unfolded"] - measured["ends folded"])
        - steps * measured["condition"],
        "time tokens once, not in every step": steps * measured["time"],
        "rotary tables once per length, not in every step": steps * measured["rotary"],
        "both guidance rows in one batch": steps * (measured["rows apart"] - measured["rows together"]),
    }
    found = [
        {"saving": name, "ms": 1e3 * seconds, "of": "solve", "share": seconds / measured["solve"]}
        for name, seconds in per_solve.items()
    ]
    saved = measured["whole"] - measured["kept"]
    found.append(
        {
            "saving": "only the kept latents decoded (window amid a song)",
            "ms": 1e3 * saved,
            "of": "vocoder",
            "share": saved / measured["kept"],
        }
    )
    return found


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Time per window by side, and growth with batch and length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    rows = figures["comparison"]
    for place, side in enumerate(("this engine", "vllm-omni", "diffusers")):
        heights = [row[side] / row["windows"] for row in rows]
        left.bar([index + 0.27 * (place - 1) for index in range(len(rows))], heights, 0.27, label=side)
    left.set(title="Seconds per window", ylabel=f"s ({figures['clock']})", xticks=range(len(rows)))
    left.set_xticklabels([row["what"] for row in rows], fontsize=7)
    left.legend()
    batch, length = figures["by_batch"], figures["by_length"]
    middle.plot([row["windows"] for row in batch], [row["ms per step and window"] for row in batch], "o-")
    middle.set(title="Step by windows together", xlabel="windows", ylabel="ms per window", ylim=0)
    right.plot([row["latents"] for row in length], [row["ms per step"] for row in length], "o-", label="step")
    right.plot(
        [row["latents"] for row in length], [row["vocoder ms"] for row in length], "s-", label="vocoder"
    )
    right.set(title="One window by length", xlabel="latents", ylabel="ms", ylim=0)
    right.legend()
    figure.savefig(path, dpi=120)


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{title}\n\n" + table(list(rows[0]), [list(row.values()) for row in rows]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a mid-size checkpoint folder")
    parser.add_argument("--steps", type=int, default=EULER_STEPS, help="Euler steps of a solve")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of alternating measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rounds, (clock, clock_name) = arguments.rounds, clock_of(arguments.threads)
    sides = Sides(load(arguments.checkpoint), steps=arguments.steps)
    for warm_up in (sides.solvers(1), sides.decoders(AMID.crop_samples)):
        alternate(warm_up, rounds=0)
    comparison = []
    for what, count, runs in (
        ("one window", 1, sides.solvers(1)),
        (
            f"{SONGS_TOGETHER} windows of {SONGS_TOGETHER} songs",
            SONGS_TOGETHER,
            sides.solvers(SONGS_TOGETHER),
        ),
        ("vocoder, amid a song", 1, sides.decoders(AMID.crop_samples)),
        ("vocoder, whole window", 1, sides.decoders((0, 0))),
    ):
        # Eight windows are eight measurements of one already.
        found = compare(runs, rounds=max(1, rounds // count), clock=clock)
        comparison.append({"what": what, "windows": count, **found})
        show(f"Seconds ({clock_name})", comparison[-1:])
    one, vocoder = comparison[0], comparison[2]
    new_sound_s = AMID.kept_samples / VOCODER_RATE_HZ
    per_second = {
        side: new_sound_s / (one[side] + vocoder[side]) for side in ("this engine", "vllm-omni", "diffusers")
    }
    shares = [
        {"stage": "flow", **share_of_products(sides.solvers(1)["this engine"], rounds=rounds, clock=clock)},
        {
            "stage": "vocoder",
            **share_of_products(sides.decoders(AMID.crop_samples)["this engine"], rounds=rounds, clock=clock),
        },
    ]
    figures = {
        "steps": arguments.steps,
        "clock": clock_name,
        "comparison": comparison,
        "audio_s_per_s": per_second,
        "shares": shares,
        **growth(sides, rounds=max(1, rounds // 2), clock=clock),
        "savings": savings(sides, rounds=rounds, clock=clock),
    }
    show(
        f"Acoustic stages, {arguments.threads} thread(s), {arguments.steps} steps: s ({clock_name})",
        comparison,
    )
    show("Seconds of new sound per second", [per_second])
    show("Share of the rate of bare matrix products", shares)
    show("Growth with the windows solved together", figures["by_batch"])
    show("Growth with a window's length", figures["by_length"])
    show("What each saving saves", figures["savings"])
    path = write_json("acoustic", figures)
    plot(figures, RESULTS / "acoustic.png")
    print(f"\n{path} and acoustic.png beside it")


if __name__ == "__main__":
    main()
