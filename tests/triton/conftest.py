"""Servers for the tests of this folder: one for the whole session, and a maker of a test's own."""

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Music3Client
from tests.triton.server import ROOT, TritonServer
from tests.triton.songs import audit, warm_up

MakeServer = Callable[..., TritonServer]
EXIT_WITHIN_S = 60.0


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint in the official layout, made once."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    command = [sys.executable, "-m", "python_backend_models.tiny_checkpoint", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The server that tests share: none may leave it other than it was."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with TritonServer(checkpoint=tiny_checkpoint, log_path=log_path) as running:
        warm_up(running)
        yield running
        # A request that was never freed holds the server's exit until that is out of time, and the code is 1.
        assert running.terminate(timeout_s=EXIT_WITHIN_S) == 0, "a request was left behind"


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test gives back all that it took of the shared server."""
    shared = request.getfixturevalue("server") if "server" in request.fixturenames else None
    yield
    if shared is not None:
        audit(shared)


@pytest.fixture
def make_server(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[MakeServer]:
    """Starts servers of a test's own; options as TritonServer's. They are stopped at its end."""
    made: list[TritonServer] = []

    def make(**options: Any) -> TritonServer:
        options = {"checkpoint": tiny_checkpoint, "log_path": tmp_path / f"server-{len(made)}.log"} | options
        made.append(TritonServer(**options))
        return made[-1].start()

    make.made = made  # type: ignore[attr-defined] # for the log of a failed test
    yield make
    for each in made:
        each.stop()


@pytest.fixture
def client(server: TritonServer) -> Iterator[Music3Client]:
    """A client of the shared server."""
    with Music3Client(server.grpc_url) as connected:
        yield connected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of its servers' logs."""
    report = yield
    if report.failed:
        arguments = getattr(item, "funcargs", {})
        servers = [arguments["server"]] if "server" in arguments else []
        servers += getattr(arguments.get("make_server"), "made", [])
        for each in servers:
            report.sections.append((f"end of {each.log_path}", each.log_tail()))
    return report
