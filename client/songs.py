"""Which songs a command line asks for: texts from arguments, files or standard input, takes by seed, and
batches from a JSONL file. Everything here raises InvalidRequest with what is wrong and where.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from client.audio_files import format_of
from client.errors import InvalidRequest
from client.jobs import Job, Request
from python_backend_models.contract import FRAME_RATE_HZ, MAX_SONG_FRAMES

_BATCH_KEYS: Final = ("name", "caption", "lyrics", "seed", "takes", "max_frames", "seconds", "format")
_MAX_TAKES: Final = 10_000
_MAX_SECONDS: Final = MAX_SONG_FRAMES / FRAME_RATE_HZ


def read_text(field: str, value: str) -> str:
    """The text an argument stands for: itself, `@FILE`, or `-` for standard input (`@@` begins a plain @)."""
    if value == "-":
        return _decode(f"{field}: standard input", sys.stdin.buffer.read())
    if value.startswith("@@"):
        return value[1:]
    if value.startswith("@"):
        return read_file(field, Path(value[1:]))
    return value


def read_file(field: str, path: Path) -> str:
    """A UTF-8 file's text, without a byte-order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{field}: {path}: {error.strerror}") from None
    return _decode(f"{field}: {path}", raw)


def _decode(what: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what} is not UTF-8 (byte {error.start})") from None


def frames_for(seconds: float) -> int:
    """The frame cap for a length in seconds: 25 frames a second, at least one.

    Raises InvalidRequest unless it is more than 0 and no longer than a song can be.
    """
    # True is an int, and NaN is in no range.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MAX_SECONDS:
        raise InvalidRequest(
            f"seconds: {seconds!r} is out of range; allowed: a number above 0, at most {_MAX_SECONDS:g}"
        )
    return max(1, round(seconds * FRAME_RATE_HZ))


def parse_seeds(text: str, *, takes: int | None = None) -> list[int]:
    """`7`, a range `1-8`, or a list `1,5,9-12`; with `takes`, that many from a single seed upwards."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None:
            raise InvalidRequest(f"seed: {part.strip()!r} is neither a number nor a range like 1-8")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if not 0 <= last - first < _MAX_TAKES:
            raise InvalidRequest(f"seed: the range {part.strip()} is empty or longer than {_MAX_TAKES}")
        seeds.extend(range(first, last + 1))
    if takes is None:
        return seeds
    if len(seeds) != 1:
        raise InvalidRequest("takes: give either several seeds or a number of takes")
    if not 1 <= takes <= _MAX_TAKES:
        raise InvalidRequest(f"takes: {takes} is not within 1 ... {_MAX_TAKES}")
    return list(range(seeds[0], seeds[0] + takes))


def single(
    *, caption: str, lyrics: str, seeds: Sequence[int], max_frames: int | None, out: Path, float_wav: bool
) -> list[Job]:
    """One job per seed; several are told apart by their seed in the file's name."""
    format_of(out)
    if not out.parent.is_dir():
        raise InvalidRequest(f"out: there is no folder {out.parent}")
    jobs = []
    for seed in seeds:
        path = out if len(seeds) == 1 else out.with_name(f"{out.stem}-seed{seed}{out.suffix}")
        request = Request(caption=caption, lyrics=lyrics, seed=seed, max_frames=max_frames)
        jobs.append(Job(name=path.name, request=request, path=path, float_wav=float_wav))
    return jobs


def batch(path: Path, *, out_dir: Path, audio_format: str, float_wav: bool) -> list[Job]:
    """The songs of a JSONL file, one object a line: `caption`, `lyrics` and, optionally, `name`, `seed` (as
    on the command line), `takes`, `max_frames` or `seconds`, `format`. Blank lines are left out."""
    jobs: list[Job] = []
    seen: dict[Path, int] = {}
    # Not splitlines: JSON allows U+2028, U+0085 and others within a text, where that would break the line.
    for number, line in enumerate(read_file("batch", path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            made = _batch_line(line, number, out_dir, audio_format, float_wav)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}, line {number}: {error}") from None
        for job in made:
            if job.path in seen:
                raise InvalidRequest(
                    f"{path}, line {number}: {job.path.name} is line {seen[job.path]}'s already"
                )
            seen[job.path] = number
        jobs.extend(made)
    if not jobs:
        raise InvalidRequest(f"{path}: no songs in it")
    return jobs


def _batch_line(line: str, number: int, out_dir: Path, audio_format: str, float_wav: bool) -> list[Job]:
    try:
        song = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"not JSON ({error})") from None
    if not isinstance(song, dict):
        raise InvalidRequest("not a JSON object")
    for key in song:
        if key not in _BATCH_KEYS:
            raise InvalidRequest(f"{key}: unknown; allowed are {', '.join(_BATCH_KEYS)}")
    for key in ("caption", "lyrics"):
        if not isinstance(song.get(key), str):
            raise InvalidRequest(f"{key}: a text is required")
    name = song.get("name", f"{number:04d}")
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+", name) or name.startswith("."):
        raise InvalidRequest(f"name: {name!r} cannot name a file")
    takes, ending = song.get("takes"), song.get("format", audio_format)
    if takes is not None and not _is_whole(takes):
        raise InvalidRequest(f"takes: {takes!r} is not a whole number")
    seed = song.get("seed", 0)
    if not isinstance(seed, str) and not _is_whole(seed):
        raise InvalidRequest(f"seed: {seed!r} is neither a whole number nor a range")
    return [
        Job(name=job.name, request=job.request, path=job.path, float_wav=float_wav, resumable=True)
        for job in single(
            caption=song["caption"],
            lyrics=song["lyrics"],
            seeds=parse_seeds(str(seed), takes=takes),
            max_frames=_batch_frames(song),
            out=out_dir / f"{name}.{ending}",
            float_wav=float_wav,
        )
    ]


def _batch_frames(song: dict[str, Any]) -> int | None:
    frames, seconds = song.get("max_frames"), song.get("seconds")
    if frames is not None and seconds is not None:
        raise InvalidRequest("seconds: give either max_frames or seconds")
    if seconds is not None:
        return frames_for(seconds)  # whatever JSON has there: it refuses what is no number
    if frames is not None and not _is_whole(frames):
        raise InvalidRequest(f"max_frames: {frames!r} is not a whole number")
    return frames


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
