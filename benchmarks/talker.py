"""The talker against diffusers' autoregressive loop, and how a step's cost grows.

One random mid-size checkpoint (hidden 1024, 8 backbone layers, 4 depth layers, real vocabulary) in the
checkpoint's dtype. Both sides load the same files. Prints tables; writes JSON and a plot.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.report import RESULTS, alternate, median_ratio, table, write_json
from python_backend_models import checkpoint
from python_backend_models.contract import FRAME_RATE_HZ
from python_backend_models.engine.kv_cache import bytes_per_page
from python_backend_models.engine.runner import FrameRunner
from python_backend_models.engine.talker import SongPlan, TalkerEngine, ring_frames
from python_backend_models.prompt import unconditional_twin
from tests.parity.oracles import library

PROMPT_TOKENS = 200
PAGE_TOKENS = 256
SONGS_TOGETHER = 8
SONG_COUNTS = (1, 2, 4, 8, 16)
POSITIONS = (100, 500, 1000, 2000, 4000, 8000)


def make_plan(seed: int, frames: int) -> SongPlan:
    """A song with a random prompt of 200 tokens."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 256, (PROMPT_TOKENS - 3,), generator=generator).tolist()
    prompt = [151644, *text, 151645, 151669]
    return SongPlan(prompt, unconditional_twin(prompt), seed, frames)


class Ours:
    """This project's engine."""

    def __init__(self, root: Path, dtype: torch.dtype) -> None:
        backbone = checkpoint.load(root, checkpoint.BACKBONE, dtype=dtype)
        depth = checkpoint.load(root, checkpoint.DEPTH_DECODER, dtype=dtype)
        self.runner = FrameRunner(
            backbone,
            depth,
            slots=max(SONG_COUNTS),
            pages=2 * max(SONG_COUNTS) * 6 + 80,
            page_tokens=PAGE_TOKENS,
            ring_frames=ring_frames(1),
        )

    def songs(self, plans: list[SongPlan]) -> None:
        """Write these songs together, to their caps."""
        engine = TalkerEngine(self.runner)
        for key, plan in enumerate(plans):
            engine.admit(key, plan)
            engine.request_window(key)
        waiting = set(range(len(plans)))
        while waiting:
            for key, _ in engine.step()[0]:
                waiting.discard(key)
                engine.release(key)

    def step_seconds(self, songs: int, position: int, *, repeats: int) -> float:
        """Median seconds of a frame step of `songs` songs whose rows hold `position` tokens."""
        pool = self.runner.pool
        per_row = -(-(position + repeats + 2) // PAGE_TOKENS)
        pages = [(pool.reserve(per_row), pool.reserve(per_row)) for _ in range(songs)]
        slots = list(range(songs))
        generator = torch.Generator().manual_seed(0)
        seconds = []
        with torch.inference_mode():
            for slot in slots:
                self.runner.place(slot, seed=slot, tokens=position, pages=pages[slot])
                hidden = torch.randn(self.runner.state.hidden[slot].shape, generator=generator)
                self.runner.state.hidden[slot] = hidden.to(self.runner.dtype)
            for repeat in range(repeats):
                rows = [(pages[slot], position + repeat + 1) for slot in slots]
                start = time.perf_counter()
                self.runner.step(slots, rows)
                seconds.append(time.perf_counter() - start)
        for row_pages in pages:
            for row in row_pages:
                pool.release(row)
        return statistics.median(seconds[1:])

    def depth_loops(self) -> dict[str, Callable[[], object]]:
        """The depth loop with its 8-slot cache, and the same walk recomputing the prefix at each codebook."""
        depth = self.runner.depth
        inputs = torch.randn(2, 8, depth.config["hidden_size"]).to(self.runner.dtype)

        @torch.inference_mode()
        def cached() -> None:
            cache = depth.start()
            depth(inputs[:, :2], 0, cache)
            for position in range(2, 8):
                depth(inputs[:, position : position + 1], position, cache)

        @torch.inference_mode()
        def recomputed() -> None:
            for length in range(2, 9):
                cache = depth.start()
                depth(inputs[:, :length], 0, cache)

        return {"cached": cached, "recomputed": recomputed}


class Diffusers:
    """diffusers 0.42.1's own autoregressive block over transformers' Qwen3."""

    def __init__(self, root: Path, dtype: torch.dtype) -> None:
        qwen = library("transformers.models.qwen3.modeling_qwen3").Qwen3ForCausalLM
        depth = library(
            "diffusers.models.transformers.minimax_music3_rvq_depth_decoder"
        ).MiniMaxMusic3RVQDepthDecoder
        self.components = SimpleNamespace(
            language_model=qwen.from_pretrained(root / "language_model", dtype=dtype).eval(),
            rvq_depth_decoder=depth.from_pretrained(root / "rvq_depth_decoder", torch_dtype=dtype).eval(),
            frame_rate=FRAME_RATE_HZ,
            _execution_device=torch.device("cpu"),
        )
        self.block = library(
            "diffusers.modular_pipelines.minimax_music3.encoders"
        ).MiniMaxMusic3AutoregressiveStep()
        self.state = library("diffusers.modular_pipelines.modular_pipeline").PipelineState

    def song(self, plan: SongPlan) -> Tensor:
        """Write one song to its cap; `[1, frames, 8 * hidden]`."""
        state = self.state()
        state.set("text_ids", torch.tensor([plan.prompt, plan.twin]))
        state.set("audio_duration", plan.max_frames / FRAME_RATE_HZ + 1e-6)
        state.set("generator", torch.Generator().manual_seed(plan.draw_seed))
        _, state = self.block(self.components, state)
        return state.get("frame_hiddens")


def compare(ours: Ours, theirs: Diffusers, *, frames: int, rounds: int) -> list[dict[str, float]]:
    """Frames per second of 1 and of 8 songs, and the ratio in the same rounds."""
    plans = [make_plan(seed, frames) for seed in range(SONGS_TOGETHER)]
    if theirs.song(plans[0]).shape[1] != frames:
        raise RuntimeError("the random checkpoint drew a stop; take another seed")
    results = []
    for count in (1, SONGS_TOGETHER):
        seconds = alternate(
            {
                "ours": lambda count=count: ours.songs(plans[:count]),
                "diffusers": lambda count=count: [theirs.song(plan) for plan in plans[:count]],
            },
            rounds=rounds,
        )
        results.append(
            {
                "songs": count,
                "ours_frames_per_s": count * frames / statistics.median(seconds["ours"]),
                "diffusers_frames_per_s": count * frames / statistics.median(seconds["diffusers"]),
                "ratio": median_ratio(seconds["diffusers"], seconds["ours"]),
            }
        )
    return results


def growth(ours: Ours, *, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Step time against the number of songs and against the position, with the bytes of KV read."""
    config = ours.runner.backbone.config
    token_bytes = bytes_per_page(config, 1, ours.runner.dtype)
    by_songs = [
        {"songs": songs, "ms": 1e3 * ours.step_seconds(songs, 500, repeats=repeats)} for songs in SONG_COUNTS
    ]
    by_position = [
        {
            "position": position,
            "ms": 1e3 * ours.step_seconds(1, position, repeats=repeats),
            "kv_read_mb": 2 * position * token_bytes / 1e6,
        }
        for position in POSITIONS
    ]
    return {"by_songs": by_songs, "by_position": by_position}


def plot(figures: dict, path: Path) -> None:
    """Throughput, and growth with songs and with position."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    labels = [f"{row['songs']} song(s)" for row in figures["comparison"]]
    for offset, side in ((-0.2, "ours"), (0.2, "diffusers")):
        heights = [row[f"{side}_frames_per_s"] for row in figures["comparison"]]
        left.bar([index + offset for index in range(len(labels))], heights, 0.4, label=side)
    left.set(title="Autoregressive throughput", ylabel="frames/s", xticks=range(len(labels)))
    left.set_xticklabels(labels)
    left.legend()
    songs, position = figures["by_songs"], figures["by_position"]
    middle.plot([row["songs"] for row in songs], [row["ms"] for row in songs], "o-")
    middle.set(title="Step time by songs (position 500)", xlabel="songs", ylabel="ms", ylim=0)
    right.plot([row["position"] for row in position], [row["ms"] for row in position], "o-")
    right.set(title="Step time by position (one song)", xlabel="tokens in the cache", ylabel="ms", ylim=0)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a mid-size checkpoint folder")
    parser.add_argument("--frames", type=int, default=25, help="frames of each compared song")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of alternating measurement")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.precision)
    ours, theirs = Ours(arguments.checkpoint, dtype), Diffusers(arguments.checkpoint, dtype)
    figures = {
        "precision": arguments.precision,
        "frames": arguments.frames,
        "comparison": compare(ours, theirs, frames=arguments.frames, rounds=arguments.rounds),
        **growth(ours, repeats=8),
    }
    loops = alternate(ours.depth_loops(), rounds=20)
    figures["depth_loop"] = {
        "cached_ms": 1e3 * statistics.median(loops["cached"]),
        "recomputed_ms": 1e3 * statistics.median(loops["recomputed"]),
        "ratio": median_ratio(loops["recomputed"], loops["cached"]),
    }
    print(f"\nTalker, {arguments.precision}, {arguments.threads} thread(s): frames per second\n")
    rows = [list(row.values()) for row in figures["comparison"]]
    print(table(["songs", "this engine", "diffusers in sequence", "ratio"], rows))
    print("\nStep time by number of songs, 500 tokens in each row\n")
    print(table(["songs", "ms per step"], [list(row.values()) for row in figures["by_songs"]]))
    print("\nStep time by position, one song\n")
    print(
        table(["position", "ms per step", "KV read, MB"], [list(r.values()) for r in figures["by_position"]])
    )
    print("\nDepth loop of one song\n")
    print(
        table(["8-slot cache, ms", "prefix recomputed, ms", "ratio"], [list(figures["depth_loop"].values())])
    )
    path = write_json("talker", figures)
    plot(figures, RESULTS / "talker.png")
    print(f"\n{path} and talker.png beside it")


if __name__ == "__main__":
    main()
