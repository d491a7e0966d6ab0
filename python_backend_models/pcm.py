"""Float sound to 16-bit PCM, and the header that makes it a WAV file."""

import struct
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Profile = Literal["vllm-omni", "sglang-omni"]

_BYTES_PER_SAMPLE: Final = 2
_PCM_FORMAT: Final = 1
_UNKNOWN_BYTES: Final = 0xFFFFFFFF
_HEADER_BYTES_AFTER_RIFF_SIZE: Final = 36


def to_int16(samples: NDArray[np.float32], *, profile: Profile) -> NDArray[np.int16]:
    """16-bit samples as the profile's reference writes them.

    Args:
        samples: float32 of any shape; full scale is ±1, what exceeds it is clipped.
        profile: `vllm-omni` writes floor(32768 x), by way of libsndfile, which first rounds to 32 bits (so
            what is within 2^-32 of the next step reaches it); `sglang-omni` writes 32767 x less its fraction.

    Raises:
        ValueError: an unknown profile.
    """
    samples = np.asarray(samples, dtype=np.float32)
    if profile == "vllm-omni":
        in_32_bits = np.rint(samples * np.float32(2**31))
        return np.clip(np.floor(in_32_bits / np.float32(2**16)), -32768, 32767).astype(np.int16)
    if profile == "sglang-omni":
        return (np.clip(samples, -1.0, 1.0) * np.float32(32767)).astype(np.int16)
    raise ValueError(f"unknown profile {profile!r}: vllm-omni or sglang-omni")


def wav_header(sample_rate_hz: int, channels: int, data_bytes: int | None) -> bytes:
    """The 44 bytes before 16-bit PCM data.

    Args:
        sample_rate_hz: of the data.
        channels: interleaved in the data.
        data_bytes: size of the data; None for a stream, which players read to its end.

    Raises:
        ValueError: more data than a WAV file can hold.
    """
    if data_bytes is None:
        riff_bytes = data_bytes = _UNKNOWN_BYTES
    else:
        riff_bytes = data_bytes + _HEADER_BYTES_AFTER_RIFF_SIZE
        if riff_bytes > _UNKNOWN_BYTES:
            raise ValueError(f"a WAV file can't hold {data_bytes} bytes of sound")
    frame_bytes = channels * _BYTES_PER_SAMPLE
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        riff_bytes,
        b"WAVE",
        b"fmt ",
        16,
        _PCM_FORMAT,
        channels,
        sample_rate_hz,
        sample_rate_hz * frame_bytes,
        frame_bytes,
        8 * _BYTES_PER_SAMPLE,
        b"data",
        data_bytes,
    )
