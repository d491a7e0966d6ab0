"""What an operator does to a running server from beside it: drain it, or end it when it can't be repaired.

    python -m python_backend_models.control drain [--after S] [--stop]
    python -m python_backend_models.control guard PID HOST:HTTP_PORT

The drain command and the `music3` process leave each other notes in a folder that both can write to, named
after the server's process; nobody can drain a server over the network. Standard library only.
"""

import argparse
import contextlib
import http.client
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from python_backend_models.stub_processes import (
    StubWatch,
    find_orphans,
    find_stubs,
    parent_of,
    started_ticks,
)

DEFAULT_FOLDER = Path(os.environ.get("MUSIC3_CONTROL_FOLDER") or "/dev/shm")  # as the server's setting
FRONT_DOOR = "music3"
_POLL_S = 0.2
_ANSWER_WITHIN_S = 10.0
_GUARD_POLL_S = 1.0
_GUARD_LOOKS = 3
# Between the death of a stub and the end of its server: time for `music3` to answer the songs concerned.
_LAST_ANSWERS_S = 8.0
_ORPHANS_S = 2.0
_EXIT_WITHIN_S = 5.0  # with a dead stub the server would wait in vain for much longer

DRAINED, NOT_YET, NO_SERVER = 0, 1, 2


class DrainNotes:
    """The two notes of one server: the wish to drain, and how many songs still run.

    Args:
        folder: writable by the server and by whoever drains it. Several containers may share one, each with
            a server of the same process id; so the names say, too, when the process started.
        server_pid: the server's process id.
    """

    def __init__(self, folder: Path, server_pid: int) -> None:
        name = f"music3-{server_pid}-{started_ticks(server_pid) or 0}"
        self._wish = folder / f"{name}.drain"
        self._answer = folder / f"{name}.draining"

    def wish(self) -> None:
        """Ask for a drain."""
        self._wish.touch(mode=0o644)

    def withdraw(self) -> None:
        """Take everything back."""
        self._wish.unlink(missing_ok=True)
        self._answer.unlink(missing_ok=True)

    @property
    def wished(self) -> bool:
        """Whether somebody who may has asked for it: this process's user, or root."""
        try:
            return self._wish.stat().st_uid in (os.geteuid(), 0)
        except OSError:
            return False

    def answer(self, live_songs: int | None) -> None:
        """Say how many songs still run; None: not draining."""
        if live_songs is None:
            self._answer.unlink(missing_ok=True)
            return
        unfinished = self._answer.with_suffix(".new")
        unfinished.write_text(f"{live_songs}\n")
        unfinished.replace(self._answer)

    @property
    def live_songs(self) -> int | None:
        """Songs that still run, as far as the server has answered."""
        try:
            return int(self._answer.read_text())
        except (OSError, ValueError):
            return None


def drain(server_pid: int, *, folder: Path, timeout_s: float, stop: bool, after_s: float = 0.0) -> int:
    """Have a server refuse new songs, and wait until the live ones are done.

    Args:
        timeout_s: for the live ones, from the first refusal on.
        stop: end the server then.
        after_s: go on taking songs for so long first: who sends them here may not have heard yet that this
            server is about to end.

    Returns:
        DRAINED, NOT_YET when time is up, or NO_SERVER when nobody answers.
    """
    notes = DrainNotes(folder, server_pid)
    if after_s > 0:
        _say(f"server {server_pid} takes songs for {after_s:g} s more")
        _wait(lambda: parent_of(server_pid) is None, timeout_s=after_s)
    notes.wish()
    started_s, told = time.monotonic(), None
    while parent_of(server_pid) is not None:
        live, waited_s = notes.live_songs, time.monotonic() - started_s
        if live == 0:
            _say(f"server {server_pid} is drained: no song runs, new ones are refused")
            if stop:
                os.kill(server_pid, signal.SIGTERM)
                _say("told the server to stop")
            return DRAINED
        if live is None and waited_s > _ANSWER_WITHIN_S:
            _say(f"server {server_pid} does not answer; does its control_folder differ from {folder}?")
            notes.withdraw()
            return NO_SERVER
        if live != told and live is not None:
            _say(f"draining: {live} songs still run")
            told = live
        if waited_s > timeout_s:
            _say(f"{live} songs still run after {timeout_s:g} s; new ones are still refused")
            return NOT_YET
        time.sleep(_POLL_S)
    notes.withdraw()  # a server that was killed leaves them behind
    _say(f"server {server_pid} is gone")
    return NO_SERVER


def guard(
    server_pid: int, *, http_url: str, notes: DrainNotes, last_answers_s: float = _LAST_ANSWERS_S
) -> bool:
    """Watch a server until it ends, and end it if one of its stubs died; whether that was so.

    The server doesn't replace a dead stub and says that its model is ready, so only a new start helps;
    whoever supervises the server does that. A stub of a model that was unloaded is no dead one. However the
    server ends, stubs that it leaves behind are ended too, as the next server needs their memory, and its
    notes are taken away.
    """
    try:
        return _end_when_a_stub_dies(server_pid, http_url=http_url, last_answers_s=last_answers_s)
    finally:
        if parent_of(server_pid) is None:
            notes.withdraw()
            _end_orphans(server_pid)


def _end_orphans(server_pid: int) -> None:
    """Stubs of an ordinary exit go by themselves."""
    if not _wait(lambda: not find_orphans(server_pid), timeout_s=_ORPHANS_S):
        for pid in find_orphans(server_pid):
            _say(f"ending process {pid}, which server {server_pid} left behind")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _end_when_a_stub_dies(server_pid: int, *, http_url: str, last_answers_s: float) -> bool:
    watch = StubWatch(server_pid)
    most: dict[str, int] = {}
    suspicions: dict[str, int] = {}
    while parent_of(server_pid) is not None:
        watch.look()
        now = watch.models
        most = {model: max(most.get(model, 0), now.get(model, 0)) for model in most | now}
        for model, count in most.items():
            missing = now.get(model, 0) < count and _claims_ready(http_url, model)
            suspicions[model] = suspicions.get(model, 0) + 1 if missing else 0
        # Not at the first look: a model may just be loading again.
        if dead := sorted(model for model, looks in suspicions.items() if looks >= _GUARD_LOOKS):
            _say(f"the process of {', '.join(dead)} died; the server can't replace it and is ended")
            if FRONT_DOOR not in dead:
                time.sleep(last_answers_s)
            _end(server_pid)
            return True
        time.sleep(_GUARD_POLL_S)
    return False


def _claims_ready(http_url: str, model: str) -> bool:
    try:
        with urllib.request.urlopen(
            f"{http_url}/v2/models/{model}/ready", timeout=_ANSWER_WITHIN_S
        ) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):  # gone, or half gone: the guard's own watch goes on
        return False


def _end(server_pid: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(server_pid, number)
        except ProcessLookupError:
            return
        if _wait(lambda: parent_of(server_pid) is None, timeout_s=_EXIT_WITHIN_S):
            return


def _wait(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def servers() -> list[int]:
    """Process ids of the servers of this machine that have a `music3` stub, as far as this user sees them."""
    parents = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (parent := parent_of(int(folder.name))):
            parents.add(parent)
    return sorted(parent for parent in parents if FRONT_DOOR in find_stubs(parent).values())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m python_backend_models.control")
    commands = parser.add_subparsers(dest="command", required=True)
    draining = commands.add_parser("drain", help="refuse new songs and wait until the live ones are done")
    draining.add_argument(
        "--pid", type=int, help="the server's process id; not needed if there is one server"
    )
    draining.add_argument("--timeout", metavar="S", type=float, default=600.0, help="default 600")
    draining.add_argument(
        "--after", metavar="S", type=float, default=0.0, help="take songs for so long first; default 0"
    )
    draining.add_argument("--stop", action="store_true", help="end the server then")
    draining.add_argument("--undo", action="store_true", help="accept songs again")
    draining.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="the server's control_folder")
    guarding = commands.add_parser("guard", help="end a server one of whose stubs died")
    guarding.add_argument("pid", type=int)
    guarding.add_argument("door", metavar="HOST:HTTP_PORT")
    guarding.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    arguments = parser.parse_args(argv)
    if arguments.command == "guard":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, whose end ends this, too
        notes = DrainNotes(arguments.folder, arguments.pid)
        guard(arguments.pid, http_url=f"http://{arguments.door}", notes=notes)
        return 0
    found = [arguments.pid] if arguments.pid else servers()
    if len(found) != 1:
        _say(f"{len(found)} servers found: {found}; name one with --pid" if found else "no server found")
        return NO_SERVER
    if arguments.undo:
        DrainNotes(arguments.folder, found[0]).withdraw()
        return DRAINED
    return drain(
        found[0],
        folder=arguments.folder,
        timeout_s=arguments.timeout,
        stop=arguments.stop,
        after_s=arguments.after,
    )


def _say(text: str) -> None:
    print(f"music3: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
