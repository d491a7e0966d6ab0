"""Sound into bytes while it arrives: what has been handed out is never changed afterwards.

A stream cannot go back to its header as a file can, so: WAV has the largest sizes its header can hold, which
players read as "until the end"; FLAC leaves its number of samples open, as the format allows; MP3 has a
constant bit rate, as a variable one needs the index that only a file can have. Ogg and PCM have nothing to
go back to.
"""

import io
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import soundfile

from client.wire import AudioEncoding
from python_backend_models.contract import CHANNELS, OUTPUT_RATE_HZ
from python_backend_models.pcm import wav_header


@dataclass(frozen=True)
class Format:
    """A `response_format`: what it is called on the wire and what to ask the model for."""

    media_type: str
    encoding: AudioEncoding
    # A file's ending in client.audio_files; PCM is no file format there.
    ending: str | None
    # Encoding takes long enough to be kept away from the event loop.
    slow: bool = False


# 16 bit where the format holds 16, so that its samples are the server's.
FORMATS: Final = {
    "wav": Format("audio/wav", "s16", ".wav"),
    "pcm": Format(f"audio/pcm; rate={OUTPUT_RATE_HZ}; channels={CHANNELS}", "s16", None),
    "flac": Format("audio/flac", "s16", ".flac", slow=True),
    "mp3": Format("audio/mpeg", "f32", ".mp3", slow=True),
    "ogg": Format("audio/ogg", "f32", ".ogg", slow=True),
}
REFUSED_FORMATS: Final = {
    "opus": f"opus cannot hold sound at {OUTPUT_RATE_HZ} Hz; ogg (Vorbis) is nearest",
    "aac": "there is no AAC encoder here; mp3 is nearest",
}

_MP3_KBPS: Final = 192
# libsndfile's scale for MPEG-1 layer III at a constant rate: 0 is 320 kbit/s, 1 is 32.
_MP3_COMPRESSION: Final = (320 - _MP3_KBPS) / (320 - 32)
_MP3_FRAME_BYTES: Final = 144 * 1000 * _MP3_KBPS // OUTPUT_RATE_HZ
# libsndfile's Vorbis encoder takes stack in proportion to one write; a chunk of 4 s can end the process.
_BLOCK_SAMPLES: Final = 4096
_SOUNDFILE_OPTIONS: Final[dict[str, dict[str, object]]] = {
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "mp3": {
        "format": "MP3",
        "subtype": "MPEG_LAYER_III",
        "bitrate_mode": "CONSTANT",
        "compression_level": _MP3_COMPRESSION,
    },
    "ogg": {"format": "OGG", "subtype": "VORBIS"},
}


class StreamEncoder(Protocol):
    """One song's sound, `[samples, 2]` int16 or float32 a piece, to the bytes of a stream."""

    def encode(self, audio: np.ndarray) -> bytes: ...

    def finish(self) -> bytes: ...


def stream_encoder(name: str, *, sample_rate_hz: int = OUTPUT_RATE_HZ) -> StreamEncoder:
    """An encoder for a new song in one of FORMATS."""
    if name in _SOUNDFILE_OPTIONS:
        return _SoundFileStream(name, sample_rate_hz)
    return _PcmStream(wav_header(sample_rate_hz, CHANNELS, None) if name == "wav" else b"")


class _PcmStream:
    def __init__(self, header: bytes) -> None:
        self._header = header

    def encode(self, audio: np.ndarray) -> bytes:
        header, self._header = self._header, b""
        return header + np.ascontiguousarray(audio, dtype="<i2").tobytes()

    def finish(self) -> bytes:
        return b""


class _SoundFileStream:
    def __init__(self, name: str, sample_rate_hz: int) -> None:
        self._tape = _Tape()
        self._is_first_mp3 = name == "mp3"
        self._file = soundfile.SoundFile(
            self._tape, "w", samplerate=sample_rate_hz, channels=CHANNELS, **_SOUNDFILE_OPTIONS[name]
        )

    def encode(self, audio: np.ndarray) -> bytes:
        for start in range(0, len(audio), _BLOCK_SAMPLES):
            self._file.write(audio[start : start + _BLOCK_SAMPLES])
        return self._take()

    def finish(self) -> bytes:
        self._file.close()
        return self._take()

    def _take(self) -> bytes:
        data = self._tape.take()
        if self._is_first_mp3 and data:
            # The first frame is a place for an index that is written at the end of a file; left empty, it
            # would sound as 36 ms of silence.
            self._is_first_mp3 = False
            data = data[_MP3_FRAME_BYTES:]
        return data


class _Tape(io.RawIOBase):
    """A file that keeps only what is appended: what goes back to a header comes too late for a stream."""

    def __init__(self) -> None:
        super().__init__()
        self._position = self._end = 0
        self._new = bytearray()

    def take(self) -> bytes:
        """What was appended since the last call."""
        data = bytes(self._new)
        self._new.clear()
        return data

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        size = len(data)
        if self._position == self._end:
            self._new += data
            self._end += size
        self._position += size
        return size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True
