"""Files read back with libsndfile, an implementation that wrote none of the WAVs."""

import errno
import io
import itertools
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from client import InvalidRequest
from client.audio_files import FORMATS, WavWriter, encoding_for, encoding_in, open_sink

RATE_HZ = 32_000


def noise(samples: int, dtype: str) -> np.ndarray:
    random = np.random.default_rng(samples)
    if dtype == "int16":
        return random.integers(-32768, 32768, (samples, 2), dtype=np.int16)
    return random.uniform(-1.5, 1.5, (samples, 2)).astype(np.float32)


@pytest.mark.parametrize(("dtype", "subtype"), [("int16", "PCM_16"), ("float32", "FLOAT")])
def test_wav_is_whole_after_every_chunk(tmp_path: Path, dtype: str, subtype: str) -> None:
    path = tmp_path / "song.wav"
    sound = noise(10_000, dtype)
    sink = open_sink(path, sample_rate_hz=RATE_HZ, dtype=sound.dtype)
    assert soundfile.info(path).frames == 0
    edges = [0, 1, 1, 700, 6000, 10_000]
    for start, stop in itertools.pairwise(edges):
        sink.write(sound[start:stop])
        # Not closed: this is what a player finds beside a running client, or after kill -9.
        info = soundfile.info(path)
        assert (info.frames, info.samplerate, info.channels, info.subtype) == (stop, RATE_HZ, 2, subtype)
        np.testing.assert_array_equal(soundfile.read(path, dtype=dtype)[0], sound[:stop])
    sink.close()
    assert sink.samples == 10_000
    np.testing.assert_array_equal(soundfile.read(path, dtype=dtype)[0], sound)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=6))
def test_wav_agrees_with_the_standard_library(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("wav") / "song.wav"
    sink = open_sink(path, sample_rate_hz=RATE_HZ, dtype=np.dtype(np.int16))
    for size in sizes:
        sink.write(noise(size, "int16"))
    sink.close()
    expected = io.BytesIO()
    with wave.open(expected, "wb") as file:
        file.setparams((2, 2, RATE_HZ, 0, "NONE", ""))
        for size in sizes:
            file.writeframes(noise(size, "int16").astype("<i2").tobytes())
    assert path.read_bytes() == expected.getvalue()


def test_wav_into_a_pipe_can_be_read_to_its_end() -> None:
    """A player's standard input: the header cannot be mended later."""
    reader = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert reader.stdin is not None
    sink = WavWriter(reader.stdin, sample_rate_hz=RATE_HZ, dtype=np.dtype(np.int16))
    sink.write(noise(500, "int16"))
    sink.close()
    assert reader.stdout is not None
    raw = reader.stdout.read()
    reader.wait()
    sound, rate_hz = soundfile.read(io.BytesIO(raw), dtype="int16")
    assert rate_hz == RATE_HZ
    np.testing.assert_array_equal(sound, noise(500, "int16"))


def test_flac_holds_the_servers_samples(tmp_path: Path) -> None:
    path = tmp_path / "song.flac"
    sink = open_sink(path, sample_rate_hz=RATE_HZ, dtype=np.dtype(np.int16))
    for start in range(0, 20_000, 5000):
        sink.write(noise(20_000, "int16")[start : start + 5000])
    sink.close()
    np.testing.assert_array_equal(soundfile.read(path, dtype="int16")[0], noise(20_000, "int16"))


@pytest.mark.parametrize(("ending", "kind"), [(".ogg", "OGG"), (".mp3", "MP3")])
def test_compressed_formats_sound_like_the_song(tmp_path: Path, ending: str, kind: str) -> None:
    """A chunk of 4 s in one write; the two channels keep their own tones."""
    path = tmp_path / f"song{ending}"
    time_s = np.arange(4 * RATE_HZ) / RATE_HZ
    tones = np.stack([0.5 * np.sin(2 * np.pi * hz * time_s) for hz in (440.0, 1000.0)], axis=1)
    sink = open_sink(path, sample_rate_hz=RATE_HZ, dtype=np.dtype(np.float32))
    sink.write(tones.astype(np.float32))
    sink.close()
    info = soundfile.info(path)
    assert (info.format, info.samplerate, info.channels) == (kind, RATE_HZ, 2)
    sound, _ = soundfile.read(path)
    assert abs(len(sound) - len(tones)) < 3000  # MP3 pads to whole blocks
    spectrum = np.abs(np.fft.rfft(sound[: RATE_HZ * 3], axis=0))
    assert list(spectrum.argmax(axis=0) / 3) == [440.0, 1000.0]


def test_what_is_asked_for_by_format() -> None:
    asked = {ending: encoding_for(Path(f"a{ending}")) for ending in FORMATS}
    assert asked == {".wav": "s16", ".flac": "s16", ".ogg": "f32", ".mp3": "f32"}
    assert encoding_for(Path("a.WAV"), float_wav=True) == "f32"


@pytest.mark.parametrize("name", ["song", "song.aac", "song.wav.bak"])
def test_unknown_ending_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"\.wav, \.flac, \.ogg, \.mp3"):
        encoding_for(Path(name))


@pytest.mark.parametrize("ending", FORMATS)
def test_place_that_cannot_be_written_is_an_oserror(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"song{ending}").mkdir()
    with pytest.raises(OSError, match="song"):
        open_sink(tmp_path / f"song{ending}", sample_rate_hz=RATE_HZ, dtype=np.dtype(np.float32))


@pytest.mark.parametrize("samples", [2000, 128_000])
@pytest.mark.parametrize("ending", FORMATS)
def test_full_disk_is_an_oserror_at_the_latest_when_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ending: str, samples: int
) -> None:
    """libsndfile itself says nothing of what it fails to write while it closes."""
    path = tmp_path / f"song{ending}"
    path.symlink_to("/dev/full")
    dtype = np.dtype(np.int16 if encoding_for(path) == "s16" else np.float32)
    with pytest.raises(OSError, match="No space left on device") as raised:  # noqa: PT012 - any may be first
        sink = open_sink(path, sample_rate_hz=RATE_HZ, dtype=dtype)
        try:
            sink.write(noise(samples, dtype.name))
        finally:
            sink.close()
    assert raised.value.errno == errno.ENOSPC
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("step", ["write", "close"])
def test_what_libsndfile_finds_wrong_is_an_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    done = getattr(soundfile.SoundFile, step)

    def fail(*arguments: object) -> None:
        done(*arguments)
        raise soundfile.LibsndfileError(2)

    sink = open_sink(tmp_path / "song.ogg", sample_rate_hz=RATE_HZ, dtype=np.dtype(np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(soundfile.SoundFile, step, fail)
        with pytest.raises(OSError, match=r"song\.ogg: System error"):
            sink.write(noise(2000, "float32")) if step == "write" else sink.close()
    if step == "write":
        sink.close()


def test_what_a_file_was_asked_as_is_told_by_the_file(tmp_path: Path) -> None:
    for ending, dtype in ((".wav", "int16"), (".wav", "float32"), (".flac", "int16"), (".ogg", "float32")):
        path = tmp_path / f"{dtype}{ending}"
        sink = open_sink(path, sample_rate_hz=RATE_HZ, dtype=np.dtype(dtype))
        sink.write(noise(2000, dtype))
        sink.close()
        assert encoding_in(path) == ("s16" if dtype == "int16" else "f32")
    (tmp_path / "empty.wav").touch()
    with pytest.raises(OSError, match=r"empty\.wav"):
        encoding_in(tmp_path / "empty.wav")
