"""A server under mixed songs for some minutes: nothing may grow, and a checked song may not change.

    python -m tests.soak.soak --minutes 10

Clients sing short and long songs, cancel, run into deadlines, send junk and come in bursts, over gRPC and
HTTP, after a peak that gives pools their size. Every few seconds all pause: every slot must be free, the
checked song's bytes are compared, and memory, shared memory, open files and threads are read, so that no
reading depends on what happened to be running.
Exit codes: 0 flat; 1 something grew (see `growth`), a song changed or ended unexpectedly, too few readings.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from client import DeadlinePassed, InvalidRequest, Music3Client, Music3Error
from tests.soak.growth import LEAST_READINGS, Growth, judge
from tests.triton.server import ROOT, TritonServer
from tests.triton.songs import CAPTION, LYRICS, STAGES, audit, note_threads, sing, together

CLIENTS = 3
PEAKS = 4
EXTRA_MINUTES = 30.0  # at most, where a busy machine leaves too few readings
ROUND_S = 4.0
CHECKED = {"seed": 7, "max_frames": 30}
SONG_WITHIN_S = 240.0
_KIND_UNITS = {"rss": ("MiB", 1024.0**2), "shm": ("MiB", 1024.0**2), "files": ("", 1.0), "threads": ("", 1.0)}


class Tally:
    """Counts of what was asked and what came, from all clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.came: Counter[str] = Counter()
        self.unexpected: list[str] = []

    def count(self, kind: str, outcome: str, *, unexpected: str | None = None) -> None:
        with self._lock:
            self.asked[kind] += 1
            self.came[outcome] += 1
            if unexpected:
                self.unexpected.append(f"{kind}: {unexpected}")


class Listener:
    """One client with its own random choices."""

    def __init__(self, server: TritonServer, tally: Tally, *, seed: int) -> None:
        self._http_url, self._tally = server.http_url, tally
        self._client, self._draw = Music3Client(server.grpc_url), random.Random(seed)
        # What is done how often, and the error that it should end with.
        self._acts: list[tuple[int, Callable[[], object], type[Music3Error] | None]] = [
            (8, self._short, None),
            (1, self._long, None),
            (3, self._cancel, None),
            (2, self._late, DeadlinePassed),
            (4, self._junk, InvalidRequest),
            (1, self._burst, None),
            (2, self._http, None),
            (1, self._http_gone, None),
        ]

    def act(self) -> None:
        """Do one thing and count what came of it."""
        weights = [weight for weight, _, _ in self._acts]
        ((_, what, expected),) = self._draw.choices(self._acts, weights)
        kind = what.__name__.strip("_")
        try:
            what()
        except Music3Error as error:
            fine = expected is not None and isinstance(error, expected)
            self._tally.count(kind, type(error).__name__, unexpected=None if fine else repr(error))
        except Exception as error:
            self._tally.count(kind, type(error).__name__, unexpected=repr(error))
        else:
            # A deadline may be met.
            junk_passed = expected is InvalidRequest
            self._tally.count(kind, "done", unexpected="was accepted" if junk_passed else None)

    def close(self) -> None:
        self._client.close()

    def _seed(self) -> int:
        return self._draw.randrange(2**63)

    def _broken_off(self) -> int:
        """Frames of a song that nobody waits for: some end before they are missed, some have many windows."""
        return self._draw.choice([40, 80, 160, 3000])

    def _short(self) -> None:
        frames = self._draw.randint(1, 40)
        song = sing(self._client, seed=self._seed(), max_frames=frames, deadline_s=SONG_WITHIN_S)
        if song.frames != frames:
            raise AssertionError(f"{song.frames} frames instead of {frames}")

    def _long(self) -> None:
        frames = self._draw.randint(190, 310)
        song = sing(self._client, seed=self._seed(), max_frames=frames, deadline_s=SONG_WITHIN_S)
        if song.frames != frames:
            raise AssertionError(f"{song.frames} frames instead of {frames}")

    def _cancel(self) -> None:
        with self._client.stream(CAPTION, LYRICS, seed=self._seed(), max_frames=self._broken_off()):
            time.sleep(self._draw.uniform(0.0, 1.5))

    def _late(self) -> None:
        deadline_s = self._draw.uniform(0.05, 1.0)
        sing(self._client, seed=self._seed(), max_frames=self._broken_off(), deadline_s=deadline_s)

    def _junk(self) -> None:
        junk: list[dict[str, Any]] = [
            {"lyrics": " \n"},
            {"caption": ""},
            {"caption": "x" * 20_001},
            {"max_frames": 9001},
            {"seed": -1},
            {"lyrics": "la " * 20_000},
        ]
        sing(self._client, deadline_s=SONG_WITHIN_S, **self._draw.choice(junk))

    def _burst(self) -> None:
        def one(seed: int, frames: int) -> Callable[[], object]:
            return lambda: sing(self._client, seed=seed, max_frames=frames, deadline_s=SONG_WITHIN_S)

        made = together([one(self._seed(), self._draw.randint(1, 8)) for _ in range(12)])
        for result in made:
            if isinstance(result, Music3Error):
                raise result

    def _http(self) -> None:
        with self._post(self._draw.randint(1, 20)) as answer:
            if b"finish_reason" not in answer.read():
                raise AssertionError("the answer over HTTP has no end")

    def _http_gone(self) -> None:
        with self._post(self._broken_off()) as answer:
            answer.read(1)

    def _post(self, frames: int) -> Any:
        body = {"caption": CAPTION, "lyrics": LYRICS, "seed": self._seed(), "max_frames": frames}
        data = json.dumps(body | {"audio_encoding": "s16_base64"}).encode()
        url = f"{self._http_url}/v2/models/music3/generate_stream"
        return urllib.request.urlopen(urllib.request.Request(url, data), timeout=SONG_WITHIN_S)


class Readings:
    """Figures of the server's processes over time."""

    def __init__(self, server: TritonServer) -> None:
        self._server, self._since_s = server, time.monotonic()
        self._pids = {"server": server.pid}
        for model in STAGES:
            (self._pids[model],) = server.stub_pids(model)
        self.time_s: list[float] = []
        self.series: dict[str, list[float]] = {}

    def take(self) -> None:
        """Read everything once. Raises KeyError when a process is gone."""
        server = self._server
        found: dict[str, float] = {"shm total": sum(server.shared_memory_bytes().values())}
        for kind, figures in (
            ("rss", server.rss_bytes()),
            ("files", server.open_files()),
            ("threads", server.threads()),
        ):
            for name, pid in self._pids.items():
                found[f"{kind} {name}"] = figures[pid]
        self.time_s.append(round(time.monotonic() - self._since_s, 1))
        for name, value in found.items():
            self.series.setdefault(name, []).append(value)


def soak(server: TritonServer, *, minutes: float, seed: int) -> tuple[Readings, Tally, list[str]]:
    """Load a server; readings, counts, and what went wrong apart from growth."""
    tally, problems = Tally(), []
    listeners = [Listener(server, tally, seed=seed + index) for index in range(CLIENTS)]
    readings = Readings(server)
    first: str | None = None
    end_s = time.monotonic() + 60 * minutes
    latest_s = end_s + 60 * EXTRA_MINUTES
    try:
        with Music3Client(server.grpc_url) as client:
            _peak(client, seed=seed)
            note_threads(server)
            while _goes_on(len(readings.time_s), end_s=end_s, latest_s=latest_s) and not problems:
                _round(listeners)
                try:
                    audit(server)
                    song = sing(client, deadline_s=SONG_WITHIN_S, **CHECKED)
                    audit(server)
                    readings.take()
                except (Music3Error, AssertionError, KeyError, OSError) as error:
                    problems.append(f"after {readings.time_s[-1:]} s: {error!r}")
                    break
                digest = hashlib.sha256(song.audio.tobytes()).hexdigest()
                first = first or digest
                if digest != first:
                    problems.append(f"the checked song changed after {readings.time_s[-1]} s")
                print(f"{readings.time_s[-1]:7.1f} s: {sum(tally.asked.values())} acts", file=sys.stderr)
    finally:
        for listener in listeners:
            listener.close()
    return readings, tally, problems + tally.unexpected


def _goes_on(readings: int, *, end_s: float, latest_s: float) -> bool:
    """Whether there is another round: on a busy machine it takes longer, rather than judge by too few."""
    now_s = time.monotonic()
    return now_s < end_s or (readings < LEAST_READINGS and now_s < latest_s)


def _peak(client: Music3Client, *, seed: int) -> None:
    """More at once than there will be again: pools and shared memory get the size that load gives them.

    Of many lengths, as the songs that follow: what a library keeps for the shapes that it has met is filled.
    """
    draw = random.Random(seed)
    sizes = [[310] * 8 + [40] * 16]
    for _ in range(PEAKS - 1):
        sizes.append([draw.randint(190, 310) for _ in range(8)] + [draw.randint(1, 40) for _ in range(16)])
    for songs in sizes:
        made = together(
            [
                lambda frames=frames, n=n: sing(
                    client, seed=seed + n, max_frames=frames, deadline_s=SONG_WITHIN_S
                )
                for n, frames in enumerate(songs)
            ]
        )
        for result in made:
            if isinstance(result, Music3Error):
                raise result


def _round(listeners: Sequence[Listener]) -> None:
    """All clients at work for a while; each finishes what it began."""
    end_s = time.monotonic() + ROUND_S

    def run(listener: Listener) -> None:
        while time.monotonic() < end_s:
            listener.act()

    threads = [threading.Thread(target=run, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plot(readings: Readings, judged: Mapping[str, Growth], path: Path) -> None:
    """One panel for each kind of figure, one line for each process."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    for panel, (kind, (unit, scale)) in zip(panels.flat, _KIND_UNITS.items(), strict=True):
        for name, values in readings.series.items():
            if name.split()[0] == kind:
                change = judged.get(name)
                label = name.split()[1] + (f" {change.percent:+.1f} %" if change else "")
                panel.plot(readings.time_s, [value / scale for value in values], ".-", label=label)
        panel.set(title=kind, ylabel=unit, xlabel="s", ylim=0)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(readings: Readings, tally: Tally, problems: list[str], out: Path) -> bool:
    """Write soak.json and soak.png, print the figures; whether all was well."""
    judged: dict[str, Growth] = {}
    try:
        judged = judge(readings.series)
    except ValueError as error:
        problems.append(str(error))
    problems += [f"{name} grew by {found.percent:.1f} %" for name, found in judged.items() if found.grew]
    figures = {
        "acts": dict(tally.asked),
        "outcomes": dict(tally.came),
        "seconds": readings.time_s,
        "series": readings.series,
        "growth": {name: vars(found) | {"percent": found.percent} for name, found in judged.items()},
        "problems": problems,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_text(json.dumps(figures, indent=1))
    plot(readings, judged, out / "soak.png")
    print(f"acts: {dict(tally.asked)}\noutcomes: {dict(tally.came)}\nreadings: {len(readings.time_s)}")
    for name, found in judged.items():
        scale = _KIND_UNITS[name.split()[0]][1]
        print(f"{name:16} {found.first / scale:9.1f} -> {found.last / scale:9.1f}  {found.percent:+.1f} %")
    for problem in problems:
        print(f"PROBLEM {problem}")
    print(f"{'not well' if problems else 'flat'}; figures and plot in {out}")
    return not problems


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="build.sh soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default 10")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do; default 0")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), arguments.out / "server.log"
        arguments.out.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        make = [sys.executable, "-m", "python_backend_models.tiny_checkpoint", str(folder / "tiny")]
        subprocess.run(make, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)
        with TritonServer(checkpoint=folder / "tiny", log_path=log) as server:
            found = soak(server, minutes=arguments.minutes, seed=arguments.seed)
    return 0 if report(*found, arguments.out) else 1


if __name__ == "__main__":
    sys.exit(main())
