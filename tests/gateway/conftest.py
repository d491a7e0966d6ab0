"""Gateways for the tests of this folder: in front of the real server, and in front of a fake one."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.client.fake_server import FakeServer
from tests.gateway.gateway import Gateway
from tests.gateway.scripts import whole
from tests.triton.conftest import server, tiny_checkpoint
from tests.triton.server import TritonServer, wait_until

__all__ = ["gateway", "make_gateway", "pair", "server", "stand_in", "tiny_checkpoint"]

MakeGateway = Callable[..., Gateway]
ALLOWED_ORIGIN = "https://studio.example"


@dataclass(frozen=True)
class StandIn:
    """A gateway and the fake server behind it, whose script a test sets."""

    server: FakeServer
    gateway: Gateway


@pytest.fixture(scope="session")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The gateway of the shared server."""
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with Gateway(server.grpc_url, log_path=log_path) as running:
        yield running


@pytest.fixture
def make_gateway(tmp_path: Path) -> Iterator[MakeGateway]:
    """Starts gateways of a test's own: `make_gateway(url, *options)`. They are stopped at its end."""
    made: list[Gateway] = []

    def make(url: str, *options: str, **environment: str) -> Gateway:
        log_path = tmp_path / f"gateway-{len(made)}.log"
        made.append(Gateway(url, *options, log_path=log_path, environment=environment))
        return made[-1]

    make.made = made  # type: ignore[attr-defined] # for the log of a failed test
    yield make
    for each in made:
        each.stop()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """One pair for all tests; `stand_in` lays it out for each."""
    log_path = tmp_path_factory.mktemp("stand-in") / "gateway.log"
    options = ("--allow-origin", ALLOWED_ORIGIN, "--model-alias", "our-singer")
    with FakeServer(whole) as server, Gateway(server.url, *options, log_path=log_path) as running:
        yield StandIn(server, running)


@pytest.fixture
def stand_in(pair: StandIn) -> Iterator[StandIn]:
    """A gateway in front of a fake server that sings whole songs until told otherwise."""
    pair.server.script = whole
    pair.server.requests.clear()
    pair.server.cancelled.clear()
    yield pair
    # A song that a test leaves behind would be in the next one's figures.
    wait_until(lambda: pair.gateway.metric("live_songs") == 0, timeout_s=10, what="all songs to end")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of its gateways' and its server's logs."""
    report = yield
    if report.failed:
        arguments = getattr(item, "funcargs", {})
        gateways = [arguments["gateway"]] if "gateway" in arguments else []
        gateways += [arguments["pair"].gateway] if "pair" in arguments else []
        gateways += getattr(arguments.get("make_gateway"), "made", [])
        for each in gateways:
            report.sections.append((f"end of {each.log_path}", each.log()[-4000:]))
        if "server" in arguments:
            report.sections.append(("end of the server's log", arguments["server"].log_tail()))
    return report
