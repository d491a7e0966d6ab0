"""PromQL in what is deployed, against the metrics pages that it is about."""

import re
from typing import Any

import promql_parser

from tests.triton.server import ROOT

DEPLOY = ROOT / "deploy"
# On the page only where there is a GPU: Triton's own, from its documentation of 24.10.
GPU_METRICS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}
GPU_LABELS = {"gpu_uuid"}
# What Prometheus itself adds: its own metric of a target, and the labels of a target.
PROMETHEUS_METRICS = {"up"}
TARGET_LABELS = {"instance", "job", "namespace"}
# The suffixes of a histogram, of which functions read the buckets alone.
HISTOGRAM_PARTS = ("_sum", "_count")

# Metric names, each with the labels of its series.
Page = dict[str, list[dict[str, str]]]


def read_page(text: str) -> Page:
    """What a metrics page has, in Prometheus' format."""
    found: Page = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            found.setdefault(match[1], []).append(labels)
    return found


def filled_in(text: str) -> str:
    """A dashboard's expression with the variables as Grafana would fill them in."""
    return text.replace("$__rate_interval", "1m").replace("$instance", ".*")


def nodes(text: str) -> list[Any]:
    """All nodes of an expression; raises ValueError for one that Prometheus would refuse."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(text), lambda node: found.append(node))
    return found


def selectors(text: str) -> list[Any]:
    return [node for node in nodes(text) if isinstance(node, promql_parser.VectorSelector)]


def check_expression(where: str, text: str, page: Page) -> None:
    """Fails unless the page has the metrics, series and labels that the expression names."""
    chosen = selectors(text)
    assert chosen
    labels_there = set(TARGET_LABELS)
    for selector in chosen:
        if selector.name in GPU_METRICS:
            labels_there |= GPU_LABELS
            continue
        if selector.name in PROMETHEUS_METRICS:
            continue
        assert selector.name in page, f"{where}: the page has no {selector.name}"
        series = page[selector.name]
        labels_there |= {label for labels in series for label in labels}
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            assert matcher.op == promql_parser.MatchOp.Equal
            assert any(labels.get(matcher.name) == matcher.value for labels in series), (
                f"{where}: no {selector.name} with {matcher.name}={matcher.value}"
            )
    for node in nodes(text):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            assert set(node.modifier.labels) <= labels_there, where
        if isinstance(node, promql_parser.Call) and node.func.name == "rate":
            # A rate of a gauge is a number without a meaning.
            assert node.args[0].vector_selector.name.endswith(("_total", "_bucket")), where
