"""Full-size networks with random weights on a GPU: how far each stage is from what the device can do.

Weights are made on the device, so nothing is read from disk. Talker: capture time, ms per frame eager, with
the depth loop as a graph and with the whole frame as a graph, prefill, bandwidth, batch independence.
Acoustic: seconds per window, TFLOP/s and SNR by precision and batch. What the budget leaves out is named.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_choices import choices
from benchmarks.report import machine, table, write_json
from python_backend_models import chunking
from python_backend_models.contract import CARRY_LATENTS, CONTEXT_TOKENS, WINDOW_FRAMES
from python_backend_models.engine.acoustic import Carry, FlowEngine, FlowWindow, VocoderEngine
from python_backend_models.engine.frame_step import DepthLoop
from python_backend_models.engine.kv_cache import bytes_per_page, pages_for
from python_backend_models.engine.runner import FrameRunner
from python_backend_models.engine.talker import SongPlan, TalkerEngine, WindowResult, ring_frames
from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.condition_encoder import ConditionEncoder
from python_backend_models.networks.depth_decoder import DepthDecoder
from python_backend_models.networks.flow_transformer import FlowTransformer
from python_backend_models.networks.vocoder import Vocoder
from python_backend_models.official import CONFIGS
from python_backend_models.prompt import unconditional_twin
from python_backend_models.tiny_checkpoint import component_configs

PAGE_TOKENS = 256
# Graphs are recorded for powers of two: 3 and 33 show what padding costs.
SONG_COUNTS = (1, 2, 3, 4, 8, 16, 33, 64)
POSITIONS = (500, 5000)
PREFILL_TOKENS = (500, 5000)
BATCHES = (1, 2, 4, 8)
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
INDEPENDENT_FRAMES = 250
# Seconds that making the acoustic engines and recording their graphs may take: quick precisions, and float32.
_LOAD_S = (30, 90)
# Work of a full window (4 s of new sound), two guidance rows and 30 steps; and of the vocoder amid a song,
# which decodes the 365 latents that the new sound depends on.
WINDOW_TFLOP, VOCODER_TFLOP = 209.3, 1.17
# Dense peaks from NVIDIA's data sheets: TFLOP/s by precision, and GB/s of memory.
PEAKS = {
    "H200": {"float32": 67, "tf32": 495, "bfloat16": 990, "float16": 990, "GB/s": 4800},
    "H100": {"float32": 67, "tf32": 495, "bfloat16": 990, "float16": 990, "GB/s": 3350},
    "A100": {"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312, "GB/s": 2039},
}


class Bench:
    """One run: the device, its clock, and the time that is left."""

    def __init__(self, device: str, *, size: str, budget_s: float, repeats: int) -> None:
        self.device = torch.device(device)
        self.configs = CONFIGS if size == "full" else component_configs(size)
        self.size, self.repeats = size, repeats
        self.deadline_s = time.monotonic() + budget_s
        self.left_out: list[str] = []
        name = machine()["device"]
        self.peaks = next((peaks for key, peaks in PEAKS.items() if key in name), None)

    def affords(self, what: str, seconds: float) -> bool:
        """Whether there is time for something; what there isn't is named at the end."""
        if time.monotonic() + seconds < self.deadline_s:
            return True
        self.left_out.append(what)
        return False

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], *, repeats: int | None = None, calls: int = 1) -> float:
        """Median seconds of a call, the device's work included, over `calls` calls queued at once."""
        run()
        self.sync()
        measured = []
        for _ in range(repeats or self.repeats):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            self.sync()
            measured.append((time.perf_counter() - start) / calls)
        return statistics.median(measured)

    def memory_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None

    def random(
        self, network: Callable[[dict[str, Any]], nn.Module], component: str, dtype: torch.dtype
    ) -> Any:
        """A component's network at this size with random weights, made on the device."""
        with torch.device("meta"):
            made = network(self.configs[component])
        generator = torch.Generator(self.device).manual_seed(7)
        for name, parameter in list(made.named_parameters()):
            weight = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            if parameter.dim() > 1 and not name.endswith("alpha"):
                fan_in = parameter[0].numel()
                weight.normal_(0, 0.7 / fan_in**0.5, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            owner, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))
        return made.to(self.device).eval()


def talker(bench: Bench) -> dict[str, Any]:
    """Frame steps by graph mode, number of songs and position; prefill; depth loop; batch independence."""
    backbone = bench.random(Backbone, "language_model", torch.bfloat16)
    depth = bench.random(DepthDecoder, "rvq_depth_decoder", torch.bfloat16)
    # Stop must not end the songs that are compared below.
    backbone.lm_head.weight.data[0] = 0
    page_bytes = bytes_per_page(backbone.config, PAGE_TOKENS, torch.bfloat16)
    wanted = 2 * max(SONG_COUNTS) * pages_for(max(POSITIONS) + 64, PAGE_TOKENS) + 80
    pages = wanted
    if bench.device.type == "cuda":
        pages = min(wanted, int(torch.cuda.mem_get_info()[0] * 0.85) // page_bytes)
    figures: dict[str, Any] = {"steps": [], "capture_s": {}, "memory_gib": {}, "pool_pages": pages}
    for graphs in ("off", "depth", "frame"):
        if not bench.affords(f"talker with graphs={graphs}", 40):
            continue
        runner = FrameRunner(
            backbone,
            depth,
            slots=max(SONG_COUNTS),
            pages=pages,
            page_tokens=PAGE_TOKENS,
            ring_frames=ring_frames(1),
            graphs=graphs,
        )
        start = time.perf_counter()
        runner.capture()
        bench.sync()
        figures["capture_s"][graphs] = time.perf_counter() - start
        if bench.device.type == "cuda" and runner.graphs != graphs:
            bench.left_out.append(f"graphs={graphs}: a replay differed from the eager step, see the log")
        figures["steps"] += [
            step
            for position in POSITIONS
            for songs in SONG_COUNTS
            if (step := frame_step(bench, runner, graphs, songs, position))
        ]
        if graphs == "depth":
            figures["depth_loop_ms"] = depth_loop_ms(bench, runner)
        if graphs == "frame":
            figures["prefill_ms"] = {
                str(tokens): prefill_ms(bench, runner, tokens) for tokens in PREFILL_TOKENS
            }
            figures["independence"] = independence(bench, runner)
        figures["memory_gib"][graphs] = bench.memory_gib()
        del runner
        release(bench)
    return figures


@torch.inference_mode()
def depth_loop_ms(bench: Bench, runner: FrameRunner) -> dict[str, float]:
    """Milliseconds of one song's depth loop, eager and as it runs in this mode."""
    inputs = runner._depth_inputs(1)
    ways = {"eager": DepthLoop(runner.backbone, runner.depth), runner.graphs: runner._depth_loop}
    return {name: 1e3 * bench.seconds(lambda run=run: run(*inputs), calls=4) for name, run in ways.items()}


def frame_step(
    bench: Bench, runner: FrameRunner, graphs: str, songs: int, position: int
) -> dict[str, Any] | None:
    """Milliseconds of a frame step, and the bandwidth that its reads amount to; `ran` is what ran."""
    label = f"{songs} songs at {position}, graphs={graphs}"
    per_row = pages_for(position + 4 * bench.repeats + 32, PAGE_TOKENS)
    if 2 * songs * per_row > runner.pool.free_pages:
        bench.left_out.append(f"{label}: needs {2 * songs * per_row} pages, {runner.pool.free_pages} fit")
        return None
    if not bench.affords(label, 3):
        return None
    pages = [(runner.pool.reserve(per_row), runner.pool.reserve(per_row)) for _ in range(songs)]
    slots = list(range(songs))
    with torch.inference_mode():
        for slot in slots:
            runner.place(slot, seed=slot, tokens=position, pages=pages[slot])
            runner.state.hidden[slot].normal_()
        rows = [(pages[slot], position + 1) for slot in slots]
        seconds = bench.seconds(lambda: runner.step(slots, rows), calls=4)
    for song in pages:
        for row in song:
            runner.pool.release(row)
    read_bytes = frame_bytes(runner, songs, position)
    return {
        "graphs": graphs,
        "ran": runner.graphs,
        "songs": songs,
        "position": position,
        "ms": 1e3 * seconds,
        "GB/s": read_bytes / seconds / 1e9,
        "of_peak": read_bytes / seconds / 1e9 / bench.peaks["GB/s"] if bench.peaks else None,
    }


def frame_bytes(runner: FrameRunner, songs: int, position: int) -> int:
    """Bytes a frame must read: the backbone and its head once, the depth decoder seven times, the KV."""
    size = runner.dtype.itemsize
    backbone = sum(p.numel() for n, p in runner.backbone.named_parameters() if "embed_tokens" not in n)
    layers = sum(p.numel() for n, p in runner.depth.named_parameters() if n.startswith("layers."))
    heads = sum(p.numel() for n, p in runner.depth.named_parameters() if n.startswith("audio_heads."))
    token = bytes_per_page(runner.backbone.config, 1, runner.dtype)
    return size * (backbone + 7 * layers + heads) + 2 * songs * position * token


def prefill_ms(bench: Bench, runner: FrameRunner, tokens: int) -> float:
    """Milliseconds of both rows' prompt in chunks of 512."""
    pages = runner.pool.reserve(pages_for(tokens, PAGE_TOKENS))
    ids = list(range(tokens))

    @torch.inference_mode()
    def run() -> None:
        for _ in range(2):
            for start in range(0, tokens, 512):
                runner.prefill(ids[start : start + 512], pages, first_position=start)

    seconds = bench.seconds(run, repeats=3)
    runner.pool.release(pages)
    return 1e3 * seconds


def independence(bench: Bench, runner: FrameRunner) -> dict[str, Any] | None:
    """Share of eight songs whose codes are the same alone and together, for 250 frames."""
    if not bench.affords("batch independence", 40):
        return None
    frames = INDEPENDENT_FRAMES if bench.size == "full" else 12
    plans = []
    for seed in range(8):
        ids = torch.randint(0, 150_000 if bench.size == "full" else 256, (60,)).tolist()
        prompt = [151644, *ids, 151645, 151669]
        plans.append(SongPlan(prompt, unconditional_twin(prompt), seed, frames))
    together = codes(runner, plans)
    alone = [codes(runner, [plan])[0] for plan in plans]
    same = sum(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    return {"songs": len(plans), "frames": frames, "equal": same}


def codes(runner: FrameRunner, plans: list[SongPlan]) -> list[Tensor]:
    """The codes of songs of at most two windows, written together."""
    engine = TalkerEngine(runner, read_interval_frames=4 if runner.device.type == "cuda" else 1)
    parts: dict[int, list[Tensor]] = {key: [] for key in range(len(plans))}
    for key, plan in enumerate(plans):
        engine.admit(key, plan)
        engine.request_window(key)
    open_songs = set(parts)
    while open_songs:
        for key, result in engine.step()[0]:
            if not isinstance(result, WindowResult):
                raise result
            parts[key].append(result.codes if result.window.is_last else result.codes[:100])
            if result.window.is_last:
                engine.release(key)
                open_songs.discard(key)
            else:
                engine.request_window(key)
    return [torch.cat(windows).cpu() for windows in parts.values()]


def acoustic(bench: Bench) -> dict[str, Any]:
    """Windows per second by precision and batch, for the flow transformer and the vocoder."""
    generator = torch.Generator(bench.device).manual_seed(3)
    width = bench.configs["condition_encoder"]["condition_hidden_dim"] * 8
    hidden = torch.randn(WINDOW_FRAMES, width, generator=generator, device=bench.device).bfloat16()
    channels = bench.configs["transformer"]["in_channels"]
    condition_width = bench.configs["condition_encoder"]["out_dim"]
    carry = Carry(
        torch.randn(channels, CARRY_LATENTS, generator=generator, device=bench.device),
        torch.randn(condition_width, CARRY_LATENTS, generator=generator, device=bench.device),
    )
    windows = [FlowWindow(hidden, seed, seed, carry if seed % 2 else None) for seed in range(max(BATCHES))]
    latents = torch.randn(
        channels, chunking.window_latents(WINDOW_FRAMES), generator=generator, device=bench.device
    )
    crops = chunking.windows(2 * WINDOW_FRAMES)[1].crop_samples
    figures: dict[str, Any] = {"flow": [], "vocoder": [], "memory_gib": {}}
    exact: dict[str, Tensor] = {}
    for precision in PRECISIONS:
        if not bench.affords(f"load in {precision}", _LOAD_S[precision == "float32"]):
            continue
        start = time.perf_counter()
        try:
            flow = FlowEngine(
                bench.random(ConditionEncoder, "condition_encoder", torch.float32),
                bench.random(FlowTransformer, "transformer", torch.float32),
                device=bench.device,
                precision=precision,
            )
            vocoder = VocoderEngine(
                bench.random(Vocoder, "vocoder", torch.float32), device=bench.device, precision=precision
            )
        except ValueError as error:
            bench.left_out.append(f"{precision}: {error}")
            continue
        bench.sync()
        build_s = time.perf_counter() - start
        stages = {
            "flow": (lambda n, e=flow: e.solve(windows[:n]), WINDOW_TFLOP, lambda out: out[0].latent),
            "vocoder": (
                lambda n, e=vocoder: e.decode([latents] * n, [crops] * n),
                VOCODER_TFLOP,
                lambda out: out[0],
            ),
        }
        for stage, (run, tflop, first) in stages.items():
            result = first(run(1)).float()
            exact.setdefault(stage, result)
            for batch in BATCHES:
                # float32 without tensor cores takes seconds a window; one batch size says it all.
                expected_s = (
                    batch * (4.0 if precision == "float32" else 1.0) * (3 if stage == "flow" else 0.2)
                )
                if precision == "float32" and batch > 1 and bench.size == "full":
                    continue
                if not bench.affords(f"{stage}, {precision}, batch {batch}", expected_s):
                    continue
                seconds = bench.seconds(lambda r=run, n=batch: r(n), repeats=2)
                rate = tflop * batch / seconds if bench.size == "full" else None
                figures[stage].append(
                    {
                        "precision": precision,
                        "batch": batch,
                        "s_per_window": seconds / batch,
                        "TFLOP/s": rate,
                        "of_peak": rate / bench.peaks[precision] if rate and bench.peaks else None,
                        "snr_db": snr_db(exact[stage], result),
                        "load_s": build_s,
                    }
                )
        figures["memory_gib"][precision] = bench.memory_gib()
        del flow, vocoder, stages, run
        release(bench)
    figures["choices"] = choices(bench)
    return figures


def snr_db(exact: Tensor, found: Tensor) -> float:
    """Signal-to-noise ratio in dB; inf for equal tensors."""
    noise = (exact - found).double().square().sum()
    return float("inf") if noise == 0 else (10 * torch.log10(exact.double().square().sum() / noise)).item()


def release(bench: Bench) -> None:
    """Give back the memory of engines that nothing uses any more, and count the peak anew."""
    gc.collect()  # they hold methods of their own: reference counts alone never let go of them
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def show(title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        print(f"\n{title}\n\n" + table(list(rows[0]), [list(row.values()) for row in rows]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--size", choices=("full", "tiny", "small", "mid"), default="full")
    parser.add_argument("--parts", nargs="+", choices=("talker", "acoustic"), default=["talker", "acoustic"])
    parser.add_argument("--budget-s", type=float, default=460, help="seconds; what doesn't fit is named")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "bench gpu: torch finds no CUDA device (--device cpu --size tiny tries the script)\n")
    bench = Bench(
        arguments.device, size=arguments.size, budget_s=arguments.budget_s, repeats=arguments.repeats
    )
    figures: dict[str, Any] = {"size": arguments.size, "context_tokens": CONTEXT_TOKENS}
    for part in arguments.parts:
        figures[part] = {"talker": talker, "acoustic": acoustic}[part](bench)
        release(bench)
        figures["left_out"] = bench.left_out
        write_json("gpu", figures)  # after each part, so that a run that is cut short leaves what it has
    if "talker" in figures:
        show("Frame steps", figures["talker"]["steps"])
        rest = {key: value for key, value in figures["talker"].items() if key != "steps"}
        print(f"\n{rest}")
    if "acoustic" in figures:
        show("Flow transformer, one full window", figures["acoustic"]["flow"])
        show("Vocoder, a window amid a song", figures["acoustic"]["vocoder"])
        show("Other ways to compute a full window", figures["acoustic"]["choices"])
    for line in bench.left_out:
        print(f"left out: {line}")
    print(f"\n{write_json('gpu', figures)}")


if __name__ == "__main__":
    main()
