"""The `music3` command against a fake server: files, exit codes, interrupts, batches, players."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import soundfile

from client import cli
from tests.client.fake_server import FakeServer, Message, Request, read_inputs, song_audio, song_messages

ROOT = Path(__file__).parents[2]
SONG = ("--caption", "c", "--lyrics", "l")


def whole(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
    yield from song_messages(request, warnings=("line 2: words dropped",))


def endless(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
    yield from list(song_messages(request))[:2]
    while context.is_active():
        time.sleep(0.02)


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "client.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        **({"stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options),
    )


def test_song_to_wav_with_one_summary_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "song.wav"
    with FakeServer(whole) as server:
        code = cli.main([*SONG, "--url", server.url, "--seed", "5", "--max-frames", "250", "--out", str(out)])
    assert code == 0
    np.testing.assert_array_equal(soundfile.read(out, dtype="int16")[0], song_audio(250, 5))
    captured = capsys.readouterr()
    (summary,) = captured.out.splitlines()
    assert summary.startswith(f"{out}: 250 frames, 319879 samples at 32000 Hz (10.00 s), first audio after ")
    assert "RTF " in summary
    assert "song.wav: warning: line 2: words dropped" in captured.err
    assert "song.wav: 200/250 frames, 8.0 s of audio" in captured.err
    assert "\x1b" not in captured.err


@pytest.mark.parametrize("ending", ["flac", "ogg", "mp3"])
def test_format_follows_the_ending(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"song.{ending}"
    with FakeServer(whole) as server:
        assert cli.main([*SONG, "--url", server.url, "--seconds", "2", "--out", str(out)]) == 0
        assert read_inputs(server.requests[0])["max_frames"] == 50
    assert soundfile.info(out).samplerate == 32_000


def test_texts_from_file_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "caption.txt").write_text("a ü caption")
    arguments = ("--caption-file", str(tmp_path / "caption.txt"), "--lyrics", "-", "--max-frames", "1")
    with FakeServer(whole) as server:
        process = start(
            *arguments, "--url", server.url, "--out", str(tmp_path / "s.wav"), stdin=subprocess.PIPE
        )
        process.communicate("[Verse]\nfrom a pipe\n")
        assert process.returncode == 0
        inputs = read_inputs(server.requests[0])
    assert (inputs["caption"], inputs["lyrics"]) == ("a ü caption", "[Verse]\nfrom a pipe\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_cancels_and_leaves_a_playable_file(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "song.wav"
    with FakeServer(endless) as server:
        process = start(*SONG, "--url", server.url, "--max-frames", "900", "--out", str(out))
        assert process.stderr is not None
        for line in process.stderr:
            if "200/900 frames" in line:
                break
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
        assert process.returncode == code
        assert server.cancelled.wait(60)
    assert "200 frames, 8.00 s" in rest
    assert "Traceback" not in rest
    np.testing.assert_array_equal(soundfile.read(out, dtype="int16")[0], song_audio(900, 0)[: 200 * 1280])


def test_killed_client_leaves_a_playable_file(tmp_path: Path) -> None:
    out = tmp_path / "song.wav"
    with FakeServer(endless) as server:
        process = start(*SONG, "--url", server.url, "--max-frames", "900", "--out", str(out))
        assert process.stderr is not None
        for line in process.stderr:
            if "200/900 frames" in line:
                break
        process.kill()
        process.communicate()
        assert server.cancelled.wait(60)
    np.testing.assert_array_equal(soundfile.read(out, dtype="int16")[0], song_audio(900, 0)[: 200 * 1280])


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 3),
        (grpc.StatusCode.UNAVAILABLE, 4),
        (grpc.StatusCode.CANCELLED, 5),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_exit_code_tells_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: grpc.StatusCode, code: int
) -> None:
    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        yield from list(song_messages(request))[:0]
        context.abort(status, "lyrics: the reason")

    out = tmp_path / "song.wav"
    with FakeServer(script) as server:
        assert cli.main([*SONG, "--url", server.url, "--out", str(out)]) == code
    captured = capsys.readouterr()
    assert "lyrics: the reason" in captured.err
    assert captured.out == ""
    assert not out.exists()


def test_deadline_exit_code_and_the_part_that_came(tmp_path: Path) -> None:
    out = tmp_path / "song.wav"
    with FakeServer(endless) as server:
        # Of which both chunks take a hundredth.
        assert cli.main([*SONG, "--url", server.url, "--deadline", "3", "--out", str(out)]) == 5
    assert soundfile.info(out).frames == 200 * 1280


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(whole) as server:
        url = server.url
    for extra in ([], ["--wait", "0.1"]):
        assert cli.main([*SONG, "--url", url, "--out", str(tmp_path / "s.wav"), *extra]) == 4
        assert "gRPC port" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lyrics", "l"],
        ["--caption", "-", "--lyrics", "-"],
        [*SONG, "--out", "no/such/folder/song.wav"],
        [*SONG, "--out", "song.aac"],
        [*SONG, "--seed", "x"],
        *([*SONG, "--seconds", seconds] for seconds in ("nan", "inf", "-5", "0", "361")),
        [*SONG, "--jobs", "0"],
        [*SONG, "--retries", "-1"],
        [*SONG, "--deadline", "0"],
        [*SONG, "--deadline", "inf"],
        [*SONG, "--format", "ogg"],
        [*SONG, "--takes", "2", "--play"],
        [*SONG, "--url", "http://localhost:8000"],
        ["--lyrics-file", "missing.txt", "--caption", "c"],
        ["--batch", "missing.jsonl", "--out-dir", "."],
        ["--batch", "missing.jsonl", "--seed", "1"],
    ],
)
def test_wrong_use_is_exit_code_2_before_anything_is_sent(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer(whole) as server:
        monkeypatch.setenv("MUSIC3_URL", server.url)
        assert cli.main(arguments) == 2
        assert server.requests == []
    assert capsys.readouterr().err.startswith("music3: ")
    assert list(tmp_path.iterdir()) == []


def test_takes_run_together(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=60)

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        together.wait()
        yield from song_messages(request)

    with FakeServer(script) as server:
        arguments = [*SONG, "--url", server.url, "--seed", "7-9", "--jobs", "3", "--max-frames", "9"]
        assert cli.main([*arguments, "--out", str(tmp_path / "take.wav")]) == 0
    for seed in (7, 8, 9):
        sound, _ = soundfile.read(tmp_path / f"take-seed{seed}.wav", dtype="int16")
        np.testing.assert_array_equal(sound, song_audio(9, seed))


def test_batch_makes_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"name": f"s{seed}", "caption": "c", "lyrics": "l", "seed": seed, "max_frames": 120}
        for seed in range(4)
    ]
    songs, out = tmp_path / "songs.jsonl", tmp_path / "out"
    broken = {2}

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        messages = list(song_messages(request))
        yield messages[0]
        if read_inputs(request)["seed"] in broken:
            context.abort(grpc.StatusCode.INTERNAL, "broke")
        yield from messages[1:]

    def run(server: FakeServer) -> tuple[int, list[int], str]:
        songs.write_text("\n".join(json.dumps(line) for line in lines))
        server.requests.clear()
        code = cli.main(["--batch", str(songs), "--out-dir", str(out), "--url", server.url, "--jobs", "2"])
        asked = sorted(read_inputs(request)["seed"] for request in server.requests)
        return code, asked, capsys.readouterr().out.splitlines()[-1]

    with FakeServer(script) as server:
        assert run(server) == (1, [0, 1, 2, 3], "3 songs made, 0 there already, 1 failed")
        assert not (out / "s2.wav").exists()
        broken.clear()
        assert run(server) == (0, [2], "1 songs made, 3 there already, 0 failed")
        # Another request under an old name, and a file that went missing, are made again.
        lines[1]["lyrics"] = "other"
        (out / "s3.wav").unlink()
        assert run(server) == (0, [1, 3], "2 songs made, 2 there already, 0 failed")
    for seed in range(4):
        np.testing.assert_array_equal(
            soundfile.read(out / f"s{seed}.wav", dtype="int16")[0], song_audio(120, seed)
        )
        assert json.loads((out / f"s{seed}.wav.json").read_text())["frames"] == 120


def test_batch_makes_a_song_again_in_another_sample_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    songs, out = tmp_path / "songs.jsonl", tmp_path / "out"
    songs.write_text(json.dumps({"name": "s", "caption": "c", "lyrics": "l", "max_frames": 3}))

    def run(*options: str) -> tuple[str, str]:
        arguments = ["--batch", str(songs), "--out-dir", str(out), "--url", server.url, *options]
        assert cli.main(arguments) == 0
        return capsys.readouterr().out.splitlines()[-1], soundfile.info(out / "s.wav").subtype

    def forget_format() -> None:
        """As the notes of earlier versions were."""
        note = json.loads((out / "s.wav.json").read_text())
        del note["audio_encoding"]
        (out / "s.wav.json").write_text(json.dumps(note))

    made, there = "1 songs made, 0 there already, 0 failed", "0 songs made, 1 there already, 0 failed"
    with FakeServer(whole) as server:
        assert run() == (made, "PCM_16")
        assert run("--float") == (made, "FLOAT")
        assert run("--float") == (there, "FLOAT")
        forget_format()
        assert run("--float") == (there, "FLOAT")
        assert run() == (made, "PCM_16")
        forget_format()
        assert run() == (there, "PCM_16")
        assert run("--float") == (made, "FLOAT")


def test_batch_says_that_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found out while the one file closes; the other song is made."""
    songs, out = tmp_path / "songs.jsonl", tmp_path / "out"
    out.mkdir()
    (out / "full.part.ogg").symlink_to("/dev/full")
    lines = [{"name": name, "caption": "c", "lyrics": "l", "max_frames": 2} for name in ("full", "good")]
    songs.write_text("\n".join(json.dumps(line) for line in lines))
    with FakeServer(whole) as server:
        arguments = ["--batch", str(songs), "--out-dir", str(out), "--format", "ogg", "--url", server.url]
        assert cli.main(arguments) == cli.USAGE
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "1 songs made, 0 there already, 1 failed"
    assert "full.ogg: failed: [Errno 28] No space left on device" in captured.err
    assert "Exception ignored" not in captured.err
    assert not (out / "full.ogg").exists()
    assert (out / "good.ogg").exists()


def test_batch_asks_again_when_there_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.jobs._FIRST_RETRY_S", 0.05)
    refusals = iter([True, True])

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        messages = list(song_messages(request))
        yield messages[0]
        if next(refusals, False):
            context.abort(grpc.StatusCode.UNAVAILABLE, "8 songs run and 3 wait")
        yield from messages[1:]

    songs = tmp_path / "songs.jsonl"
    songs.write_text(json.dumps({"caption": "c", "lyrics": "l", "max_frames": 150}))
    with FakeServer(script) as server:
        assert cli.main(["--batch", str(songs), "--out-dir", str(tmp_path), "--url", server.url]) == 0
        assert len(server.requests) == 3
    np.testing.assert_array_equal(soundfile.read(tmp_path / "0001.wav", dtype="int16")[0], song_audio(150, 0))


@pytest.mark.parametrize("name", ["aplay", "ffplay"])
def test_player_hears_every_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    heard = tmp_path / "heard"
    player = tmp_path / "bin" / name
    player.parent.mkdir()
    player.write_text(f'#!/bin/sh\nexec /bin/cat > "{heard}"\n')
    player.chmod(0o755)
    monkeypatch.setenv("PATH", str(player.parent))
    out = tmp_path / "song.wav"
    with FakeServer(whole) as server:
        assert cli.main([*SONG, "--url", server.url, "--max-frames", "201", "--play", "--out", str(out)]) == 0
    raw = heard.read_bytes()
    if name == "ffplay":
        assert raw[:4] == b"RIFF"
        raw = raw[44:]
    assert raw == song_audio(201, 0).astype("<i2").tobytes()


def test_no_player_is_said_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with FakeServer(whole) as server:
        assert cli.main([*SONG, "--url", server.url, "--play", "--out", str(tmp_path / "s.wav")]) == 2
        assert server.requests == []
    assert "aplay" in capsys.readouterr().err


def test_terminal_gets_a_moving_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with FakeServer(whole) as server:
        process = start(
            *SONG,
            *("--url", server.url, "--max-frames", "250", "--out", str(tmp_path / "song.wav")),
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # Linux reports the end of a terminal so
            pass
        assert process.wait() == 0
    os.close(ours)
    text = shown.decode()
    assert "\x1b[" in text
    assert "250/250 frames" in text
    assert "10.0 s of audio" in text
    assert "warning: line 2: words dropped" in text


def test_client_needs_nothing_of_the_servers_side() -> None:
    """Installed by itself it has no torch: importing all of it must not ask for any."""
    program = (
        "import sys, pathlib, importlib\n"
        "for path in sorted(pathlib.Path('client').glob('*.py')):\n"
        "    importlib.import_module('client.' + path.stem)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert {"tritonclient", "numpy", "rich", "soundfile"} <= loaded
    assert not loaded & {"torch", "torchaudio", "transformers", "safetensors", "tokenizers", "regex"}
