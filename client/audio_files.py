"""Audio files written while the song arrives; the format follows the file's ending.

`.wav` has a true header after every chunk, so a song cut short, even by a killed process, is a playable
file of what had arrived. `.flac`, `.ogg` and `.mp3` go through libsndfile and are whole once closed.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np
import soundfile

from client.errors import InvalidRequest
from client.wire import AudioEncoding
from python_backend_models.contract import CHANNELS

# ending -> libsndfile's format and subtype; WAV is written here.
_SOUNDFILE_FORMATS: Final[dict[str, tuple[str, str]]] = {
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
FORMATS: Final = (".wav", *_SOUNDFILE_FORMATS)
# libsndfile's Vorbis encoder takes stack in proportion to one write; a chunk of 4 s can end the process.
_BLOCK_SAMPLES: Final = 4096
# Sizes in a WAV that cannot be sought: as large as the field allows, which players read as "until the end".
_UNKNOWN_BYTES: Final = 0xFFFF_FFFF


class AudioSink(Protocol):
    """Where a song's chunks go. `write` takes `[samples, 2]` int16 or float32. It raises OSError, and so does
    `close`, which may be the first to find the disk full."""

    samples: int

    def write(self, audio: np.ndarray) -> None: ...

    def close(self) -> None: ...


def format_of(path: Path) -> str:
    """The ending that decides the format. Raises InvalidRequest for one that is not known."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise InvalidRequest(f"{path}: the ending must be one of {', '.join(FORMATS)}")
    return ending


def encoding_for(path: Path, *, float_wav: bool = False) -> AudioEncoding:
    """What to ask the server for: 16 bit where the file holds 16, so that its samples are the server's."""
    ending = format_of(path)
    if ending == ".flac" or (ending == ".wav" and not float_wav):
        return "s16"
    return "f32"


def encoding_in(path: Path) -> AudioEncoding:
    """What was asked for to make this file, by what is in it. Raises OSError where it can't be read."""
    try:
        float_wav = soundfile.info(path).subtype == "FLOAT"
    except soundfile.SoundFileError as error:
        raise OSError(f"{path}: {error}") from None
    return encoding_for(path, float_wav=float_wav)


def open_sink(path: Path, *, sample_rate_hz: int, dtype: np.dtype) -> AudioSink:
    """A new file for chunks of `dtype` (int16 or float32). Raises OSError where it cannot be made."""
    ending = format_of(path)
    if ending == ".wav":
        return WavWriter(path.open("wb"), sample_rate_hz=sample_rate_hz, dtype=dtype)
    return _SoundFileWriter(path, ending, sample_rate_hz)


class WavWriter:
    """Stereo WAV, 16-bit PCM or 32-bit float by `dtype`, to a file or to a pipe."""

    def __init__(self, file: BinaryIO, *, sample_rate_hz: int, dtype: np.dtype) -> None:
        self.samples = 0
        self._file, self._rate_hz, self._dtype = file, sample_rate_hz, np.dtype(dtype).newbyteorder("<")
        self._seekable = file.seekable()
        self._file.write(self._header(0 if self._seekable else _UNKNOWN_BYTES))
        self._file.flush()

    def write(self, audio: np.ndarray) -> None:
        """Appends `[samples, 2]`; the file is a valid WAV again when this returns."""
        self._file.write(np.ascontiguousarray(audio, dtype=self._dtype).tobytes())
        self.samples += len(audio)
        if self._seekable:
            # The sound lands before the header that counts it: between the two the file is only short.
            self._file.flush()
            self._file.seek(0)
            self._file.write(self._header(self.samples * CHANNELS * self._dtype.itemsize))
            self._file.seek(0, 2)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _header(self, data_bytes: int) -> bytes:
        width = self._dtype.itemsize
        frame_bytes = CHANNELS * width
        integer = self._dtype.kind == "i"
        layout = struct.pack(
            "<HHIIHH",
            1 if integer else 3,  # WAVE_FORMAT_PCM, WAVE_FORMAT_IEEE_FLOAT
            CHANNELS,
            self._rate_hz,
            self._rate_hz * frame_bytes,
            frame_bytes,
            8 * width,
        )
        chunks = _chunk(b"fmt ", layout)
        if not integer:
            # Formats other than PCM carry an extension size and a chunk with the number of samples.
            samples = min(data_bytes // frame_bytes, _UNKNOWN_BYTES)
            chunks = _chunk(b"fmt ", layout + b"\0\0") + _chunk(b"fact", struct.pack("<I", samples))
        riff_bytes = min(4 + len(chunks) + 8 + data_bytes, _UNKNOWN_BYTES)
        return (
            struct.pack("<4sI4s", b"RIFF", riff_bytes, b"WAVE")
            + chunks
            + struct.pack("<4sI", b"data", data_bytes)
        )


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack("<4sI", name, len(body)) + body


class _SoundFileWriter:
    def __init__(self, path: Path, ending: str, sample_rate_hz: int) -> None:
        self.samples = 0
        self._path, self._disk = path, _Disk(path)
        kind, subtype = _SOUNDFILE_FORMATS[ending]
        try:
            with self._errors():
                self._file = soundfile.SoundFile(
                    self._disk,
                    "w",
                    samplerate=sample_rate_hz,
                    channels=CHANNELS,
                    format=kind,
                    subtype=subtype,
                )
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.close()
            raise

    def write(self, audio: np.ndarray) -> None:
        with self._errors():
            for start in range(0, len(audio), _BLOCK_SAMPLES):
                self._file.write(audio[start : start + _BLOCK_SAMPLES])
        self.samples += len(audio)

    def close(self) -> None:
        try:
            with self._errors():
                self._file.close()
        finally:
            self._disk.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what goes wrong inside into an OSError that names the file."""
        try:
            yield
        except (soundfile.SoundFileError, AssertionError) as error:  # the latter: less was written than given
            reason = self._disk.error or OSError(f"{self._path}: {error}")
            raise reason from None
        if self._disk.error is not None:
            raise self._disk.error


class _Disk:
    """The file under libsndfile, which writes through this: it says little of why a write failed, and nothing
    of one that fails while it closes. `error` is the first that there was."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._path = path
        self._file = path.open("wb")

    def write(self, data: bytes) -> int:
        return self._try(lambda: self._file.write(data))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._try(lambda: self._file.seek(offset, whence))

    def tell(self) -> int:
        return self._try(self._file.tell)

    def close(self) -> None:
        """Raises OSError for what could not be written, unless an earlier error was the same."""
        try:
            self._file.close()
        except OSError as error:
            if self.error is None:
                raise self._named(error) from None

    def _try(self, act: Callable[[], int]) -> int:
        # Called by C code, where an exception would end on standard error and go no further.
        try:
            return act()
        except OSError as error:
            self.error = self.error or self._named(error)
            return 0

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))
