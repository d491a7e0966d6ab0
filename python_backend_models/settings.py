"""The one reader of knobs: config.pbtxt parameters and the environment become frozen dataclasses.

For a stage's setting `name`, the first of these that is set wins: environment `MUSIC3_<STAGE>_<NAME>`,
environment `MUSIC3_<NAME>`, the parameter `name` in the stage's config.pbtxt, the default here. A parameter
that isn't a setting, or a value that isn't allowed, fails the load with a message that names it.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from python_backend_models.contract import MAX_SONG_FRAMES, PROFILES
from python_backend_models.engine.precision import ATTENTION, PRECISIONS

ENVIRONMENT_PREFIX = "MUSIC3_"
CHECKPOINT_VARIABLE = f"{ENVIRONMENT_PREFIX}CHECKPOINT"
FAULTS_VARIABLE = f"{ENVIRONMENT_PREFIX}TEST_FAULTS"

Stage = TypeVar("Stage", bound="StageSettings")


class SettingsError(ValueError):
    """A setting that doesn't exist or has a value that isn't allowed."""


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its meaning and its allowed values."""
    rule = {"meaning": meaning, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata=rule)


@dataclass(frozen=True)
class StageSettings:
    """Settings that every stage has."""

    checkpoint: str = setting("", "folder of the checkpoint in its official layout")
    metrics_interval_s: float = setting(
        0.5, "time between two updates of this stage's numbers on the metrics page", least=0.05, most=60
    )

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder.

        Raises:
            SettingsError: none is set, or there is no such folder.
        """
        if not self.checkpoint:
            raise SettingsError(
                f"no checkpoint: set the parameter `checkpoint` in config.pbtxt or {CHECKPOINT_VARIABLE}"
            )
        path = Path(self.checkpoint)
        if not path.is_dir():
            raise SettingsError(f"checkpoint: there is no folder {path}")
        return path


@dataclass(frozen=True)
class DeviceSettings(StageSettings):
    """Settings of the stages that compute."""

    device: str = setting(
        "auto", "auto: the instance's GPU where there is one, else the CPU", choices=("auto", "cpu", "cuda")
    )
    cpu_threads: int = setting(
        0, "threads of a computation on the CPU; 0: half the cores, as two stages work at once", least=0
    )
    fault: str = setting(
        "",
        f"for tests only, refused unless {FAULTS_VARIABLE}=1 is in the environment: break something once, "
        "see engine/faults.py",
    )

    @property
    def threads(self) -> int:
        return self.cpu_threads or max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(frozen=True)
class Music3Settings(StageSettings):
    """Settings of `music3`, the orchestrator."""

    profile: str = setting(
        PROFILES[0], "whose rules decide lead-in frame, draw seed and 16-bit rounding", choices=PROFILES
    )
    live_songs: int = setting(
        8,
        "songs in the making at once; each takes a thread of the Python backend (thread-pool-size, which "
        "serve sets by this value in the environment)",
        least=1,
        most=64,
    )
    windows_in_flight: int = setting(
        0,
        "windows with dit at once; the others wait, first windows and old songs ahead; 0: twice what one dit "
        "solves together, by its settings in the environment (16 on a GPU, 2 on a CPU)",
        least=0,
    )
    waiting_songs: int = setting(256, "songs that may wait for a place; more are UNAVAILABLE", least=0)
    max_frames: int = setting(MAX_SONG_FRAMES, "longest song that is accepted", least=1, most=MAX_SONG_FRAMES)
    stage_limit_s: float = setting(
        300.0,
        "a song whose call to a stage takes longer is given up as UNAVAILABLE; more than the talker's "
        "answer_within_s",
        least=1,
    )
    reopen_after_s: float = setting(
        7.0,
        "a song's sequence at the talker that was not used for so long is opened again; a little less than "
        "the talker's max_sequence_idle_microseconds",
        least=0,
    )
    control_folder: str = setting(
        "/dev/shm", "where this process and the drain command leave each other notes; must be writable"
    )


@dataclass(frozen=True)
class TalkerSettings(DeviceSettings):
    """Settings of `talker`."""

    live_songs: int = setting(
        8, "songs written at once; at least music3's, at most max_candidate_sequences", least=1, most=64
    )
    precision: str = setting(
        "auto",
        "dtype of weights and cache; auto: the checkpoint's",
        choices=("auto", "bfloat16", "float32"),
    )
    graphs: str = setting(
        "frame",
        "what CUDA graphs hold: the whole frame, the depth loop, or nothing; nothing on a CPU",
        choices=("frame", "depth", "off"),
    )
    kv_tokens: int = setting(
        0, "size of the key-value pool in tokens of one row; 0: what memory allows", least=0
    )
    kv_page_tokens: int = setting(256, "tokens in a page; a GPU's kernel needs a multiple of 256", least=1)
    kv_memory_fraction: float = setting(
        0.5, "share of the free device memory for the pool where kv_tokens is 0", least=0.01, most=0.95
    )
    run_ahead_windows: int = setting(
        1, "windows a song is written ahead of what its sound has reached", least=0, most=16
    )
    prefill_chunk_tokens: int = setting(
        512, "prompt tokens computed between two frames of the other songs", least=16, most=8192
    )
    read_interval_frames: int = setting(
        4, "frames between two looks at a GPU's stop flags; a CPU is looked at every frame", least=1, most=50
    )
    idle_limit_s: float = setting(
        600.0, "a song that nobody asks for a window is dropped after this", least=1
    )
    answer_within_s: float = setting(
        3.0,
        "a request that waits longer for its window is told to ask again; until then a cancel of its song or "
        "the server's stop goes unnoticed",
        least=0.1,
        most=60,
    )


@dataclass(frozen=True)
class DitSettings(DeviceSettings):
    """Settings of `dit`."""

    precision: str = setting("float32", "of weights and matrix products", choices=PRECISIONS)
    attention: str = setting(
        "auto", "attention kernel; auto: the first that the device has, in this order", choices=ATTENTION
    )
    graphs: str = setting("on", "CUDA graphs of full windows; nothing on a CPU", choices=("on", "off"))
    batch_windows: int = setting(
        8, "most windows computed at once on a GPU; fewer need less memory", least=1, most=8
    )
    compiled: str = setting(
        "off",
        "let torch.compile fuse what surrounds the products; the load takes longer",
        choices=("on", "off"),
    )


@dataclass(frozen=True)
class VocoderSettings(DeviceSettings):
    """Settings of `vocoder`."""

    precision: str = setting("float32", "of weights and convolutions", choices=PRECISIONS)
    graphs: str = setting("on", "CUDA graphs of full windows; nothing on a CPU", choices=("on", "off"))
    batch_windows: int = setting(
        8, "most windows computed at once on a GPU; fewer need less memory", least=1, most=8
    )
    compiled: str = setting(
        "off",
        "let torch.compile fuse what surrounds the products; the load takes longer",
        choices=("on", "off"),
    )


def read(
    kind: type[Stage],
    stage: str,
    parameters: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> Stage:
    """Read a stage's settings.

    Args:
        stage: its name, for the environment and for messages.
        parameters: of its config.pbtxt, those of Triton itself left out by their upper-case names.

    Raises:
        SettingsError: naming the setting, what is wrong with it and what is allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    own = {name: value for name, value in parameters.items() if not name.isupper()}
    if unknown := sorted(own.keys() - fields.keys()):
        raise SettingsError(f"{stage}: unknown parameter {unknown[0]!r}; allowed: {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        sources = (
            (f"{ENVIRONMENT_PREFIX}{stage.upper()}_{name.upper()}", environment),
            (f"{ENVIRONMENT_PREFIX}{name.upper()}", environment),
            (name, own),
        )
        for key, source in sources:
            if source.get(key, ""):
                values[name] = _parse(stage, key, source[key], field)
                break
    if values.get("fault") and environment.get(FAULTS_VARIABLE) != "1":
        raise SettingsError(f"{stage}: fault is set, which is for tests: it needs {FAULTS_VARIABLE}=1")
    return kind(**values)


def _parse(stage: str, key: str, text: str, field: Any) -> Any:
    rule, kind = field.metadata, type(field.default)
    try:
        value = kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise SettingsError(f"{stage}: {key} is {text!r}, not {noun}") from None
    least, most, choices = rule["least"], rule["most"], rule["choices"]
    if choices and value not in choices:
        raise SettingsError(f"{stage}: {key} is {text!r}; allowed: {', '.join(choices)}")
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise SettingsError(f"{stage}: {key} is {text}; allowed: {bounds}")
    return value
