"""Command line of the load test: one run of perf_analyzer per number of clients, then the report."""

import argparse
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from client.loadtest import figures, report, runs


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="loadtest",
        description="Load a server with perf_analyzer over gRPC streaming and report what listeners get.",
    )
    made.add_argument(
        "--url",
        default="localhost:8001",
        help="of one server's gRPC door (default %(default)s), not of a balancer: perf_analyzer sends all "
        "songs of a client on one gRPC stream (beyond 16 clients they share streams), and up to six streams "
        "on one connection; a balancer picks a server for a stream or a connection, so songs don't spread",
    )
    made.add_argument("--model", default="music3", help="default %(default)s")
    made.add_argument(
        "--concurrency", type=_levels, default=[1, 2, 4, 8], metavar="N,N,...", help="default 1,2,4,8"
    )
    made.add_argument(
        "--songs-per-client", type=_positive, default=2, metavar="N", help="at each concurrency (default 2)"
    )
    made.add_argument(
        "--seconds", type=float, help="length of every song; default: what the inputs say (30 and 60)"
    )
    made.add_argument(
        "--inputs", type=Path, default=runs.SHIPPED_INPUTS, help="songs in perf_analyzer's format; some ship"
    )
    made.add_argument(
        "--warm-up", type=int, default=1, metavar="N", help="songs before the measurement (default 1)"
    )
    made.add_argument(
        "--out", type=Path, default=Path("loadtest"), help="folder of the report (default loadtest)"
    )
    made.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="of each run (default 3600)")
    made.add_argument("--perf-analyzer", metavar="PATH", help="the program; default: the one on PATH")
    made.add_argument("--library-path", metavar="DIR", help="of libraries that it needs")
    return made


def _levels(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        test = _measure(arguments)
    except (runs.RunError, figures.ExportError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report.table(test.levels))
    for path in report.write(test, arguments.out):
        print(path)
    return 0


def _measure(arguments: argparse.Namespace) -> report.LoadTest:
    program = runs.find_perf_analyzer(arguments.perf_analyzer)
    songs: dict[int, list[figures.SongTrace]] = {}
    with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
        inputs, export = Path(folder) / "inputs.json", Path(folder) / "export.json"
        kinds = runs.write_inputs(arguments.inputs, inputs, seconds=arguments.seconds)

        def run(concurrency: int, count: int) -> list[figures.SongTrace]:
            line = runs.command(
                program,
                url=arguments.url,
                model=arguments.model,
                inputs=inputs,
                concurrency=concurrency,
                songs=count,
                export=export,
            )
            runs.run(
                line,
                export=export,
                timeout_s=arguments.timeout,
                library_path=arguments.library_path,
                log=_say,
            )
            found = figures.read_export(export).get(concurrency, [])
            if len(found) < count:
                raise runs.RunError(f"only {len(found)} of {count} songs came; the server's log says why")
            return found

        if arguments.warm_up:
            run(1, arguments.warm_up)
        for concurrency in arguments.concurrency:
            songs[concurrency] = run(concurrency, concurrency * arguments.songs_per_client)
    settings = {
        "server": arguments.url,
        "songs": f"{kinds} kinds, {_lengths(songs)}",
        "asked from": f"{platform.node()}, {len(os.sched_getaffinity(0))} cores",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    levels = [figures.summarize(concurrency, traces) for concurrency, traces in songs.items()]
    return report.LoadTest(settings, levels, songs)


def _lengths(songs: dict[int, list[figures.SongTrace]]) -> str:
    lengths = sorted({round(song.length_s) for traces in songs.values() for song in traces})
    return f"{lengths[0]} s long" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} s long"


def _say(text: str) -> None:
    print(f"loadtest: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
