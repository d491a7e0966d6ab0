"""The gateway's dashboard and alerts, every expression against the live metrics page of a gateway."""

import json
import re
from collections.abc import Iterator

import grpc
import pytest
import yaml

from tests.client.fake_server import FakeServer
from tests.expressions import DEPLOY, HISTOGRAM_PARTS, Page, check_expression, filled_in, read_page, selectors
from tests.gateway.gateway import Gateway
from tests.gateway.scripts import failing, nothing, whole
from tests.triton.server import wait_until

DASHBOARD = json.loads((DEPLOY / "grafana" / "gateway.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "gateway-alerts.yml").read_text())
SCRAPES = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where each expression is, the expression with variables filled in, the words that use its labels."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"dashboard: {panel['title']}", filled_in(target["expr"]), target["legendFormat"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield f"alert: {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values())


EXPRESSIONS = list(expressions())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Metric names and their label sets, after a song, one that failed, and one too many."""
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with FakeServer(whole) as server, Gateway(server.url, "--max-songs", "1", log_path=log_path) as gateway:
        assert gateway.sing().status == 200
        server.script = failing(grpc.StatusCode.INTERNAL, "no", after_chunks=0)
        assert gateway.sing().status == 500
        server.script = nothing
        waiting = gateway.connect()
        waiting.request("POST", "/v1/audio/speech", body=b'{"input": "[Verse]\\nla", "instructions": "folk"}')
        wait_until(lambda: gateway.metric("live_songs") == 1, timeout_s=30, what="a song to wait")
        assert gateway.sing().status == 429
        text = gateway.ask("GET", "/metrics").body.decode()
        waiting.close()
    return read_page(text)


@pytest.mark.parametrize(("where", "text", "words"), EXPRESSIONS, ids=[where for where, _, _ in EXPRESSIONS])
def test_expression_names_what_the_page_has(where: str, text: str, words: str, page: Page) -> None:
    check_expression(where, text, page)
    kept = set(re.findall(r"by \(([^)]*)\)", text)[0].split(", ")) if "by (" in text else {"instance"}
    assert set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", words)) <= kept
    # The job that the compose file's Prometheus has for it.
    assert set(re.findall(r'job="(\w+)"', text)) <= {scrape["job_name"] for scrape in SCRAPES}


def test_every_metric_of_the_gateway_is_shown(page: Page) -> None:
    own = {name for name in page if name.startswith("music3_gateway_")}
    shown = {
        selector.name
        for where, text, _ in EXPRESSIONS
        if where.startswith("dashboard")
        for selector in selectors(text)
    }
    assert {name for name in own if not name.endswith(HISTOGRAM_PARTS)} == {
        name for name in shown if name.startswith("music3_gateway_")
    }


def test_it_is_no_server() -> None:
    """A gateway's job must not be one that the servers' alerts look at: these would call it a server."""
    job = SCRAPES[1]["job_name"]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    text = " ".join(rule["expr"] for group in alerts["groups"] for rule in group["rules"])
    patterns = re.findall(r'job=~"([^"]*)"', text)
    assert patterns
    assert not any(re.fullmatch(pattern, job) for pattern in patterns)


def test_dashboards_are_told_apart() -> None:
    other = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    assert DASHBOARD["title"] != other["title"]
    assert DASHBOARD["uid"] != other["uid"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
