"""The report of a load test: a table, JSON, plots as PNG, and one page that needs nothing beside it."""

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from client.loadtest.figures import Level, SongTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final[tuple[tuple[str, str, str], ...]] = (
    # heading, what it means, attribute of Level
    ("clients", "songs asked for at once", "concurrency"),
    ("songs", "songs that were measured", "songs"),
    ("first p50", "s from request to first sound, half of the songs", "first_audio_p50_s"),
    ("first p90", "the same, nine of ten songs", "first_audio_p90_s"),
    ("gap p50", "s between one chunk of sound and the next", "gap_p50_s"),
    ("gap max", "the longest", "gap_max_s"),
    ("RTF p50", "time to the last chunk over the song's length", "real_time_factor_p50"),
    ("RTF p90", "the same, nine of ten songs", "real_time_factor_p90"),
    ("stalled", "songs whose player would have fallen silent", "stalled_songs"),
    ("silent s", "those silences, all songs together", "stall_s"),
    ("audio/s", "seconds of sound made per second, all clients together", "audio_per_second"),
)
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.3em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}th{background:#f4f4f4}svg{max-width:100%;height:auto}"
    "dt{font-weight:600;float:left;clear:left;width:7em}dd{margin-left:7.5em}"
)
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#c05621", "#999999"


@dataclass(frozen=True)
class LoadTest:
    """What was run and what came of it.

    Attributes:
        settings: what a reader needs to judge the figures, by name.
        levels: by rising concurrency.
        songs: the traces behind each level.
    """

    settings: Mapping[str, Any]
    levels: Sequence[Level]
    songs: Mapping[int, Sequence[SongTrace]]


def _cell(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return "-" if math.isnan(value) else f"{value:.2f}"


def _rows(levels: Sequence[Level]) -> list[list[str]]:
    return [[_cell(getattr(level, attribute)) for _, _, attribute in _COLUMNS] for level in levels]


def table(levels: Sequence[Level]) -> str:
    """The levels as a Markdown table."""
    rows = [[heading for heading, _, _ in _COLUMNS], *_rows(levels)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    rows.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def write(test: LoadTest, folder: Path) -> list[Path]:
    """Write loadtest.json, loadtest.png and loadtest.html; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"loadtest.{kind}" for kind in ("json", "png", "html")]
    paths[0].write_text(_as_json(test), encoding="utf-8")
    figure = draw(test)
    figure.savefig(paths[1], dpi=130)
    paths[2].write_text(page(test, figure), encoding="utf-8")
    return paths


def _as_json(test: LoadTest) -> str:
    levels = [
        {name: None if value != value else value for name, value in asdict(level).items()}  # NaN isn't JSON
        | {"traces": [asdict(song) for song in test.songs[level.concurrency]]}
        for level in test.levels
    ]
    return json.dumps({"settings": dict(test.settings), "levels": levels}, indent=1) + "\n"


def draw(test: LoadTest) -> "Figure":
    """Four plots by concurrency: first sound, gaps, real-time factor, throughput."""
    from matplotlib.figure import Figure  # needed here alone, and not a dependency of the client

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    _spread(axes[0][0], test, lambda song: [song.first_audio_s], "time to first sound", "s")
    _spread(axes[0][1], test, lambda song: song.gaps_s, "gap between chunks of sound", "s")
    _spread(axes[1][0], test, lambda song: [song.real_time_factor], "real-time factor of a song", "")
    axes[1][0].axhline(1.0, color=_ORANGE, linewidth=1, linestyle="--")
    places = range(len(test.levels))
    bars = axes[1][1].bar(places, [level.audio_per_second for level in test.levels], color=_BLUE, width=0.6)
    axes[1][1].bar_label(bars, fmt="%.2f")
    _label(axes[1][1], test, "seconds of sound per second, all clients", "")
    return figure


def _spread(axes: "Axes", test: LoadTest, values: Any, title: str, unit: str) -> None:
    """Every value as a dot, and the median as a line."""
    for place, level in enumerate(test.levels):
        found = sorted(value for song in test.songs[level.concurrency] for value in values(song))
        if found:
            axes.plot([place] * len(found), found, "o", color=_GREY, markersize=4, alpha=0.6)
            axes.plot(
                [place - 0.3, place + 0.3], [found[(len(found) - 1) // 2]] * 2, color=_BLUE, linewidth=3
            )
    _label(axes, test, title, unit)


def _label(axes: "Axes", test: LoadTest, title: str, unit: str) -> None:
    axes.set_title(f"{title} [{unit}]" if unit else title, loc="left", fontsize=11)
    axes.set_xticks(range(len(test.levels)), [str(level.concurrency) for level in test.levels])
    axes.set_xlabel("clients at once")
    axes.set_ylim(bottom=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def page(test: LoadTest, figure: "Figure") -> str:
    """The report as one HTML page with its plots inside."""
    drawing = StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    svg = svg[svg.index("<svg") :]
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    download = base64.b64encode(picture.getvalue()).decode()
    headings = "".join(f"<th>{html.escape(heading)}</th>" for heading, _, _ in _COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in _rows(test.levels)
    )
    meanings = "".join(
        f"<dt>{html.escape(heading)}</dt><dd>{html.escape(meaning)}</dd>" for heading, meaning, _ in _COLUMNS
    )
    settings = "".join(
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(str(value))}</dd>"
        for name, value in test.settings.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load test of MiniMax Music 3</title>'
        f"<style>{_STYLE}</style><h1>Load test of MiniMax Music 3</h1><dl>{settings}</dl>"
        f"<table><tr>{headings}</tr>{body}</table>{svg}"
        f'<p><a download="loadtest.png" href="data:image/png;base64,{download}">the plots, as PNG</a></p>'
        f"<h2>What the columns mean</h2><dl>{meanings}</dl></html>\n"
    )
