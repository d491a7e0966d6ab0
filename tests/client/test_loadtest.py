"""The load test's arithmetic on exports made by hand, its report, and what it says when something fails."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from client.loadtest import figures, report, runs
from client.loadtest.__main__ import main, parser
from client.loadtest.figures import ExportError, SongTrace

SECOND = base64.b64encode(bytes(32_000 * 4)).decode()
STRAY = 1_744_830_608  # what perf_analyzer 2.51 writes for an output that a response lacks


def request(sent_s: float, *chunks: tuple[float, float]) -> dict[str, Any]:
    """A song of an export: chunks as (arrival, seconds of sound), then the empty final response."""
    sent_ns = 1_796_187_546_000_000_000 + int(sent_s * 1e9)
    outputs: list[dict[str, Any]] = [
        {
            "audio_base64": base64.b64encode(bytes(round(length * 32_000) * 4)).decode(),
            "audio_s16": STRAY,
            "progress": [1, 2],
        }
        for _, length in chunks
    ]
    arrivals = [sent_ns + int(after * 1e9) for after, _ in chunks]
    return {
        "timestamp": sent_ns,
        "request_inputs": {"caption": "folk"},
        "response_timestamps": [*arrivals, arrivals[-1] + 1000],
        "response_outputs": [*outputs, {"audio_base64": "", "audio_s16": STRAY, "progress": STRAY}],
    }


def write_export(path: Path, *requests: dict[str, Any], concurrency: int = 2) -> Path:
    experiment = {
        "experiment": {"mode": "concurrency", "value": concurrency},
        "requests": list(requests),
        "window_boundaries": [0, 1],
    }
    path.write_text(json.dumps({"experiments": [experiment], "version": "2.51.0"}))
    return path


def test_figures_of_two_songs_by_hand(tmp_path: Path) -> None:
    # The first plays 8 s from 1.0 on; its second chunk is in time, its third 2 s late, its fourth in time.
    first = request(0.0, (1.0, 8.0), (5.0, 4.0), (15.0, 4.0), (18.0, 0.5))
    second = request(2.0, (3.0, 10.0))
    songs = figures.read_export(write_export(tmp_path / "export.json", first, second))[2]
    assert [song.audio_s for song in songs] == [(8.0, 4.0, 4.0, 0.5), (10.0,)]
    assert songs[0].gaps_s == pytest.approx((4.0, 10.0, 3.0))
    assert songs[0].stalls_s == pytest.approx((2.0,))
    assert songs[1].stalls_s == songs[1].gaps_s == ()
    level = figures.summarize(2, songs)
    assert (level.concurrency, level.songs, level.stalled_songs) == (2, 2, 1)
    assert (level.first_audio_p50_s, level.first_audio_max_s) == pytest.approx((1.0, 3.0))
    assert (level.gap_p50_s, level.gap_max_s) == pytest.approx((4.0, 10.0))
    assert level.stall_s == pytest.approx(2.0)
    assert level.real_time_factor_p90 == pytest.approx(18.0 / 16.5)
    assert level.real_time_factor_p50 == pytest.approx(0.3)
    # 26.5 s of sound from the first request to the last chunk, 18 s later.
    assert level.audio_per_second == pytest.approx(26.5 / 18.0)


def test_a_stall_delays_all_that_follows() -> None:
    """Against a player that is stepped through time, a hundredth of a second at a time."""
    song = SongTrace(0.0, (0.5, 2.0, 5.0, 5.5, 9.0), (1.0, 1.0, 0.2, 1.0, 1.0))
    silent, heard, step = 0.0, 0.0, 0.01
    for tick in range(round(song.arrivals_s[0] / step), 2000):
        had = sum(
            length
            for arrival, length in zip(song.arrivals_s, song.audio_s, strict=True)
            if arrival <= tick * step + 1e-9
        )
        if heard + 1e-9 < had:
            heard += step
        elif had < song.length_s - 1e-9:
            silent += step
    assert sum(song.stalls_s) == pytest.approx(silent, abs=0.05)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.5, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), ([1.0, 2.0, 3.0], 0.9, 3.0), ([1.0], 0.0, 1.0)],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert figures.percentile(values, share) == expected
    assert math.isnan(figures.percentile([], share))


def test_songs_without_sound_and_other_files_are_refused(tmp_path: Path) -> None:
    silent = request(0.0, (1.0, 1.0))
    silent["response_outputs"][0]["audio_base64"] = ""
    with pytest.raises(ExportError, match="a song has no sound"):
        figures.read_export(write_export(tmp_path / "silent.json", silent))
    other = tmp_path / "other.json"
    for text in ("", "{}", '{"experiments": [{"experiment": 1}]}'):
        other.write_text(text)
        with pytest.raises(ExportError, match=r"other\.json: not a profile export"):
            figures.read_export(other)


def test_shipped_inputs_are_what_the_model_takes(tmp_path: Path) -> None:
    songs = json.loads(runs.SHIPPED_INPUTS.read_text(encoding="utf-8"))["data"]
    assert len(songs) >= 4
    for song in songs:
        assert set(song) == {"caption", "lyrics", "seed", "max_frames"}
        assert all(len(value) == 1 for value in song.values())
        assert 0 < len(song["caption"][0]) <= 20_000
        assert 0 < song["max_frames"][0] <= 9000
        # Words beside a tag are dropped, which no shipped song should do.
        assert all(re.fullmatch(r"\[[^\]]+\]|[^\[\]]+", line) for line in song["lyrics"][0].splitlines())
    assert len({song["seed"][0] for song in songs}) == len(songs)
    assert runs.write_inputs(runs.SHIPPED_INPUTS, tmp_path / "in.json", seconds=2.0) == len(songs)
    prepared = json.loads((tmp_path / "in.json").read_text())["data"]
    assert {song["max_frames"][0] for song in prepared} == {50}
    assert {song["audio_encoding"][0] for song in prepared} == {"s16_base64"}
    runs.write_inputs(runs.SHIPPED_INPUTS, tmp_path / "in.json", seconds=None)
    kept = json.loads((tmp_path / "in.json").read_text(encoding="utf-8"))["data"]
    assert [song["max_frames"] for song in kept] == [song["max_frames"] for song in songs]


class Page(HTMLParser):
    """What the page shows, and everything that it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.references: list[str] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_cell = tag == "td"
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")
        ]

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells.append(data)
            self._in_cell = False


@pytest.fixture
def test_run(tmp_path: Path) -> report.LoadTest:
    songs = {}
    for concurrency in (1, 4):
        requests = [request(0.1 * n, (1.0 + n, 8.0), (5.0, 4.0)) for n in range(concurrency)]
        export = write_export(tmp_path / "export.json", *requests, concurrency=concurrency)
        songs[concurrency] = figures.read_export(export)[concurrency]
    levels = [figures.summarize(concurrency, traces) for concurrency, traces in songs.items()]
    return report.LoadTest({"server": "<here> & now"}, levels, songs)


def test_report_in_four_forms(test_run: report.LoadTest, tmp_path: Path) -> None:
    as_json, as_png, as_html = report.write(test_run, tmp_path / "new" / "folder")
    found = json.loads(as_json.read_text())
    assert [level["concurrency"] for level in found["levels"]] == [1, 4]
    assert found["levels"][1]["first_audio_p90_s"] == pytest.approx(4.0)
    assert len(found["levels"][1]["traces"]) == 4
    assert as_png.read_bytes().startswith(b"\x89PNG")
    text = as_html.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    # Nothing but anchors within the page and data in it: it can be mailed.
    assert page.references
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert text.count("<svg") == 1
    assert "&lt;here&gt; &amp; now" in text
    rows = [line.strip("| ").split("|") for line in report.table(test_run.levels).splitlines()]
    assert [cell.strip() for row in rows[2:] for cell in row] == page.cells
    assert len({len(line) for line in report.table(test_run.levels).splitlines()}) == 1


def test_songs_of_one_chunk_have_no_gaps(tmp_path: Path) -> None:
    export = write_export(tmp_path / "export.json", request(0.0, (1.0, 2.0)), concurrency=1)
    songs = figures.read_export(export)
    test = report.LoadTest({}, [figures.summarize(1, songs[1])], songs)
    paths = report.write(test, tmp_path)
    assert json.loads(paths[0].read_text())["levels"][0]["gap_max_s"] is None
    assert "| -" in re.sub(" +", " ", report.table(test.levels))


def program(folder: Path, text: str) -> str:
    path = folder / "perf_analyzer"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_command_line_runs_warm_up_and_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a stand-in that writes an export of as many songs as it is asked for."""
    song = json.dumps(request(0.0, (1.0, 2.0), (2.0, 2.0)))
    made = program(
        tmp_path,
        f"""echo "$LD_LIBRARY_PATH $*" >>{tmp_path}/calls
while (($#)); do case "$1" in
  --concurrency-range) level="$2" ;; --request-count) count="$2" ;; --profile-export-file) export="$2" ;;
esac; shift; done
songs='{song}'; for ((i = 1; i < count; i++)); do songs+=',{song}'; done
echo '{{"experiments": [{{"experiment": {{"value": '$level'}}, "requests": ['"$songs"']}}]}}' >"$export" """,
    )
    options = ["--perf-analyzer", made, "--library-path", "/libraries", "--url", "somewhere:1"]
    options += ["--concurrency", "3,1", "--songs-per-client", "2", "--out", str(tmp_path / "out")]
    assert main(options) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [re.findall(r"(?:range|count) (\d+)", call) for call in calls] == [
        ["1", "1"],
        ["1", "2"],
        ["3", "6"],
    ]
    assert all(call.startswith("/libraries") and "-u somewhere:1 -i grpc" in call for call in calls)
    assert all("--async --streaming" in call for call in calls)
    shown = capsys.readouterr().out
    assert str(tmp_path / "out" / "loadtest.html") in shown
    assert shown.startswith("| clients |")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'error: Failed to init manager'; exit 99", r"exit code 99.*\n.*Failed to init manager"),
        ("echo 'failed to find the requested model version'; exit 99", r"exit code 99.*\n.*failed to find"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_run_that_fails_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    made = program(tmp_path, f"exec bash -c {json.dumps(text)}")
    assert main(["--perf-analyzer", made, "--out", str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = program(tmp_path, "exec sleep 60")
    assert main(["--perf-analyzer", made, "--timeout", "0.5", "--out", str(tmp_path / "out")]) == 1
    assert "not done after 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 1)])
def test_a_run_that_the_server_had_not_counted_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failures: int, code: int
) -> None:
    export = write_export(tmp_path / "made.json", request(0.0, (1.0, 2.0)), concurrency=1)
    made = program(
        tmp_path,
        f"""echo >>{tmp_path}/calls
if (($(wc -l <{tmp_path}/calls) <= {failures})); then
  echo 'failed to find the requested model version'; exit 99
fi
for last; do :; done; cp {export} "$last" """,
    )
    options = ["--perf-analyzer", made, "--warm-up", "0", "--concurrency", "1", "--songs-per-client", "1"]
    assert main([*options, "--out", str(tmp_path / "out")]) == code
    assert len((tmp_path / "calls").read_text().splitlines()) == 3
    assert capsys.readouterr().err.count("once more") == 2


def test_missing_program_and_bad_inputs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--perf-analyzer", "/nowhere/perf_analyzer"]) == 1
    assert "there is no /nowhere/perf_analyzer" in capsys.readouterr().err
    made = program(tmp_path, "exit 0")
    for text in ("", "[]", '{"data": []}', '{"data": [{"caption": ["a"]}]}'):
        (tmp_path / "in.json").write_text(text)
        assert main(["--perf-analyzer", made, "--inputs", str(tmp_path / "in.json")]) == 1
        assert "in.json: not" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-5", "0", "361"])
def test_length_that_no_song_can_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    made = program(tmp_path, "exit 0")
    assert main(["--perf-analyzer", made, "--seconds", seconds]) == 1
    assert capsys.readouterr().err.startswith(
        f"loadtest: seconds: {float(seconds)!r} is out of range; allowed: "
    )


def test_help_says_what_a_balancer_makes_of_it() -> None:
    help_text = " ".join(parser().format_help().split())
    assert "not of a balancer: perf_analyzer sends all songs of a client on one gRPC stream" in help_text


def test_fewer_songs_than_asked_for_are_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = write_export(tmp_path / "made.json", request(0.0, (1.0, 2.0)), concurrency=2)
    made = program(tmp_path, f'for last; do :; done; cp {export} "$last"')
    options = [
        "--perf-analyzer",
        made,
        "--warm-up",
        "0",
        "--concurrency",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(options) == 1
    assert "only 1 of 4 songs came" in capsys.readouterr().err
