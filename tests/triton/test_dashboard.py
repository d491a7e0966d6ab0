"""Every expression of dashboard, alerts and autoscaling, against the live metrics page of a server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from client import Music3Client
from tests.deploy.helm import call
from tests.expressions import (
    DEPLOY,
    GPU_LABELS,
    HISTOGRAM_PARTS,
    TARGET_LABELS,
    Page,
    check_expression,
    filled_in,
    nodes,
    read_page,
    selectors,
)
from tests.triton.server import TritonServer

# Totals that say nothing that another panel doesn't.
NOT_SHOWN = {"music3_frames_total", "music3_talker_prefill_steps_total"}
# For an alert alone.
HEARTBEATS = {f"music3{stage}_published_total" for stage in ("", "_talker", "_dit", "_vocoder")}


@pytest.fixture(scope="module")
def page(server: TritonServer) -> Page:
    """Metric names and their label sets, after a song."""
    with Music3Client(server.grpc_url) as client:
        client.generate("folk", "[Verse]\nla", max_frames=10)
    return read_page(server.metrics())


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression is, and the expression with the dashboard's variables filled in."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"dashboard: {panel['title']}", filled_in(target["expr"])
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert: {rule['alert']}", rule["expr"]
    for kind in ("hpa", "keda"):
        values = {"checkpoint": {"claim": "weights"}, "autoscaling": {"kind": kind}}
        chart = str(DEPLOY / "helm" / "music3")
        text = call("helm_template", chart=chart, release_name="songs", values=values)
        for manifest in yaml.safe_load_all(text):
            if manifest and manifest["kind"] == "HorizontalPodAutoscaler":
                for metric in manifest["spec"]["metrics"]:
                    yield "hpa", metric["pods"]["metric"]["name"]
            if manifest and manifest["kind"] == "ScaledObject":
                for trigger in manifest["spec"]["triggers"]:
                    yield "keda", trigger["metadata"]["query"]


EXPRESSIONS = list(expressions())


def test_there_are_expressions_of_every_kind() -> None:
    kinds = [where.split(":")[0] for where, _ in EXPRESSIONS]
    assert {kind: kinds.count(kind) for kind in ("dashboard", "alert", "hpa", "keda")} == {
        "dashboard": 43,
        "alert": 14,
        "hpa": 2,
        "keda": 1,
    }


@pytest.mark.parametrize(("where", "text"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_expression_names_what_the_page_has(where: str, text: str, page: Page) -> None:
    check_expression(where, text, page)


def test_labels_in_texts_are_of_the_expressions() -> None:
    """What a legend or an alert's text fills in must be among the labels that its expression keeps."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    texts = [
        (target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            words = " ".join(rule["annotations"].values())
            texts.append((rule["expr"], re.findall(r"\$labels\.(\w+)", words)))
    assert sum(len(labels) for _, labels in texts) > 15
    for text, labels in texts:
        expression = filled_in(text)
        aggregates = [node for node in nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
        by = {label for node in aggregates if node.modifier for label in node.modifier.labels}
        for label in labels:
            assert label in (by if aggregates else GPU_LABELS | TARGET_LABELS), (text, label)


def test_every_metric_of_this_project_is_shown_or_listed(page: Page) -> None:
    own = {name for name in page if name.startswith("music3_") and not name.endswith(HISTOGRAM_PARTS)}
    shown = {
        selector.name
        for where, text in EXPRESSIONS
        if where.startswith("dashboard")
        for selector in selectors(text)
    }
    assert own - shown == NOT_SHOWN | HEARTBEATS


def test_the_check_finds_a_wrong_name(page: Page) -> None:
    with pytest.raises(AssertionError, match="the page has no music3_song_total"):
        check_expression("here", "rate(music3_song_total[1m])", page)
    with pytest.raises(AssertionError, match="outcome=lost"):
        check_expression("here", 'rate(music3_songs_total{outcome="lost"}[1m])', page)
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        selectors("sum(rate(music3_songs_total[1m])")


def test_variable_of_the_dashboard_lists_servers(page: Page) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    (query,) = (each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query")
    match = re.fullmatch(r"label_values\((\w+), instance\)", query)
    assert match
    assert match[1] in page
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    assert Path(DEPLOY / "helm" / "music3" / "files" / "dashboard.json").resolve() == (
        DEPLOY / "grafana" / "dashboard.json"
    )
