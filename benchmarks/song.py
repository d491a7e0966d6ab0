"""Songs through the real server: what listeners get at 1, 2, 4 and 8 clients, and where the time goes.

Serving's own cost is measured where it can't hide: one song alone, the talker not writing ahead, so that one
stage works at a time; what the song takes beyond the engines' own times is overhead. Under load, engines work
side by side, so there the processor time of the server and the front door stands for it.
Prints tables; writes JSON, a plot and the server's logs.
"""

import argparse
import json
import os
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, table, write_json
from client import Music3Client
from client.loadtest.figures import SongTrace, summarize
from tests.triton.server import TritonServer
from tests.triton.songs import CAPTION, LYRICS, fresh_metrics, grown

CLIENTS = (1, 2, 4, 8)
FRAMES = 210
STAGES = ("talker", "dit", "vocoder")
ENGINE_SECONDS = {
    "talker": "music3_talker_busy_seconds_total",
    "dit": "music3_dit_batch_seconds_total",
    "vocoder": "music3_vocoder_batch_seconds_total",
}
_TICKS_HZ = os.sysconf("SC_CLK_TCK")


class Readings:
    """What the server, its processes and the kernel had counted at a moment."""

    def __init__(self, server: TritonServer) -> None:
        self.counted = fresh_metrics(server)
        self.triton = {stage: statistics_of(server, stage) for stage in ("dit", "vocoder")}
        pids = {"tritonserver": [server.pid]} | {
            model: server.stub_pids(model) for model in ("music3", *STAGES)
        }
        self.processor_s = {name: sum(map(processor_seconds, each)) for name, each in pids.items()}


def statistics_of(server: TritonServer, model: str) -> dict[str, float]:
    """Triton's own statistics of a model: requests, executions, and seconds of each part."""
    with urllib.request.urlopen(f"{server.http_url}/v2/models/{model}/stats", timeout=10) as answer:
        stats = json.load(answer)["model_stats"][0]
    of = stats["inference_stats"]
    # Of an execution, once for the batch; the figures of requests count it for each.
    batches_ns = sum(each["compute_infer"]["ns"] for each in stats["batch_stats"])
    return {
        "requests": of["success"]["count"],
        "executions": stats["execution_count"],
        "queue_s": of["queue"]["ns"] / 1e9,
        "execute_s": batches_ns / 1e9,
    }


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far, its threads' included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_HZ


def sing(url: str, *, seed: int, frames: int, began_s: float) -> SongTrace:
    """One song by a client of its own."""
    arrivals, lengths = [], []
    with Music3Client(url) as client:
        sent_s = time.monotonic()
        for chunk in client.stream(CAPTION, LYRICS, seed=seed, max_frames=frames):
            arrivals.append(time.monotonic() - sent_s)
            lengths.append(len(chunk.audio) / chunk.sample_rate_hz)
    return SongTrace(sent_s - began_s, tuple(arrivals), tuple(lengths))


def sing_together(url: str, *, clients: int, frames: int) -> list[SongTrace]:
    """As many songs at once."""
    barrier, began_s = threading.Barrier(clients), time.monotonic()

    def one(seed: int) -> SongTrace:
        barrier.wait(60)
        return sing(url, seed=seed, frames=frames, began_s=began_s)

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, range(clients)))


def level(server: TritonServer, *, clients: int, frames: int) -> dict[str, Any]:
    """Figures of a number of clients, and where their time went."""
    before = Readings(server)
    songs = sing_together(server.grpc_url, clients=clients, frames=frames)
    after = Readings(server)
    listeners = summarize(clients, songs)
    delta = grown(before.counted, after.counted)
    engine_s = {stage: delta[ENGINE_SECONDS[stage]] for stage in STAGES}
    processor_s = {name: after.processor_s[name] - before.processor_s[name] for name in after.processor_s}
    serving_s = processor_s["tritonserver"] + processor_s["music3"]
    return {
        "clients": clients,
        "listeners": asdict(listeners),
        "share_of_wall": {stage: seconds / listeners.wall_s for stage, seconds in engine_s.items()}
        | {"music3": processor_s["music3"] / listeners.wall_s}
        | {"tritonserver": processor_s["tritonserver"] / listeners.wall_s},
        "serving_over_engines": serving_s / sum(engine_s.values()),
        "windows": {
            stage: windows_of(stage, delta, before.triton[stage], after.triton[stage])
            for stage in ("dit", "vocoder")
        },
        "processor_s": processor_s,
    }


def windows_of(
    stage: str, delta: Mapping[str, float], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """A window's time at a stage, in seconds: in Triton's queue, computing, and around the computation."""
    triton = {name: after[name] - before[name] for name in after}
    requests, executions = triton["requests"], triton["executions"]
    computing_s = delta[ENGINE_SECONDS[stage]]
    asked_s = delta[f"music3_stage_seconds_total {stage}"]
    return {
        "windows": requests,
        "windows per batch": requests / executions,
        "waits for a batch": triton["queue_s"] / requests,
        "computes": computing_s / executions,
        "adapter": (triton["execute_s"] - computing_s) / executions,
        "asked to answered": asked_s / requests,
    }


def overhead(server: TritonServer, *, frames: int) -> dict[str, float]:
    """One song alone on a server whose talker doesn't write ahead: seconds by part, and serving's share."""
    sing(server.grpc_url, seed=1, frames=3, began_s=0.0)
    before = Readings(server).counted
    with Music3Client(server.grpc_url) as client:
        client.check_ready()  # the connection is there
        sent_s = time.monotonic()
        # To the stream's end: the last sound comes before the song has ended at the server.
        client.generate(CAPTION, LYRICS, seed=2, max_frames=frames)
        total_s = time.monotonic() - sent_s
    delta = grown(before, Readings(server).counted)
    engines = {stage: delta[ENGINE_SECONDS[stage]] for stage in STAGES}
    asked = {stage: delta[f"music3_stage_seconds_total {stage}"] for stage in STAGES}
    queued_s = delta.get("music3_queue_seconds_sum", 0.0)
    engines_s = sum(engines.values())
    return {
        **{f"{stage} computes": seconds for stage, seconds in engines.items()},
        **{f"Triton around {stage}": asked[stage] - engines[stage] for stage in STAGES},
        "waits for a place": queued_s,
        "music3": delta["music3_song_seconds_sum"] - queued_s - sum(asked.values()),
        "client and the way there": total_s - delta["music3_song_seconds_sum"],
        "song": total_s,
        "overhead": (total_s - engines_s) / engines_s,
    }


def plot(levels: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What listeners get and where the time goes, by the number of clients."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    clients = [each["clients"] for each in levels]
    for axes, key, title in (
        (left, "first_audio_p50_s", "Time to first audio, s"),
        (middle, "audio_per_second", "Seconds of sound per second"),
    ):
        axes.plot(clients, [each["listeners"][key] for each in levels], "o-")
        axes.set(title=title, xlabel="clients at once", ylim=0, xticks=clients)
    for name in levels[0]["share_of_wall"]:
        right.plot(clients, [each["share_of_wall"][name] for each in levels], "o-", label=name)
    right.set(title="Busy share of the wall time", xlabel="clients at once", ylim=0, xticks=clients)
    right.legend()
    figure.savefig(path, dpi=120)


def show(figures: Mapping[str, Any]) -> None:
    """The tables."""
    levels = figures["levels"]
    print(f"\nListeners, songs of {figures['frames']} frames\n")
    wanted = ("first_audio_p50_s", "first_audio_max_s", "real_time_factor_p50", "stalled_songs", "stall_s")
    rows = [
        [each["clients"], *(each["listeners"][key] for key in wanted), each["listeners"]["audio_per_second"]]
        for each in levels
    ]
    header = ["clients", "first audio, s", "slowest", "RTF", "songs that stall", "silent s", "sound s per s"]
    print(table(header, rows))
    print("\nBusy share of the wall time: engines by their own clocks, the others by processor time\n")
    shares = list(levels[0]["share_of_wall"])
    rows = [
        [each["clients"], *each["share_of_wall"].values(), each["serving_over_engines"]] for each in levels
    ]
    print(table(["clients", *shares, "(music3 + tritonserver) / engines"], rows))
    for stage in ("dit", "vocoder"):
        print(f"\nA window at {stage}, seconds\n")
        rows = [[each["clients"], *each["windows"][stage].values()] for each in levels]
        print(table(["clients", *levels[0]["windows"][stage]], rows))
    if "alone" in figures:
        print("\nOne song alone, one stage at a time, seconds; overhead as a share of the engines' times\n")
        print(table(["part", "s"], list(figures["alone"].items())))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a mid-size checkpoint folder")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="numbers of clients at once")
    parser.add_argument("--frames", type=int, default=FRAMES, help="of each song; from 201 on, two windows")
    parser.add_argument("--threads", type=int, default=0, help="of each stage on a CPU; 0: half the cores")
    parser.add_argument("--no-alone", action="store_true", help="leave the song alone out")
    arguments = parser.parse_args(argv)
    RESULTS.mkdir(exist_ok=True)
    figures: dict[str, Any] = {"frames": arguments.frames, "levels": []}
    settings = {"MUSIC3_CPU_THREADS": str(arguments.threads), "MUSIC3_METRICS_INTERVAL_S": "0.5"}

    def server(name: str, **more: str) -> TritonServer:
        log = RESULTS / f"song-{name}.log"
        log.unlink(missing_ok=True)
        return TritonServer(checkpoint=arguments.checkpoint, log_path=log, environment=settings | more)

    if not arguments.no_alone:
        with server("alone", MUSIC3_TALKER_RUN_AHEAD_WINDOWS="0") as running:
            figures["alone"] = overhead(running, frames=arguments.frames)
    with server("levels") as running:
        sing(running.grpc_url, seed=1, frames=3, began_s=0.0)
        for clients in arguments.clients:
            figures["levels"].append(level(running, clients=clients, frames=arguments.frames))
            print(f"{clients} client(s): {figures['levels'][-1]['listeners']['wall_s']:.0f} s", flush=True)
    show(figures)
    path = write_json("song", figures)
    plot(figures["levels"], RESULTS / "song.png")
    print(f"\n{path} and song.png beside it")


if __name__ == "__main__":
    main()
