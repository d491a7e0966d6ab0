"""Runs perf_analyzer against a server, once per number of clients."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from client.errors import InvalidRequest
from client.songs import frames_for

ENCODING: Final = "s16_base64"
SHIPPED_INPUTS: Final = Path(__file__).with_name("inputs.json")
_SHOWN_LINES: Final = 15
# perf_analyzer 2.51 asks the server's statistics before and after, and ends without an export when no request
# was counted in between: the server counts one a moment after its last response, which may be the only one.
_UNCOUNTED: Final = "failed to find the requested model version"
_MOST_TRIES: Final = 3


class RunError(Exception):
    """perf_analyzer can't be had or didn't do what was asked; the message says what to do."""


def find_perf_analyzer(path: str | None) -> str:
    """The program: the one that is named, else the one on PATH.

    Raises:
        RunError: there is none.
    """
    found = shutil.which(path or "perf_analyzer")
    if found is None:
        raise RunError(
            f"there is no {path or 'perf_analyzer'}: ./build.sh loadtest brings one, NVIDIA's Triton SDK "
            "container has one, and --perf-analyzer names another"
        )
    return found


def write_inputs(source: Path, target: Path, *, seconds: float | None) -> int:
    """Copy songs for perf_analyzer, with sound as base64 and, if given, one length for all.

    Returns:
        how many songs there are.

    Raises:
        RunError: the file isn't perf_analyzer's input format with captions and lyrics, or no song can be
            that long.
    """
    try:
        songs: list[dict[str, Any]] = json.loads(source.read_text(encoding="utf-8"))["data"]
        if not songs or any("caption" not in song or "lyrics" not in song for song in songs):
            raise ValueError("a song lacks its caption or its lyrics")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f'{source}: not {{"data": [{{"caption": [...], "lyrics": [...]}}]}} ({error})'
        ) from error
    try:
        frames = {} if seconds is None else {"max_frames": [frames_for(seconds)]}
    except InvalidRequest as error:
        raise RunError(str(error)) from None
    prepared = [song | frames | {"audio_encoding": [ENCODING]} for song in songs]
    target.write_text(json.dumps({"data": prepared}, ensure_ascii=False), encoding="utf-8")
    return len(songs)


def command(
    program: str, *, url: str, model: str, inputs: Path, concurrency: int, songs: int, export: Path
) -> list[str]:
    """The command line of one run."""
    return [
        *(program, "-m", model, "-u", url, "-i", "grpc", "--async", "--streaming"),
        *("--input-data", str(inputs)),
        *("--concurrency-range", str(concurrency), "--request-count", str(songs)),
        *("--profile-export-file", str(export)),
    ]


def run(
    arguments: Sequence[str],
    *,
    export: Path,
    timeout_s: float,
    library_path: str | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Run it, with `library_path` before the loader's other folders, and see that it wrote its export.

    Once or twice more where it came too early for the server's statistics.

    Raises:
        RunError: with the end of what it printed.
    """
    environment = dict(os.environ)
    if library_path:
        others = environment.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = f"{library_path}:{others}" if others else library_path
    for tries_left in reversed(range(_MOST_TRIES)):
        log(shlex.join(arguments))
        export.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"perf_analyzer was not done after {timeout_s:g} s (--timeout)") from None
        except OSError as error:
            raise RunError(f"perf_analyzer could not be started: {error}") from error
        # Whatever the exit code: the export is what the report reads, and whether it holds as many songs as
        # were asked for is checked there.
        if export.is_file():
            return
        if not (tries_left and _UNCOUNTED in done.stdout):
            break
        log("the server had not counted perf_analyzer's requests yet; once more")
    end = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
    raise RunError(f"perf_analyzer ended with exit code {done.returncode}; the end of what it said:\n{end}")
