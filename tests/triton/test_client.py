"""The client and its command line against the real server."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from client import AsyncMusic3Client, Cancelled, InvalidRequest, Music3Client
from tests.triton.server import ROOT, TritonServer

CAPTION, LYRICS = "warm folk, one guitar", "[Verse]\nThe river learns the colour of the sky"


def samples_of(frames: int) -> int:
    """Length of a song in 32 kHz samples: floor of its 44.1 kHz length, less the crops, resampled upwards.

    Latents are 441/128 of the frames, rounded down; each is 512 samples; 320/441 of those, rounded up.
    """
    latents = frames * 441 // 128
    return -(-latents * 512 * 320 // 441)


def command_line(server: TritonServer, *arguments: str) -> list[str]:
    texts = ("--caption", CAPTION, "--lyrics", LYRICS)
    return [sys.executable, "-m", "client.cli", "--url", server.grpc_url, *texts, *arguments]


def test_command_line_writes_the_song_that_the_library_gets(
    server: TritonServer, client: Music3Client, tmp_path: Path
) -> None:
    out = tmp_path / "song.wav"
    command = command_line(server, "--seed", "3", "--max-frames", "30", "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (summary,) = done.stdout.splitlines()
    assert f"30 frames, {samples_of(30)} samples at 32000 Hz" in summary
    sound, rate_hz = soundfile.read(out, dtype="int16")
    assert (sound.shape, rate_hz) == ((samples_of(30), 2), 32_000)
    song = client.generate(CAPTION, LYRICS, seed=3, max_frames=30, audio_encoding="s16")
    np.testing.assert_array_equal(sound, song.audio)
    assert np.abs(sound).max() > 100


def test_float_chunks_round_to_the_16_bit_ones(client: Music3Client) -> None:
    exact = client.generate(CAPTION, LYRICS, seed=4, max_frames=20)
    rounded = client.generate(CAPTION, LYRICS, seed=4, max_frames=20, audio_encoding="s16")
    assert (exact.audio.dtype, rounded.audio.dtype) == (np.float32, np.int16)
    steps = exact.audio.astype(np.float64) * 32768
    np.testing.assert_allclose(np.clip(np.floor(steps), -32768, 32767), rounded.audio, atol=1)


def test_asyncio_songs_share_a_connection(server: TritonServer, client: Music3Client) -> None:
    async def main() -> list[np.ndarray]:
        async with AsyncMusic3Client(server.grpc_url) as connected:
            songs = [connected.generate(CAPTION, LYRICS, seed=seed, max_frames=12) for seed in (0, 1, 2)]
            return [song.audio for song in await asyncio.gather(*songs)]

    together = asyncio.run(main())
    for seed, audio in enumerate(together):
        alone = client.generate(CAPTION, LYRICS, seed=seed, max_frames=12).audio
        np.testing.assert_allclose(audio, alone, atol=1e-4)
    assert not np.array_equal(together[0], together[1])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lyrics": " \n"}, "lyrics"),
        ({"caption": ""}, "caption"),
        ({"seed": -1}, "seed"),
        ({"max_frames": 0}, "max_frames"),
        ({"max_frames": 9001}, "max_frames"),
    ],
)
def test_refusal_names_the_field_and_the_next_song_is_fine(
    client: Music3Client, options: dict[str, object], field: str
) -> None:
    song = {"caption": CAPTION, "lyrics": LYRICS, "max_frames": 2}
    with pytest.raises(InvalidRequest, match=field):
        client.generate(**(song | options))
    assert client.generate(**song).frames == 2


def test_warning_arrives_with_the_first_chunk(client: Music3Client) -> None:
    first = next(client.stream(CAPTION, "[Verse] lost words\nand kept ones", max_frames=2))
    assert any("line 1" in warning for warning in first.warnings)


def test_cancelled_songs_give_their_places_to_the_next(client: Music3Client) -> None:
    """More songs than the server has places, some singing and some waiting: no place may stay taken."""
    songs = [client.stream(CAPTION, LYRICS, seed=seed, max_frames=9000) for seed in range(12)]
    next(songs[0])
    client.cancel()
    for song in songs:
        with pytest.raises(Cancelled):
            list(song)
    assert client.generate(CAPTION, LYRICS, max_frames=5).frames == 5


def test_interrupted_command_line_leaves_a_playable_beginning(server: TritonServer, tmp_path: Path) -> None:
    out = tmp_path / "song.wav"
    process = subprocess.Popen(
        command_line(server, "--max-frames", "9000", "--out", str(out)),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "/9000 frames" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert soundfile.info(out).frames > 0
