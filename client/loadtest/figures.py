"""From perf_analyzer's profile export to the figures a listener and an operator care about.

The export has, per request, when it was sent and when each response came (nanoseconds), and the responses'
outputs. Songs are asked for as `s16_base64`: an output that a response lacks is then an empty string, where
perf_analyzer writes stray numbers for those of other types.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FRAME_BYTES: Final = 4  # two channels of 16 bits
RATE_HZ: Final = 32_000
_NS: Final = 1e9


class ExportError(Exception):
    """The export isn't what perf_analyzer writes for this server; the message says where."""


@dataclass(frozen=True)
class SongTrace:
    """When the sound of one song came.

    Attributes:
        sent_s: when it was asked for, on the export's clock.
        arrivals_s: of each chunk, after `sent_s`.
        audio_s: length of each chunk's sound.
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    audio_s: tuple[float, ...]

    @property
    def first_audio_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def total_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def length_s(self) -> float:
        return sum(self.audio_s)

    @property
    def real_time_factor(self) -> float:
        """Time to the last chunk over the song's length: below 1 it is made faster than it is heard."""
        return self.total_s / self.length_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one chunk and the next."""
        return tuple(
            later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        )

    @property
    def stalls_s(self) -> tuple[float, ...]:
        """Silences of a player that starts with the first chunk and plays what it has."""
        stalls = []
        played_out_s = self.arrivals_s[0] + self.audio_s[0]
        for arrival, audio in zip(self.arrivals_s[1:], self.audio_s[1:], strict=True):
            if arrival > played_out_s:
                stalls.append(arrival - played_out_s)
                played_out_s = arrival
            played_out_s += audio
        return tuple(stalls)


def read_export(path: Path) -> dict[int, list[SongTrace]]:
    """The songs of an export by concurrency.

    Raises:
        ExportError: naming what is wrong with the file.
    """
    try:
        export = json.loads(path.read_text(encoding="utf-8"))
        experiments = export["experiments"]
        return {
            int(each["experiment"]["value"]): [_trace(request) for request in each["requests"]]
            for each in experiments
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path}: not a profile export of perf_analyzer ({error!r})") from error


def _trace(request: Mapping[str, Any]) -> SongTrace:
    sent_ns = request["timestamp"]
    arrivals, lengths = [], []
    for stamp_ns, outputs in zip(request["response_timestamps"], request["response_outputs"], strict=True):
        sound = outputs["audio_base64"]
        if not sound:
            continue  # the empty final response
        size = len(sound) * 3 // 4 - sound[-2:].count("=")
        arrivals.append((stamp_ns - sent_ns) / _NS)
        lengths.append(size / FRAME_BYTES / RATE_HZ)
    if not arrivals:
        raise ExportError(
            "a song has no sound: did it fail (the server's log says why), and did the inputs ask for "
            'audio_encoding "s16_base64"?'
        )
    return SongTrace(sent_ns / _NS, tuple(arrivals), tuple(lengths))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values don't exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Level:
    """Figures of one concurrency.

    Attributes:
        audio_per_second: seconds of sound made per second of the run, all clients together.
        stalled_songs: songs in which a player would have fallen silent.
        stall_s: those silences, all songs together.
    """

    concurrency: int
    songs: int
    first_audio_p50_s: float
    first_audio_p90_s: float
    first_audio_max_s: float
    gap_p50_s: float
    gap_p90_s: float
    gap_max_s: float
    real_time_factor_p50: float
    real_time_factor_p90: float
    stalled_songs: int
    stall_s: float
    audio_s: float
    wall_s: float
    audio_per_second: float


def summarize(concurrency: int, songs: Sequence[SongTrace]) -> Level:
    """One concurrency's figures over its songs, at least one."""
    first = [song.first_audio_s for song in songs]
    gaps = [gap for song in songs for gap in song.gaps_s]
    factors = [song.real_time_factor for song in songs]
    audio_s = sum(song.length_s for song in songs)
    wall_s = max(song.sent_s + song.total_s for song in songs) - min(song.sent_s for song in songs)
    return Level(
        concurrency=concurrency,
        songs=len(songs),
        first_audio_p50_s=percentile(first, 0.5),
        first_audio_p90_s=percentile(first, 0.9),
        first_audio_max_s=max(first),
        gap_p50_s=percentile(gaps, 0.5),
        gap_p90_s=percentile(gaps, 0.9),
        gap_max_s=max(gaps, default=math.nan),
        real_time_factor_p50=percentile(factors, 0.5),
        real_time_factor_p90=percentile(factors, 0.9),
        stalled_songs=sum(1 for song in songs if song.stalls_s),
        stall_s=sum(sum(song.stalls_s) for song in songs),
        audio_s=audio_s,
        wall_s=wall_s,
        audio_per_second=audio_s / wall_s,
    )
