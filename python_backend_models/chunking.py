"""The window schedule: which frames a window covers, when it may be released, how long its sound is.

A window is 200 frames and starts every 100; only the last one may be shorter. Plain integers, no tensors.
Window k's latent 0 is the same moment as window k-1's latent 345, not 344.53 (100 frames), so a song is
0.14 % longer than its frames; that is how the checkpoint is meant to be used. Source: vllm-omni 0.30.0.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Final

from python_backend_models.contract import (
    LATENT_HOP_SAMPLES,
    LATENTS_PER_FRAME,
    LEFT_CROP_LATENTS,
    OUTPUT_RATE_HZ,
    RESAMPLER_BLOCK_SAMPLES,
    RIGHT_CROP_LATENTS,
    VOCODER_RATE_HZ,
    WINDOW_FRAMES,
    WINDOW_HOP_FRAMES,
)

_OUTPUT_BLOCK_SAMPLES: Final = RESAMPLER_BLOCK_SAMPLES * OUTPUT_RATE_HZ // VOCODER_RATE_HZ


@dataclass(frozen=True)
class Window:
    """Frames `[start_frame, end_frame)` of a song, rendered in one piece."""

    index: int
    start_frame: int
    end_frame: int
    is_first: bool
    is_last: bool

    @property
    def frames(self) -> int:
        return self.end_frame - self.start_frame

    @property
    def latents(self) -> int:
        """Latents the window is solved for, including those its neighbours keep."""
        return window_latents(self.frames)

    @property
    def crop_samples(self) -> tuple[int, int]:
        """Samples at 44.1 kHz to cut from the left and from the right of the window's sound."""
        left = 0 if self.is_first else LEFT_CROP_LATENTS * LATENT_HOP_SAMPLES
        right = 0 if self.is_last else RIGHT_CROP_LATENTS * LATENT_HOP_SAMPLES
        return left, right

    @property
    def kept_samples(self) -> int:
        """Samples at 44.1 kHz that the window adds to the song."""
        return self.latents * LATENT_HOP_SAMPLES - sum(self.crop_samples)


def windows(frames: int) -> list[Window]:
    """Every window of a finished song; none for a song without frames."""
    count = _window_count(frames)
    return [_window(index, frames, is_last=index == count - 1) for index in range(count)]


def window_at(index: int, frames: int, *, finished: bool) -> Window | None:
    """The window `index` if it can be rendered now, else None.

    Args:
        index: from 0.
        frames: drawn so far.
        finished: whether the song ends with these frames. Until then a window waits for the frame after it,
            because only that frame shows that the window isn't the last one, which is cropped differently.
    """
    if not finished and frames <= index * WINDOW_HOP_FRAMES + WINDOW_FRAMES:
        return None
    count = _window_count(frames)
    return _window(index, frames, is_last=finished and index == count - 1) if index < count else None


def window_latents(frames: int) -> int:
    """Latents of a window of that many frames."""
    numerator, denominator = LATENTS_PER_FRAME
    return max(1, frames * numerator // denominator)


def song_latents(frames: int) -> int:
    """Latents of the finished song's sound: what its windows keep, together."""
    return song_samples_44k(frames) // LATENT_HOP_SAMPLES


def song_samples_44k(frames: int) -> int:
    """Samples per channel of the finished song as the vocoder makes it."""
    return sum(window.kept_samples for window in windows(frames))


def song_samples_32k(frames: int, *, streamed: bool = True) -> int:
    """Samples per channel of the finished song as a client gets it.

    Args:
        frames: of the song.
        streamed: resampled window by window (what the server does). Otherwise in one call: the same sound,
            but for some lengths another last sample is lost to the resampler's float32 length.
    """
    if not streamed:
        return _resampled_samples(song_samples_44k(frames))
    samples = pending = context = 0
    for window in windows(frames):
        buffered = pending + window.kept_samples
        if window.is_last:
            skipped = context * OUTPUT_RATE_HZ // VOCODER_RATE_HZ
            wanted = ceil(buffered * _OUTPUT_BLOCK_SAMPLES / RESAMPLER_BLOCK_SAMPLES)
            return samples + min(wanted, _resampled_samples(context + buffered) - skipped)
        blocks = max(0, buffered - RESAMPLER_BLOCK_SAMPLES) // RESAMPLER_BLOCK_SAMPLES
        samples += blocks * _OUTPUT_BLOCK_SAMPLES
        pending = buffered - blocks * RESAMPLER_BLOCK_SAMPLES
        context = RESAMPLER_BLOCK_SAMPLES if blocks else context
    return samples


@lru_cache(maxsize=256)
def _resampled_samples(samples: int) -> int:
    """Output length of one resampler call, which rounds the exact quotient to float32 before the ceiling."""
    exact = samples * _OUTPUT_BLOCK_SAMPLES / RESAMPLER_BLOCK_SAMPLES
    return ceil(struct.unpack("f", struct.pack("f", exact))[0])


def _window_count(frames: int) -> int:
    if frames <= WINDOW_FRAMES:
        return int(frames > 0)
    return -(-frames // WINDOW_HOP_FRAMES) - 1


def _window(index: int, frames: int, *, is_last: bool) -> Window:
    start = index * WINDOW_HOP_FRAMES
    end = min(start + WINDOW_FRAMES, frames)
    return Window(index=index, start_frame=start, end_frame=end, is_first=index == 0, is_last=is_last)
