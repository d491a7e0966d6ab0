"""Streams of each format, decoded by libsndfile from nothing but what a reader got, as it got it."""

import io
import struct

import numpy as np
import pytest
import soundfile

from client.gateway.encoders import FORMATS, stream_encoder

RATE_HZ = 32_000
# Windows as the model sends them, for a song of 1 frame, of one window, of four.
SONGS = {"a frame": [1159], "a window": [160_199], "windows": [159_680, 128_320, 128_000, 31_999]}


def sound(samples: int, dtype: str) -> np.ndarray:
    """Two notes, one per side, and a little noise; `[samples, 2]`."""
    time_s = np.arange(samples) / RATE_HZ
    tones = np.stack([np.sin(2 * np.pi * 440 * time_s), np.sin(2 * np.pi * 660 * time_s)], axis=1)
    noisy = 0.5 * tones + np.random.default_rng(1).normal(0, 0.01, tones.shape)
    return noisy.astype(np.float32) if dtype == "f32" else (32767 * noisy).astype(np.int16)


def stream(name: str, song: np.ndarray, sizes: list[int], piece: int) -> list[bytes]:
    encoder = stream_encoder(name)
    pieces = []
    start = 0
    for size in sizes:
        for begin in range(start, start + size, piece):
            pieces.append(encoder.encode(song[begin : min(begin + piece, start + size)]))
        start += size
    return [*pieces, encoder.finish()]


def with_length(data: bytes, samples: int) -> bytes:
    """A FLAC stream whose header tells its samples, which libsndfile needs and the encoder leaves open."""
    assert data[:8] == b"fLaC\x00\x00\x00\x22"
    assert data[21] & 15 == 0
    assert data[22:26] == bytes(4)
    return data[:22] + struct.pack(">I", samples) + data[26:]


def decoded(name: str, data: bytes, *, samples: int) -> np.ndarray:
    """What libsndfile hears; of a FLAC stream, that many samples."""
    if name == "flac":
        data = with_length(data, samples)
    if name == "pcm":
        return np.frombuffer(data, "<i2").reshape(-1, 2)
    if name == "wav":
        assert data[:4] + data[8:16] == b"RIFFWAVEfmt "
        assert struct.unpack("<HHIIHH", data[20:36]) == (1, 2, RATE_HZ, 4 * RATE_HZ, 4, 16)
        assert data[36:44] == b"data\xff\xff\xff\xff"
        return np.frombuffer(data[44:], "<i2").reshape(-1, 2)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.samplerate, file.channels) == (RATE_HZ, 2)
        return file.read(dtype="int16" if name == "flac" else "float32")


@pytest.mark.parametrize("piece", [16_000, 128_000])
@pytest.mark.parametrize("sizes", SONGS.values(), ids=SONGS)
@pytest.mark.parametrize("name", ["wav", "pcm", "flac"])
def test_lossless_streams_are_the_song(name: str, sizes: list[int], piece: int) -> None:
    song = sound(sum(sizes), "s16")
    data = b"".join(stream(name, song, sizes, piece))
    np.testing.assert_array_equal(decoded(name, data, samples=len(song)), song)


@pytest.mark.parametrize("sizes", SONGS.values(), ids=SONGS)
@pytest.mark.parametrize(("name", "least_snr_db"), [("ogg", 15), ("mp3", 20)])
def test_lossy_streams_are_the_song(name: str, least_snr_db: float, sizes: list[int]) -> None:
    song = sound(sum(sizes), "f32")
    heard = decoded(name, b"".join(stream(name, song, sizes, 16_000)), samples=len(song))
    delay = 0
    if name == "mp3":
        # Encoder and decoder delay of layer III, which only a file's header can tell: 576 + 529 samples.
        delay = 1105
        assert len(heard) % 1152 == 0
        assert len(song) + delay <= len(heard) <= len(song) + delay + 3 * 1152
    else:
        assert len(heard) == len(song)
    heard = heard[delay : delay + len(song)]
    if len(song) > RATE_HZ:
        noise = heard - song
        assert 10 * np.log10(np.mean(song**2) / np.mean(noise**2)) > least_snr_db


@pytest.mark.parametrize("name", FORMATS)
def test_sound_leaves_with_the_window_it_came_in(name: str) -> None:
    """No more than half a second is held back: nothing waits for the next window."""
    sizes = SONGS["windows"]
    song = sound(sum(sizes), FORMATS[name].encoding)
    encoder = stream_encoder(name)
    sent = b""
    end = 0
    for size in sizes:
        sent += encoder.encode(song[end : end + size])
        end += size
        due = end - RATE_HZ // 2
        assert len(decoded(name, sent, samples=due)) >= due


def test_mp3_begins_with_sound_and_has_a_constant_rate() -> None:
    """No empty place for an index, which would be silence; every frame is 192 kbit/s at 32 kHz: 864 bytes."""
    song = sound(160_000, "f32")
    data = b"".join(stream("mp3", song, [160_000], 16_000))
    assert len(data) % 864 == 0
    for start in range(0, len(data), 864):
        header = struct.unpack(">I", data[start : start + 4])[0]
        assert header >> 21 == 0x7FF
        assert (header >> 17) & 3 == 1  # layer III
        assert (header >> 12) & 15 == 11  # 192 kbit/s
        assert (header >> 10) & 3 == 2  # 32 kHz
    assert b"Xing" not in data[:864]
    assert b"Info" not in data[:864]
    assert any(data[100:864])
