"""44.1 kHz to 32 kHz, whole or as a stream whose pieces join without a seam.

The filter is torchaudio's `functional.resample` with its defaults, evaluated in float32 on the CPU. A stream
emits whole blocks of 441 samples and keeps one block on either side as context, so what it emits equals the
whole-signal result bit for bit; only the very last sample may be missing (`chunking.song_samples_32k` knows).
Source of the streaming rule: vllm-omni 0.30.0.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from python_backend_models.contract import (
    CHANNELS,
    OUTPUT_RATE_HZ,
    RESAMPLER_BLOCK_SAMPLES,
    VOCODER_RATE_HZ,
)

_COMMON_HZ: Final = gcd(VOCODER_RATE_HZ, OUTPUT_RATE_HZ)
_RATES: Final = (VOCODER_RATE_HZ, OUTPUT_RATE_HZ, _COMMON_HZ)
_OUTPUT_BLOCK_SAMPLES: Final = OUTPUT_RATE_HZ // _COMMON_HZ
_importing = threading.Lock()


class StreamingResampler:
    """Resampler of one song. It holds at most three blocks of sound."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._context: Tensor | None = None
        self._pending = torch.zeros(CHANNELS, 0)

    def push(self, waveform: Tensor, *, flush: bool = False) -> Tensor:
        """Add sound and take what can be emitted.

        Args:
            waveform: `[2, samples]` at 44.1 kHz; may be empty.
            flush: the song ends here: emit the rest and be as new.

        Returns:
            `[2, samples]` at 32 kHz, float32; empty while too little is known.
        """
        buffered = torch.cat((self._pending, waveform.to("cpu", torch.float32)), dim=1)
        total = buffered.shape[1]
        blocks = max(0, total - RESAMPLER_BLOCK_SAMPLES) // RESAMPLER_BLOCK_SAMPLES
        emitted = total if flush else blocks * RESAMPLER_BLOCK_SAMPLES
        if emitted == 0:
            self._pending = buffered
            if flush:
                self._reset()
            return buffered[:, :0]
        known = buffered[:, : min(total, emitted + RESAMPLER_BLOCK_SAMPLES)]
        skipped = 0
        if self._context is not None:
            known = torch.cat((self._context, known), dim=1)
            skipped = _OUTPUT_BLOCK_SAMPLES
        wanted = -(-emitted * _OUTPUT_BLOCK_SAMPLES // RESAMPLER_BLOCK_SAMPLES)
        if flush:
            self._reset()
        else:
            self._context = buffered[:, emitted - RESAMPLER_BLOCK_SAMPLES : emitted].clone()
            self._pending = buffered[:, emitted:].clone()
        return resample(known)[:, skipped : skipped + wanted]


def resample(waveform: Tensor) -> Tensor:
    """A whole signal: `[channels, samples]` at 44.1 kHz to `[channels, ceil(samples * 320 / 441)]` at 32 kHz.

    The length is rounded to float32 before the ceiling, which for some lengths loses the last sample.
    """
    functional = torchaudio_functional()
    waveform = waveform.to("cpu", torch.float32).contiguous()
    return functional._apply_sinc_resample_kernel(waveform, *_RATES, *_kernel())


@lru_cache(maxsize=1)
def _kernel() -> tuple[Tensor, int]:
    """The 320 x 459 filter and its reach. `functional.resample` would build it anew for every chunk."""
    return torchaudio_functional()._get_sinc_resample_kernel(*_RATES, dtype=torch.float32)


@lru_cache(maxsize=1)
def torchaudio_functional() -> types.ModuleType:
    """torchaudio's module of functionals, which is plain torch, without loading torchaudio's binary.

    The binary is built against one torch and one CUDA and refuses to load beside others; importing torchaudio
    then fails although nothing here needs it. Where torchaudio is imported already, that one is used.

    Raises:
        ModuleNotFoundError: torchaudio is not installed.
    """
    with _importing:
        if "torchaudio.functional.functional" in sys.modules:
            return sys.modules["torchaudio.functional.functional"]
        spec = importlib.util.find_spec("torchaudio")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("torchaudio is not installed")
        with _binary_free_torchaudio(Path(spec.origin).parent):
            return importlib.import_module("torchaudio.functional.functional")


@contextlib.contextmanager
def _binary_free_torchaudio(folder: Path) -> Iterator[None]:
    """Stand-ins for the package and its extension while a submodule is imported, then no trace of them."""
    before = {name: module for name, module in sys.modules.items() if _is_torchaudio(name)}
    package, extension = types.ModuleType("torchaudio"), types.ModuleType("torchaudio._extension")
    package.__path__ = [str(folder)]
    extension._IS_TORCHAUDIO_EXT_AVAILABLE = False
    extension.fail_if_no_align = lambda function: function
    sys.modules.update({"torchaudio": package, "torchaudio._extension": extension})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_torchaudio(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_torchaudio(name: str) -> bool:
    return name == "torchaudio" or name.startswith("torchaudio.")
