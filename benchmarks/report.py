"""What the benchmarks share: alternating measurement, tables, JSON and where results go."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def alternate(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each run in every round, taken in turn, so that a machine's drift meets all alike."""
    for _ in range(warm_up):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def clock_of(threads: int) -> tuple[Callable[[], float], str]:
    """The clock for work on that many threads, and its name.

    One thread's processor time hardly depends on what else runs on the machine; on an idle machine it is the
    time that passes. With more threads only the latter means anything.
    """
    return (time.process_time, "processor time") if threads == 1 else (time.perf_counter, "wall time")


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the round-by-round ratios."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats with three significant digits."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def cpu_name() -> str:
    """The processor's name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def write_json(name: str, figures: Mapping[str, Any]) -> Path:
    """Write `benchmarks/results/NAME.json` with the machine beside the figures."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n", encoding="utf-8")
    return path
