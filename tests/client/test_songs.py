"""Command lines and batch files to songs."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client import InvalidRequest
from client.jobs import Request
from client.songs import batch, frames_for, parse_seeds, read_file, read_text, single


@pytest.mark.parametrize(
    ("text", "takes", "seeds"),
    [
        ("7", None, [7]),
        ("0-3", None, [0, 1, 2, 3]),
        ("4,1,9-10", None, [4, 1, 9, 10]),
        ("5", 3, [5, 6, 7]),
        ("5-5", None, [5]),
        ("-1", None, [-1]),  # the server refuses it, in its own words
        (str(2**63 - 1), None, [2**63 - 1]),
    ],
)
def test_seeds(text: str, takes: int | None, seeds: list[int]) -> None:
    assert parse_seeds(text, takes=takes) == seeds


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        *((text, None) for text in ("", "a", "3-1", "1.5", "1--2", "1,", "0-10000", "٣")),
        *(("1", takes) for takes in (0, -1, 10_001)),
        ("1-2", 2),
    ],
)
def test_bad_seeds_are_refused(text: str, takes: int | None) -> None:
    with pytest.raises(InvalidRequest, match=r"^(seed|takes): "):
        parse_seeds(text, takes=takes)


@settings(deadline=None)
@given(frames=st.integers(1, 9000))
def test_a_length_in_seconds_gives_back_its_frames(frames: int) -> None:
    assert frames_for(frames / 25) == frames


def test_shortest_and_longest_length() -> None:
    assert frames_for(0.001) == 1
    assert frames_for(360) == 9000


@pytest.mark.parametrize(
    "seconds", [float("nan"), float("inf"), -float("inf"), -5, 0, 360.5, 10**400, True, "9"]
)
def test_length_that_no_song_can_have_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^seconds: .* above 0, at most 360$"):
        frames_for(seconds)


def test_texts(tmp_path: Path) -> None:
    file = tmp_path / "lyrics.txt"
    file.write_bytes("\ufeff[Verse]\r\nünïcode\n".encode())
    assert read_text("--lyrics", f"@{file}") == "[Verse]\r\nünïcode\n"
    assert read_text("--lyrics", "@@home") == "@home"
    assert read_text("--lyrics", "plain -") == "plain -"


def test_bad_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"ab\xff")
    with pytest.raises(InvalidRequest, match=r"bad\.txt is not UTF-8 \(byte 2\)"):
        read_file("--lyrics-file", bad)
    with pytest.raises(InvalidRequest, match=r"missing\.txt: No such file"):
        read_text("--lyrics", f"@{tmp_path / 'missing.txt'}")


def test_several_takes_get_names_of_their_own(tmp_path: Path) -> None:
    jobs = single(
        caption="c", lyrics="l", seeds=[3, 8], max_frames=9, out=tmp_path / "a.b.flac", float_wav=False
    )
    assert [job.path.name for job in jobs] == ["a.b-seed3.flac", "a.b-seed8.flac"]
    assert [job.request for job in jobs] == [Request("c", "l", 3, 9), Request("c", "l", 8, 9)]


def write_lines(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "songs.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_batch_lines(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path,
        {"caption": "c", "lyrics": "l"},
        "",
        {
            "caption": "c",
            "lyrics": "l",
            "name": "two",
            "seed": 4,
            "takes": 2,
            "seconds": 2.0,
            "format": "ogg",
        },
        {"caption": "c", "lyrics": "l", "seed": "1,7", "max_frames": 30},
    )
    jobs = batch(path, out_dir=tmp_path, audio_format="flac", float_wav=False)
    assert {job.path.name: job.request for job in jobs} == {
        "0001.flac": Request("c", "l", 0, None),
        "two-seed4.ogg": Request("c", "l", 4, 50),
        "two-seed5.ogg": Request("c", "l", 5, 50),
        "0004-seed1.flac": Request("c", "l", 1, 30),
        "0004-seed7.flac": Request("c", "l", 7, 30),
    }
    assert all(job.resumable for job in jobs)


GOOD = {"caption": "c", "lyrics": "l"}


def test_batch_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """JSON has U+2028, U+2029 and U+0085 in texts as they are; `ensure_ascii=False` writes them so."""
    songs = [GOOD | {"lyrics": f"one{mark}two"} for mark in ("\u2028", "\u2029", "\x85")]
    path = tmp_path / "songs.jsonl"
    path.write_bytes("\r\n".join(json.dumps(song, ensure_ascii=False) for song in [*songs, GOOD]).encode())
    jobs = batch(path, out_dir=tmp_path, audio_format="wav", float_wav=False)
    assert [job.request.lyrics for job in jobs] == [song["lyrics"] for song in [*songs, GOOD]]
    assert [job.path.name for job in jobs] == ["0001.wav", "0002.wav", "0003.wav", "0004.wav"]
    path.write_bytes(b"\r\n\r\n" + json.dumps(GOOD).encode() + b"\r\n")
    (job,) = batch(path, out_dir=tmp_path, audio_format="wav", float_wav=False)
    assert job.path.name == "0003.wav"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({"lyrics": "l"}, "caption: "),
        ({"caption": "c", "lyrics": 3}, "lyrics: "),
        (GOOD | {"temperature": 1}, "temperature: unknown"),
        (GOOD | {"name": "../x"}, "name: "),
        (GOOD | {"name": ".hidden"}, "name: "),
        (GOOD | {"name": ""}, "name: "),
        (GOOD | {"seed": 1.5}, "seed: "),
        (GOOD | {"seed": None}, "seed: "),
        (GOOD | {"takes": True}, "takes: "),
        (GOOD | {"max_frames": "9"}, "max_frames: "),
        *((GOOD | {"seconds": seconds}, "seconds: ") for seconds in ("9", True, [], -5, 0, 361)),
        *(
            (f'{{"caption": "c", "lyrics": "l", "seconds": {seconds}}}', "seconds: ")
            for seconds in ("1e400", "NaN", "-Infinity")
        ),
        (GOOD | {"seconds": 9, "max_frames": 9}, "seconds: "),
        (GOOD | {"format": "aac"}, r"\.wav"),
    ],
)
def test_bad_batch_lines_are_named(tmp_path: Path, line: object, field: str) -> None:
    path = write_lines(tmp_path, GOOD, line)
    with pytest.raises(InvalidRequest, match=rf"songs\.jsonl, line 2: .*{field}"):
        batch(path, out_dir=tmp_path, audio_format="wav", float_wav=False)


def test_two_lines_for_one_file_and_empty_batches_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path, GOOD | {"name": "a"}, GOOD | {"name": "a"})
    with pytest.raises(InvalidRequest, match=r"line 2: a\.wav is line 1's already"):
        batch(path, out_dir=tmp_path, audio_format="wav", float_wav=False)
    with pytest.raises(InvalidRequest, match="no songs"):
        batch(write_lines(tmp_path, "", " "), out_dir=tmp_path, audio_format="wav", float_wav=False)
