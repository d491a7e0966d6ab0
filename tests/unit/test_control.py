"""Draining and guarding a server, with processes that stand in for it and its stubs."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from python_backend_models import control
from python_backend_models.control import DRAINED, NO_SERVER, NOT_YET, DrainNotes
from python_backend_models.stub_processes import StubWatch, find_orphans, find_stubs, model_of, parent_of

# A "server" that runs each model file it is given in a process whose command line is that of a stub.
SERVER = """
import os, subprocess, sys, time
children = []
for path in sys.argv[1:]:
    name = path.split("/")[-3]
    line = ["/backend/triton_python_backend_stub", path, "region", "1", "1", str(os.getpid()), "/d", "336"]
    children.append(subprocess.Popen([*line, name + "_0_0"], executable=sys.executable))
print("up", flush=True)
def reap():
    while True:
        for child in children:
            child.poll()  # as Triton does
        time.sleep(0.02)
"""
# The rest of the program: of a server that works, and of one whose first thread ends before the others.
WORK = "reap()"
LINGER = """
import ctypes, platform, threading
threading.Thread(target=reap).start()
time.sleep(1)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
"""


class StandIn:
    """A process with stubs for children."""

    def __init__(self, folder: Path, *models: str, program: str = SERVER + WORK) -> None:
        self.folder, paths = folder, []
        for model in models:
            path = folder / model / "1" / "model.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("import time\ntime.sleep(600)\n")
            paths.append(str(path))
        self.process = subprocess.Popen([sys.executable, "-c", program, *paths], stdout=subprocess.PIPE)
        self.pid = self.process.pid
        assert self.process.stdout
        assert self.process.stdout.readline() == b"up\n"
        # A stub shows the server's command line until it has become itself.
        until(lambda: sorted(find_stubs(self.pid).values()) == sorted(models))
        self.stubs = list(find_stubs(self.pid))

    def kill_stub(self, model: str) -> None:
        (pid,) = (pid for pid, name in find_stubs(self.pid).items() if name == model)
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        # Those that outlived the stand-in, too; a stub's file is in this test's own folder.
        for pid in self.stubs:
            with contextlib.suppress(OSError):
                if str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    running = StandIn(tmp_path / "repository", "music3", "dit")
    yield running
    running.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_POLL_S", 0.02)
    monkeypatch.setattr(control, "_GUARD_POLL_S", 0.05)
    monkeypatch.setattr(control, "_ANSWER_WITHIN_S", 60.0)


# -------------------------------------------------------------------- processes


def test_parents_of_processes_that_live_are_ended_or_never_were(server: StandIn) -> None:
    assert parent_of(server.pid) == os.getpid()
    assert parent_of(os.getpid()) == os.getppid()
    child = subprocess.Popen(["true"])
    until(lambda: parent_of(child.pid) is None)  # not waited for: a zombie counts as gone
    child.wait()
    assert parent_of(2**30) is None


def test_stubs_are_found_by_model_and_missed_when_they_die(server: StandIn) -> None:
    assert sorted(find_stubs(server.pid).values()) == ["dit", "music3"]
    assert find_stubs(os.getpid()) == {}
    watch = StubWatch(server.pid)
    watch.look()
    assert watch.models == {"music3": 1, "dit": 1}
    assert watch.died_s("dit") is None
    before_s = time.monotonic()
    server.kill_stub("dit")
    until(lambda: "dit" not in find_stubs(server.pid).values())

    def missed() -> bool:
        watch.look()
        return watch.died_s("dit") is not None

    until(missed)  # a process that is ending loses its command line before its life
    died_s = watch.died_s("dit")
    assert died_s is not None
    assert before_s <= died_s <= time.monotonic()
    assert (watch.died_s("music3"), watch.models) == (None, {"music3": 1})


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        # As Triton 2.51 starts them: region and sizes, its own id, where it is, and whose stub it is.
        (["region", "1048576", "1048576", "17", "/backends/python", "336", "dit_0_0", "DEFAULT", ""], "dit"),
        (["region", "1048576", "1048576", "17", "/backends/python", "336", "dit_0_11", "DEFAULT", ""], "dit"),
        # To complete the config while the server loads; it ends then, and nobody must miss it.
        (["region", "1048576", "1048576", "17", "/backends/python", "336", "dit", "DEFAULT", ""], None),
        # An older server, which names no instance.
        (["region", "1048576"], "dit"),
    ],
)
def test_only_instances_count_as_stubs(arguments: list[str], model: str | None) -> None:
    program = ["/backends/python/triton_python_backend_stub", "/repository/dit/1/model.py"]
    assert model_of([*program, *arguments]) == model
    assert model_of(["/usr/bin/python3", *program[1:], *arguments]) is None


def test_a_stub_that_came_later_is_watched_too() -> None:
    found = {11: "talker"}
    watch = StubWatch(1, find=lambda pid: found)
    watch.look()  # process 11 is no child of 1: gone at the next look
    found = {}
    watch.look()
    assert watch.died_s("talker") is not None


# ------------------------------------------------------------------------ drain


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a command has told its user so far."""
    texts: list[str] = []
    monkeypatch.setattr(control, "_say", texts.append)
    return texts


def answering(notes: DrainNotes, counts: list[int], said: list[str]) -> threading.Thread:
    """Plays the server's part: waits for the wish, then gives these answers, each once the last was told."""

    def play() -> None:
        until(lambda: notes.wished)
        for count in counts:
            notes.answer(count)
            words = f"{count} songs still run" if count else "is drained"
            until(lambda words=words: any(words in text for text in said))

    thread = threading.Thread(target=play)
    thread.start()
    return thread


@pytest.mark.usefixtures("quick")
def test_drain_waits_for_the_last_song_and_stops_the_server(
    server: StandIn, tmp_path: Path, said: list[str]
) -> None:
    notes = DrainNotes(tmp_path, server.pid)
    assert not notes.wished
    player = answering(notes, [2, 1, 0], said)
    assert control.drain(server.pid, folder=tmp_path, timeout_s=300, stop=True) == DRAINED
    player.join()
    assert [text for text in said if "still run" in text] == [
        "draining: 2 songs still run",
        "draining: 1 songs still run",
    ]
    assert server.process.wait(60) == -signal.SIGTERM


def test_what_is_said_goes_to_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    control._say("2 songs still run")
    assert capsys.readouterr() == ("", "music3: 2 songs still run\n")


@pytest.mark.usefixtures("quick")
def test_a_drain_that_takes_too_long_says_so_and_goes_on_refusing(
    server: StandIn, tmp_path: Path, said: list[str]
) -> None:
    notes = DrainNotes(tmp_path, server.pid)
    notes.answer(3)
    assert control.drain(server.pid, folder=tmp_path, timeout_s=0.5, stop=True) == NOT_YET
    assert said[-1] == "3 songs still run after 0.5 s; new ones are still refused"
    assert notes.wished
    assert server.process.poll() is None
    assert control.main(["drain", "--pid", str(server.pid), "--folder", str(tmp_path), "--undo"]) == DRAINED
    assert not notes.wished
    assert notes.live_songs is None


@pytest.mark.usefixtures("quick")
def test_a_server_that_does_not_answer_is_not_left_with_a_wish(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_ANSWER_WITHIN_S", 0.3)
    assert control.drain(server.pid, folder=tmp_path, timeout_s=300, stop=True) == NO_SERVER
    assert list(tmp_path.glob("music3-*")) == []
    assert server.process.poll() is None


@pytest.mark.usefixtures("quick")
def test_a_drain_may_begin_later(server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until then the server takes songs: a balancer may still send it some."""
    notes, begun_s, wished_s = DrainNotes(tmp_path, server.pid), time.monotonic(), []

    def play() -> None:
        while not notes.wished:
            time.sleep(0.01)
        wished_s.append(time.monotonic() - begun_s)
        notes.answer(0)

    player = threading.Thread(target=play, daemon=True)
    player.start()
    assert (
        control.main(["drain", "--pid", str(server.pid), "--folder", str(tmp_path), "--after", "1"])
        == DRAINED
    )
    player.join(60)
    assert wished_s[0] >= 1
    assert "takes songs for 1 s more" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_server_that_goes_before_its_drain_is_not_waited_for(server: StandIn, tmp_path: Path) -> None:
    server.process.kill()
    server.process.wait()
    assert control.drain(server.pid, folder=tmp_path, timeout_s=5, stop=False, after_s=1e6) == NO_SERVER
    assert list(tmp_path.glob("music3-*")) == []


@pytest.mark.usefixtures("quick")
def test_drain_of_no_server_or_one_that_goes(server: StandIn, tmp_path: Path) -> None:
    assert control.drain(2**30, folder=tmp_path, timeout_s=300, stop=False) == NO_SERVER
    threading.Timer(0.3, server.process.kill).start()
    assert control.drain(server.pid, folder=tmp_path, timeout_s=300, stop=False) == NO_SERVER
    assert list(tmp_path.glob("music3-*")) == []


def test_the_one_server_is_found_by_itself(server: StandIn, tmp_path: Path) -> None:
    assert server.pid in control.servers()
    other = StandIn(tmp_path / "other", "music3")
    try:
        assert {server.pid, other.pid} <= set(control.servers())
        assert control.main(["drain", "--folder", str(tmp_path)]) == NO_SERVER  # which one?
        assert not DrainNotes(tmp_path, server.pid).wished
    finally:
        other.end()


def test_a_wish_of_another_user_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = DrainNotes(tmp_path, 42)
    notes.wish()
    (note,) = tmp_path.glob("music3-42-*.drain")
    owner = note.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert notes.wished
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert notes.wished == (owner == 0)  # root's wish counts


def test_a_process_id_that_comes_again_is_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share a folder, or one that was started anew."""
    DrainNotes(tmp_path, os.getpid()).wish()
    assert DrainNotes(tmp_path, os.getpid()).wished
    started = control.started_ticks(os.getpid())
    assert started is not None
    time.sleep(0.1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        elapsed = control.started_ticks(later.pid) - started
        later.communicate(b"\n")
    assert elapsed >= 0.1 * os.sysconf("SC_CLK_TCK") - 1
    assert control.started_ticks(2**30) is None
    monkeypatch.setattr(control, "started_ticks", lambda pid: started + 1)
    assert not DrainNotes(tmp_path, os.getpid()).wished


# ------------------------------------------------------------------------ guard


class Readiness(http.server.BaseHTTPRequestHandler):
    """Answers for every model's readiness with what is in `unready`."""

    unready: set[str] = set()  # noqa: RUF012  the test's
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        model = self.path.split("/")[3]
        self.asked.append(model)
        self.send_response(400 if model in self.unready else 200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def http_url() -> Iterator[str]:
    Readiness.unready, Readiness.asked = set(), []
    door = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Readiness)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{door.server_address[1]}"
    door.shutdown()
    door.server_close()


def at_looks(monkeypatch: pytest.MonkeyPatch, acts: Mapping[int, Callable[[], object]]) -> None:
    """Have things happen right after the guard's looks of these numbers: it misses no stub it never saw."""

    class Watch(StubWatch):
        looks = 0

        def look(self) -> None:
            super().look()
            Watch.looks += 1
            acts.get(Watch.looks, bool)()

    monkeypatch.setattr(control, "StubWatch", Watch)


@pytest.mark.usefixtures("quick")
def test_a_server_with_a_dead_stub_is_ended(
    server: StandIn, http_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_looks(monkeypatch, {1: lambda: server.kill_stub("dit")})
    assert control.guard(
        server.pid, http_url=http_url, notes=DrainNotes(tmp_path, server.pid), last_answers_s=0.1
    )
    assert server.process.wait(60) == -signal.SIGTERM


@pytest.mark.usefixtures("quick")
def test_what_a_killed_server_leaves_behind_is_ended_and_nothing_else(
    server: StandIn, http_url: str, tmp_path: Path
) -> None:
    other = StandIn(tmp_path / "other", "music3")
    try:
        assert find_orphans(server.pid) == []  # they have their server
        notes, others = DrainNotes(tmp_path, server.pid), DrainNotes(tmp_path, other.pid)
        for each in (notes, others):
            each.wish()
            each.answer(0)
        threading.Timer(0.3, server.process.kill).start()
        assert not control.guard(server.pid, http_url=http_url, notes=notes)
        server.process.wait(60)
        until(lambda: all(parent_of(pid) is None for pid in server.stubs))
        assert len(find_stubs(other.pid)) == 1
        assert (notes.wished, notes.live_songs) == (False, None)
        assert (others.wished, others.live_songs) == (True, 0)
    finally:
        other.end()


@pytest.mark.usefixtures("quick")
def test_stubs_of_a_server_whose_threads_are_still_going_are_left_behind_too(
    tmp_path: Path, http_url: str
) -> None:
    """Its first thread is gone, and with it the server for all who ask; the stubs are its children still."""
    server = StandIn(tmp_path, "talker", "dit", program=SERVER + LINGER)
    try:
        until(lambda: parent_of(server.pid) is None)
        assert {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in server.stubs} == {server.pid}
        assert not control.guard(server.pid, http_url=http_url, notes=DrainNotes(tmp_path, server.pid))
        until(lambda: all(parent_of(pid) is None for pid in server.stubs))
    finally:
        server.end()


@pytest.mark.usefixtures("quick")
def test_an_unloaded_model_is_no_dead_stub(
    server: StandIn, http_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Readiness.unready = {"dit"}
    at_looks(monkeypatch, {1: lambda: server.kill_stub("dit"), 15: server.process.kill})
    assert not control.guard(
        server.pid, http_url=http_url, notes=DrainNotes(tmp_path, server.pid), last_answers_s=0.1
    )
    # The stub was missed again and again, and each time the door said that its model is not there.
    assert Readiness.asked.count("dit") > control._GUARD_LOOKS


@pytest.mark.usefixtures("quick")
def test_the_guard_goes_with_its_server_and_takes_its_end_for_no_fault(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an ordinary exit the stubs go first, when nobody says ready any more."""
    door = "http://127.0.0.1:9"  # nothing listens there

    def leave() -> None:
        for model in ("dit", "music3"):
            server.kill_stub(model)

    at_looks(monkeypatch, {1: leave, 15: server.process.kill})
    assert not control.guard(
        server.pid, http_url=door, notes=DrainNotes(tmp_path, server.pid), last_answers_s=0.1
    )


def test_the_guard_ends_a_server_that_ignores_sigterm(
    tmp_path: Path, http_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_EXIT_WITHIN_S", 0.5)
    deaf = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert deaf.stdout
    deaf.stdout.readline()
    control._end(deaf.pid)
    assert deaf.wait(60) == -signal.SIGKILL
