"""`music3`: songs from a running server into files.

Exit codes: 0 all songs are there; 1 the server failed on one, or songs failed for different reasons;
2 the command line, a file or a player is wrong; 3 the server refused the request; 4 nobody answers or the
server has no place; 5 a deadline passed or the server cancelled; 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from client import songs
from client.audio_files import FORMATS
from client.display import make_display
from client.errors import Cancelled, InvalidRequest, Music3Error, ServerUnavailable
from client.jobs import Job, Outcome, Runner
from client.music3_client import Music3Client
from client.player import Program, find_program
from client.wire import DEFAULT_MODEL, DEFAULT_URL

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
UNAVAILABLE: Final = 4
CANCELLED: Final = 5

_EPILOG: Final = """\
texts:    --caption and --lyrics take the text itself, @FILE, or - for standard input (@@ begins a plain @)
formats:  by the ending of --out: .wav (written as it arrives), .flac, .ogg, .mp3
takes:    --seed 1-8 or --seed 5 --takes 8 make several songs; the seed is added to the file's name
batch:    one JSON object a line: caption, lyrics and optionally name, seed, takes, max_frames or seconds,
          format; run it again and only what is missing is made
exit:     0 done; 1 the server failed; 2 wrong use; 3 refused; 4 unavailable; 5 deadline; 130 Ctrl-C
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="music3",
        description="Stream songs from a Music 3 server into files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    song = parser.add_argument_group("the song")
    caption = song.add_mutually_exclusive_group()
    caption.add_argument("--caption", metavar="TEXT", help="what it sounds like")
    caption.add_argument("--caption-file", metavar="FILE", type=Path)
    lyrics = song.add_mutually_exclusive_group()
    lyrics.add_argument("--lyrics", metavar="TEXT", help="what is sung, with [Verse] and [Chorus] tags")
    lyrics.add_argument("--lyrics-file", metavar="FILE", type=Path)
    song.add_argument("--seed", metavar="N", help="a number, a range 1-8, or a list 1,4,9 (default 0)")
    song.add_argument("--takes", metavar="N", type=int, help="that many songs, from --seed upwards")
    length = song.add_mutually_exclusive_group()
    length.add_argument("--max-frames", metavar="N", type=int, help="longest length, in frames (25 a second)")
    length.add_argument("--seconds", metavar="S", type=float, help="longest length, in seconds")
    song.add_argument(
        "--batch", metavar="FILE", type=Path, help="make the songs of a JSONL file instead; see below"
    )

    output = parser.add_argument_group("the result")
    output.add_argument("--out", metavar="FILE", type=Path, help="default song.wav")
    output.add_argument("--out-dir", metavar="DIR", type=Path, help="the folder of a batch (default songs)")
    output.add_argument(
        "--format", choices=[ending[1:] for ending in FORMATS], help="of a batch's songs (default wav)"
    )
    output.add_argument("--float", action="store_true", help="32-bit float WAV rather than 16-bit")
    output.add_argument("--play", action="store_true", help="play the song while it arrives")

    server = parser.add_argument_group("the server")
    server.add_argument(
        "--url",
        default=os.environ.get("MUSIC3_URL", DEFAULT_URL),
        help=f"host:port of its gRPC door, grpcs://host:port for TLS (default MUSIC3_URL or {DEFAULT_URL})",
    )
    server.add_argument("--model", default=DEFAULT_MODEL, help="default music3")
    server.add_argument("--wait", metavar="S", type=float, default=0.0, help="wait for it to become ready")
    server.add_argument("--deadline", metavar="S", type=float, help="give a song up after so many seconds")
    server.add_argument(
        "--jobs", metavar="N", type=int, help="songs in flight when there are several (default 4)"
    )
    server.add_argument(
        "--retries",
        metavar="N",
        type=int,
        help="ask again when the server has no place or the connection breaks (default 0; in a batch 5)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    previous = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        return _run(arguments)
    except InvalidRequest as error:
        print(f"music3: {error}", file=sys.stderr)
        return USAGE
    except ServerUnavailable as error:
        print(f"music3: {error}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt as interrupt:
        number = signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT
        print("music3: interrupted", file=sys.stderr)
        return 128 + number
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(arguments: argparse.Namespace) -> int:
    jobs, in_flight = _jobs(arguments)
    program = _player(arguments, jobs)
    retries = arguments.retries if arguments.retries is not None else (5 if arguments.batch else 0)
    if retries < 0:
        raise InvalidRequest(f"--retries: {retries} is less than 0")
    if arguments.deadline is not None and not 0 < arguments.deadline < math.inf:
        raise InvalidRequest(f"--deadline: {arguments.deadline} is not a number of seconds above 0")
    with Music3Client(arguments.url, model=arguments.model) as client:
        if arguments.wait > 0:
            client.wait_until_ready(arguments.wait)
        with make_display() as display:
            runner = Runner(
                client,
                display,
                in_flight=in_flight,
                retries=retries,
                deadline_s=arguments.deadline,
                program=program,
            )
            outcomes = runner.run(jobs)
    for outcome in outcomes:
        if outcome.error is None and not outcome.skipped:
            print(outcome.summary())
    if arguments.batch:
        made = sum(outcome.error is None and not outcome.skipped for outcome in outcomes)
        there = sum(outcome.skipped for outcome in outcomes)
        print(f"{made} songs made, {there} there already, {len(outcomes) - made - there} failed")
    return exit_code(outcomes)


def _jobs(arguments: argparse.Namespace) -> tuple[list[Job], int]:
    in_flight = arguments.jobs if arguments.jobs is not None else 4
    if in_flight < 1:
        raise InvalidRequest(f"--jobs: {in_flight} is less than 1")
    if arguments.batch is not None:
        for name in (
            "caption",
            "caption_file",
            "lyrics",
            "lyrics_file",
            "seed",
            "takes",
            "max_frames",
            "seconds",
            "out",
        ):
            if getattr(arguments, name) is not None:
                option = "--" + name.replace("_", "-")
                raise InvalidRequest(f"{option}: not with --batch, whose lines say it for each song")
        out_dir = arguments.out_dir if arguments.out_dir is not None else Path("songs")
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"--out-dir: {out_dir}: {error.strerror}") from None
        jobs = songs.batch(
            arguments.batch,
            out_dir=out_dir,
            audio_format=arguments.format or "wav",
            float_wav=arguments.float,
        )
        return jobs, in_flight
    for name in ("out_dir", "format"):
        if getattr(arguments, name) is not None:
            raise InvalidRequest(f"--{name.replace('_', '-')}: only with --batch; use --out")
    if arguments.caption == "-" and arguments.lyrics == "-":
        raise InvalidRequest("--lyrics: only one of the two can come from standard input")
    jobs = songs.single(
        caption=_text(arguments, "caption"),
        lyrics=_text(arguments, "lyrics"),
        seeds=songs.parse_seeds(arguments.seed or "0", takes=arguments.takes),
        max_frames=arguments.max_frames if arguments.seconds is None else songs.frames_for(arguments.seconds),
        out=arguments.out if arguments.out is not None else Path("song.wav"),
        float_wav=arguments.float,
    )
    return jobs, in_flight


def _text(arguments: argparse.Namespace, field: str) -> str:
    file = getattr(arguments, f"{field}_file")
    if file is not None:
        return songs.read_file(f"--{field}-file", file)
    value = getattr(arguments, field)
    if value is None:
        raise InvalidRequest(f"--{field} or --{field}-file is required")
    return songs.read_text(f"--{field}", value)


def _player(arguments: argparse.Namespace, jobs: Sequence[Job]) -> Program | None:
    if not arguments.play:
        return None
    if len(jobs) > 1:
        raise InvalidRequest("--play: one song at a time")
    return find_program()


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """The common reason of all failures, or 1 when they differ."""
    codes = {_code_of(outcome.error) for outcome in outcomes if outcome.error is not None}
    if not codes:
        return OK
    return codes.pop() if len(codes) == 1 else FAILED


def _code_of(error: Exception) -> int:
    if isinstance(error, InvalidRequest):
        return REFUSED
    if isinstance(error, ServerUnavailable):
        return UNAVAILABLE
    if isinstance(error, Cancelled):
        return CANCELLED
    return FAILED if isinstance(error, Music3Error) else USAGE


class _Terminated(KeyboardInterrupt):
    """SIGTERM, cleaned up after in the way of Ctrl-C."""


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
