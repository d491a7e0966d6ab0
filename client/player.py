"""Playing a song while it arrives, through whichever player program the machine has."""

import contextlib
import queue
import shutil
import subprocess
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from client.audio_files import WavWriter
from client.errors import InvalidRequest
from python_backend_models.contract import CHANNELS
from python_backend_models.pcm import to_int16


@dataclass(frozen=True)
class Program:
    """A player that reads its standard input: raw 16-bit samples, or a WAV of unknown length."""

    name: str
    arguments: tuple[str, ...]
    raw: bool


PROGRAMS: Final = (
    Program("ffplay", ("-nodisp", "-autoexit", "-loglevel", "error", "-i", "-"), raw=False),
    Program("mpv", ("--no-terminal", "--no-video", "-"), raw=False),
    Program("paplay", ("--raw", "--format=s16le", "--rate={rate}", f"--channels={CHANNELS}"), raw=True),
    Program("aplay", ("-q", "-t", "raw", "-f", "S16_LE", "-r", "{rate}", "-c", str(CHANNELS), "-"), raw=True),
    Program(
        "play",
        ("-q", "-t", "raw", "-e", "signed", "-b", "16", "-r", "{rate}", "-c", str(CHANNELS), "-"),
        raw=True,
    ),
)


def find_program() -> Program:
    """The first player found on PATH. Raises InvalidRequest where there is none."""
    for program in PROGRAMS:
        if shutil.which(program.name):
            return program
    names = ", ".join(program.name for program in PROGRAMS)
    raise InvalidRequest(f"--play: no player on PATH; any of {names} will do")


class Player:
    """Feeds a player from a thread of its own: it takes sound only as fast as it sounds, and neither the
    stream nor the file may wait for it. A player that is closed by its user is left alone."""

    def __init__(self, program: Program, *, sample_rate_hz: int) -> None:
        arguments = [argument.format(rate=sample_rate_hz) for argument in program.arguments]
        self._process = subprocess.Popen([program.name, *arguments], stdin=subprocess.PIPE)
        self.samples = 0
        self._program, self._rate_hz = program, sample_rate_hz
        self._queue: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, name="player", daemon=True)
        self._thread.start()

    def write(self, audio: np.ndarray) -> None:
        """Queues `[samples, 2]`, int16 or float32; returns at once."""
        self.samples += len(audio)
        self._queue.put(audio if audio.dtype == np.int16 else to_int16(audio, profile="vllm-omni"))

    def stop(self) -> None:
        """Silence at once, from any thread."""
        self._process.terminate()

    def close(self) -> None:
        """Waits until everything was played, or until the player was stopped."""
        self._queue.put(None)
        self._thread.join()
        self._process.wait()

    def _feed(self) -> None:
        pipe = self._process.stdin
        # The user may close the player before the song ends.
        with contextlib.suppress(BrokenPipeError), pipe:
            wav = None
            if not self._program.raw:
                wav = WavWriter(pipe, sample_rate_hz=self._rate_hz, dtype=np.dtype(np.int16))
            while (audio := self._queue.get()) is not None:
                if wav is not None:
                    wav.write(audio)
                else:
                    pipe.write(audio.astype("<i2", copy=False).tobytes())
                    pipe.flush()
