"""The server's stub processes as /proc shows them: which runs which model, and which are gone.

The server itself is silent about a dead stub: measured on Triton 2.51, it and the model stay ready, no new
stub is started, and a call that waited for the dead one never returns. So whoever waits has to look. Standard
library only; where /proc shows nothing, nobody is ever reported dead.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_INSTANCE = re.compile(r"(.+)_\d+_\d+")  # the server's name for a model instance, an argument of its stub
_SEARCH_EVERY_S = 10.0

Finder = Callable[[int], Mapping[int, str]]


def find_stubs(server_pid: int) -> dict[int, str]:
    """Process ids of a server's living stubs, and the model that each runs."""
    return {pid: model for pid, model, _ in _all_stubs() if parent_of(pid) == server_pid}


def find_orphans(server_pid: int) -> list[int]:
    """Stubs of a server that have lost it: after a crash they wait for ever, with the device's memory.

    They stay the children of a server that is killed until the last of its threads is gone.
    """
    fathers = (None, server_pid) if parent_of(server_pid) is not None else (None,)
    return sorted(
        pid
        for pid, _, arguments in _all_stubs()
        # The server's process id is the fourth of a stub's own arguments after its model's file.
        if arguments[5:6] == [str(server_pid)] and parent_of(pid) not in fathers
    )


def _all_stubs() -> Iterator[tuple[int, str, list[str]]]:
    """Every server's: process id, model, command line."""
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            arguments = _arguments(folder)
            model = model_of(arguments)
            if model is not None:
                yield int(folder.name), model, arguments


def parent_of(pid: int) -> int | None:
    """The parent of a living process; None where there is no such process, or only what is left of it."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[1])


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where there is no such process.

    With the process id it names a process for good: ids come again, and each container has a first one.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str]:
    """What /proc says of a process, from its state (the third field in proc(5)) on; empty if it is gone."""
    try:
        # The name, in parentheses, may hold anything.
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _arguments(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def model_of(arguments: list[str]) -> str | None:
    """The model whose instance a process with these arguments runs; None for any other process."""
    if len(arguments) < 2 or Path(arguments[0]).name != _STUB:
        return None
    folder = Path(arguments[1]).parents[1].name  # <model>/<version>/model.py
    for argument in arguments[2:]:
        if match := _INSTANCE.fullmatch(argument):
            return match[1]
        if argument == folder:
            return None  # no instance: it completes the model's config while the server loads, and ends
    return folder


class StubWatch:
    """Remembers a server's stubs and notices when one is gone. Not for two threads at once.

    Args:
        server_pid: the server's process id, i.e. a stub's parent.
    """

    def __init__(self, server_pid: int, *, find: Finder = find_stubs) -> None:
        self._server_pid, self._find = server_pid, find
        self._known: dict[int, str] = {}
        self._died_s: dict[str, float] = {}
        self._searched_s: float | None = None

    def look(self) -> None:
        """Check the stubs that are known; every few seconds, look for new ones too."""
        now_s = time.monotonic()
        gone = [pid for pid in self._known if parent_of(pid) != self._server_pid]
        for pid in gone:
            self._died_s[self._known.pop(pid)] = now_s
        if self._searched_s is None or gone or now_s - self._searched_s >= _SEARCH_EVERY_S:
            self._known, self._searched_s = dict(self._find(self._server_pid)), now_s

    def died_s(self, model: str) -> float | None:
        """When (`time.monotonic`) a stub of the model was last found gone; None if never."""
        return self._died_s.get(model)

    @property
    def models(self) -> dict[str, int]:
        """Living stubs by model."""
        counts: dict[str, int] = {}
        for model in self._known.values():
            counts[model] = counts.get(model, 0) + 1
        return counts
