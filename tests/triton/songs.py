"""What the tests of this folder ask a server, and what they hold it to afterwards.

`audit` is the server's own account of itself: nothing running, waiting, held or lost. The offline songs are
made in the test's process without pages, slots, threads or batches.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client import Music3Client, Music3Error, Song
from python_backend_models import offline
from python_backend_models.prompt import frame_budget
from tests.soak.growth import SLACK, TOLERANCE
from tests.triton.server import TritonServer, wait_until

CAPTION = "warm folk, one guitar, a slow waltz"
STAGES = ("music3", "talker", "dit", "vocoder")
LYRICS = "[Verse]\nThe river learns the colour of the sky\n[Chorus]\nStay a while"
_SAMPLE = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_HEARTBEAT = "_published_total"
SETTLED_WITHIN_S = 120.0
# Bytes may grow as much as the soak lets them; threads and files come and go with the server's own pools.
_SLACK_BYTES = {"rss": SLACK["rss"], "shared memory": SLACK["shm"]}
_SLACK_COUNT = {"threads": 8, "open files": 8}


class OfflineSongs:
    """Songs of one checkpoint. Frames are computed once: a shorter cap is a prefix of a longer one's."""

    def __init__(self, checkpoint: Path) -> None:
        self.models = offline.load_models(checkpoint)
        self._frames = functools.cache(self._write)

    def audio(self, *, seed: int = 0, frames: int, of: int | None = None) -> np.ndarray:
        """Sound `[samples, 2]` of a song capped at `frames`; `of`: the longest cap that will be asked for."""
        hidden, reason = self._frames(seed, of or frames)
        assert reason == "length" or of is None
        with torch.inference_mode():
            return torch.cat(offline.render(self.models, hidden[:frames], seed=seed)).numpy()

    def finish(self, *, seed: int, frames: int) -> tuple[int, str]:
        """Frames that come of a cap, and why they end."""
        hidden, reason = self._frames(seed, frames)
        return len(hidden), reason

    def _write(self, seed: int, frames: int) -> tuple[torch.Tensor, str]:
        prompt = self.models.prompts.build(CAPTION, LYRICS)
        _, hidden, reason = offline.write_frames(
            self.models.backbone,
            self.models.depth,
            prompt.ids,
            prompt.unconditional_ids,
            seed=seed,
            max_frames=frame_budget(len(prompt.ids), frames),
        )
        return hidden.to(torch.bfloat16), reason


def sing(client: Music3Client, *, caption: str = CAPTION, lyrics: str = LYRICS, **options: Any) -> Song:
    """A whole song."""
    return client.generate(caption, lyrics, **options)


def together(tasks: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all at once, each in its own thread; results in order, a Music3Error as a result."""
    waiting = list(tasks)
    barrier = threading.Barrier(len(waiting))

    def run(task: Callable[[], Any]) -> Any:
        barrier.wait(60)
        try:
            return task()
        except Music3Error as error:
            return error

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(run, waiting))


def metrics(server: TritonServer) -> dict[str, float]:
    """This project's values on the metrics page by `name` or `name label`, but for the heartbeats."""
    values: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(server.metrics()):
        if name.startswith("music3_") and not name.endswith(_HEARTBEAT):
            own = [text for label, text in _LABEL.findall(labels) if label != "instance_name"]
            key = " ".join([name, *own])
            values[key] = values.get(key, 0.0) + float(value)
    return values


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What changed between two readings of `metrics`."""
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def heartbeats(server: TritonServer) -> dict[str, float]:
    """Of each model instance, the rounds in which its numbers came to the page."""
    return {
        f"{name} {labels}": float(value)
        for name, labels, value in _SAMPLE.findall(server.metrics())
        if name.endswith(_HEARTBEAT)
    }


def fresh_metrics(server: TritonServer, *, dead: Collection[str] = ()) -> dict[str, float]:
    """`metrics` that tell of all that was counted before this call; `dead` stages count nothing any more."""
    before = heartbeats(server)
    assert len(before) >= 4
    alive = [name for name in before if not any(f"music3_{stage}_" in name for stage in dead)]

    def newer() -> bool:
        now = heartbeats(server)
        return all(now[name] >= before[name] + 2 for name in alive)  # one round may have been under way

    wait_until(newer, timeout_s=SETTLED_WITHIN_S, what="a newer metrics page")
    return metrics(server)


def stage_threads(server: TritonServer) -> dict[str, float]:
    """Threads of each model's process."""
    threads = server.threads()
    return {stage: float(sum(threads[pid] for pid in server.stub_pids(stage))) for stage in STAGES}


def more_threads(server: TritonServer) -> dict[str, float]:
    """Threads of each model's process beyond those that `note_threads` saw; none if it never looked."""
    return {
        f"threads of {stage}": max(0.0, count - server.threads_at_rest.get(stage, count))
        for stage, count in stage_threads(server).items()
    }


def note_threads(server: TritonServer, *, slots: int = 8) -> None:
    """Keep in mind the threads of a server at rest; more than these fail every later `audit`."""
    audit(server, slots=slots)
    server.threads_at_rest = stage_threads(server)


def warm_up(server: TritonServer, *, slots: int = 8) -> None:
    """Give the stages' pools their size, and note the threads at rest.

    By songs of more than one window: a library makes its pools when there is enough to compute, and a
    server's first song may have a single frame.
    """
    with Music3Client(server.grpc_url) as client:
        _sing_all(client, frames=[250] * min(2, slots))
    note_threads(server, slots=slots)


def fill_places(client: Music3Client, *, slots: int = 8) -> None:
    """A song in every place, each of more than one window: shared memory gets the size that load gives it."""
    _sing_all(client, frames=[201] * slots)


def _sing_all(client: Music3Client, *, frames: list[int]) -> None:
    for made in together(
        [
            lambda seed=seed, cap=cap: sing(client, seed=seed, max_frames=cap)
            for seed, cap in enumerate(frames)
        ]
    ):
        if isinstance(made, Music3Error):
            raise made


def held(server: TritonServer) -> dict[str, float]:
    """What the server and its stubs hold, all together."""
    return {
        "rss": sum(server.rss_bytes().values()),
        "shared memory": sum(server.shared_memory_bytes().values()),
        "threads": sum(server.threads().values()),
        "open files": sum(server.open_files().values()),
    }


def check_held(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Fail if something that the server holds grew by more than the soak would let it."""
    limits = {name: max(TOLERANCE * before[name], slack) for name, slack in _SLACK_BYTES.items()}
    grew = {
        name: (before[name], after[name])
        for name, limit in (limits | _SLACK_COUNT).items()
        if after[name] - before[name] > limit
    }
    assert not grew, f"before and after: {grew}"


def outcomes(change: Mapping[str, float]) -> dict[str, float]:
    """Songs by what came of them, out of what `grown` found."""
    prefix = "music3_songs_total "
    return {name.removeprefix(prefix): count for name, count in change.items() if name.startswith(prefix)}


def cancelled_since(server: TritonServer, before: Mapping[str, float], *, songs: int) -> dict[str, float]:
    """Wait until the page tells of so many cancelled songs, and of no others; all that changed."""
    wait_until(
        lambda: outcomes(grown(before, metrics(server))).get("cancelled", 0) >= songs,
        timeout_s=SETTLED_WITHIN_S,
        what=f"{songs} cancelled songs",
        poll_s=0.2,
    )
    change = grown(before, audit(server))
    assert outcomes(change) == {"cancelled": songs}
    return change


def audit(
    server: TritonServer, *, slots: int = 8, draining: bool = False, dead: Collection[str] = ()
) -> dict[str, float]:
    """Wait until nothing runs; fail unless every slot, page, place and thread is free. The metrics then."""
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    while True:
        now = fresh_metrics(server, dead=dead)
        taken = {
            name: now[f"music3_{name}"]
            for name in ("live_songs", "waiting_songs", "talker_live_songs", "talker_waiting_songs")
        }
        taken["slots taken"] = slots - now["music3_talker_free_slots"]
        taken["pages taken"] = now["music3_talker_pages"] - now["music3_talker_free_pages"]
        taken |= more_threads(server) if not dead else {}
        taken["not accepting"] = (1 - now["music3_accepting"]) if not draining else 0
        left = {name: value for name, value in taken.items() if value}
        if not left:
            return now
        if time.monotonic() > deadline_s:
            raise AssertionError(f"left behind: {left}")
