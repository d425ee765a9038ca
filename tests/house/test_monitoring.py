"""Alerts and dashboards speak of what is exported, and of nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from sluice_engine.supervisor.engine_metrics import ENGINE_METRICS
from sluice_gateway.status.counters import Counters
from sluice_gateway.status.gateway_metrics import GATEWAY_METRICS
from sluice_operator.decide import metrics as operator_metrics
from sluice_runtime.health.exposition import HEALTH_METRICS
from sluice_runtime.health.metrics import MetricKind, MetricSpec

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "charts" / "sluice" / "monitoring"


def _exported(spec: MetricSpec) -> list[str]:
    """The names that Prometheus knows."""
    if spec.kind is MetricKind.HISTOGRAM:
        return [f"{spec.exported}_{part}" for part in ("bucket", "sum", "count")]
    return [spec.exported]


SERVICES = (*HEALTH_METRICS, *ENGINE_METRICS, *GATEWAY_METRICS)
ALL = (*SERVICES, *operator_metrics.METRICS)
KINDS = {
    name: MetricKind.COUNTER if spec.kind is MetricKind.HISTOGRAM else spec.kind
    for spec in ALL
    for name in _exported(spec)
}
# What Prometheus adds by a PodMonitor of ours.
TARGET = {
    "namespace",
    "pod",
    "container",
    "job",
    "endpoint",
    "instance",
    "sluice_dev_deployment",
    "sluice_dev_revision",
}
LABELS = {
    name: {*spec.labels, "service", "role"} | TARGET | ({"le"} if name.endswith("_bucket") else set())
    for spec in SERVICES
    for name in _exported(spec)
} | {spec.exported: {*spec.labels} | TARGET for spec in operator_metrics.METRICS}
RATES = {"rate", "increase", "irate"}
# Grafana puts these in before Prometheus sees the query.
VARIABLES = (("$__rate_interval", "1m"), ("$namespace", ".*"), ("$deployment", ".*"))
NESTED = ("expr", "lhs", "rhs", "param", "vector_selector")


class Unknown(AssertionError):
    """A name or label that nobody exports, or a counter that is read as if it were a gauge."""


def check(query: str) -> set[str]:
    """The names of metrics in it. Raises Unknown; ValueError for what is no PromQL."""
    for name, value in VARIABLES:
        query = query.replace(name, value)
    return set(_names(promql.parse(query), rated=False))


def _names(node: object, rated: bool) -> Iterator[str]:
    if isinstance(node, promql.VectorSelector):
        _check_selector(node, rated)
        yield node.name
        return
    if isinstance(node, promql.Call):
        for arg in node.args:
            yield from _names(arg, node.func.name in RATES)
        return
    inner = [part for name in NESTED if (part := getattr(node, name, None)) is not None]
    names = {name for part in inner for name in _names(part, rated)}
    _check_grouping(node, names)
    yield from names


def _check_selector(node: promql.VectorSelector, rated: bool) -> None:
    if node.name not in KINDS:
        raise Unknown(f"no metric {node.name}")
    for matcher in node.matchers.matchers:
        if matcher.name not in LABELS[node.name]:
            raise Unknown(f"{node.name} has no label {matcher.name}")
    if (KINDS[node.name] is MetricKind.COUNTER) is not rated:
        raise Unknown(f"{node.name} is a {KINDS[node.name]}: rate() is for counters, and counters are for rate()")


def _check_grouping(node: object, names: set[str]) -> None:
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql.AggregateExpr) and modifier is not None:
        told = set(modifier.labels)
    elif isinstance(node, promql.BinaryExpr) and modifier is not None and modifier.matching is not None:
        told = set(modifier.matching.labels)
    else:
        return
    for name in names:
        if unknown := told - LABELS[name]:
            raise Unknown(f"{name} has no label {unknown}")


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboards() -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "dashboards").glob("*.json"))}


def queries() -> list[str]:
    drawn = [
        target["expr"] for board in dashboards().values() for panel in board["panels"] for target in panel["targets"]
    ]
    return [*(str(rule["expr"]) for rule in alerts()), *drawn]


@pytest.mark.parametrize("query", queries())
def test_queries_parse_and_name_what_is_exported(query):
    assert check(query)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("sluice_redy == 0", "no metric sluice_redy"),
        ("sum by (role) (sluice_operator_leader)", "has no label"),
        ('sluice_ready{verdict="dead"}', "no label verdict"),
        ("sluice_steps_total > 5", "rate"),
        ("sluice_steps", "no metric"),
        ("rate(sluice_ready[5m])", "rate"),
        ("sluice_ready / on (thread) sluice_draining", "has no label"),
        ("min_over_time(sluice_gone[5m]) > 0", "no metric"),
        ("topk(5, sluice_gone)", "no metric"),
    ],
)
def test_a_query_that_is_wrong_is_found_to_be(query, words):
    with pytest.raises(Unknown, match=words):
        check(query)


def test_what_is_no_promql_is_refused():
    with pytest.raises(ValueError):
        check("sum by (role (sluice_ready)")


def test_events_are_counted_somewhere():
    """Values of the label `event` are names in the code: of counters, or the beginning of a family of them."""
    text = "".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    known = set(re.findall(r'counters\[f?"(\w+)', text)) | {field.name for field in fields(Counters)}
    told = set(re.findall(r'event=~?"(\w+?)(?:\.\*)?"', "\n".join(queries())))
    assert told
    assert told <= known


def test_alerts_say_what_to_do_and_their_words_use_labels_that_are_left():
    names = [str(rule["alert"]) for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert set(rule["labels"]) == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        grouped = re.search(r"^sum by \(([^)]*)\)", str(rule["expr"]))
        left = set(grouped[1].split(", ")) if grouped else LABELS[next(iter(check(str(rule["expr"]))))]
        assert told <= left, rule["alert"]
        if "absent(" in str(rule["expr"]):
            assert not told


def test_panels_have_titles_units_and_legends_of_labels_that_are_left():
    for name, board in dashboards().items():
        titles = [panel["title"] for panel in board["panels"]]
        assert len(titles) == len(set(titles)), name
        for panel in board["panels"]:
            assert panel["fieldConfig"]["defaults"]["unit"]
            for target in panel["targets"]:
                told = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                grouped = re.search(r"(?:sum|max) by \(([^)]*)\)", target["expr"])
                left = set(grouped[1].split(", ")) if grouped else LABELS[next(iter(check(target["expr"])))]
                assert told <= left, panel["title"]


def test_variables_of_a_dashboard_are_those_that_its_queries_use():
    for name, board in dashboards().items():
        have = {variable["name"] for variable in board["templating"]["list"]} - {"datasource"}
        used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in board["panels"] for t in p["targets"])))
        assert used - {"__rate_interval"} == have, name


def test_the_charts_policy_lets_the_operator_reach_what_it_asks_and_nobody_reach_more():
    from sluice_operator.names import LABEL_ROLE, PodRole
    from sluice_operator.render import ports
    from sluice_operator.render.policies import FLOWS, OPERATOR

    rendered = list(yaml.safe_load_all((ROOT / "tests/cluster/golden/default.yaml").read_text()))
    policy = next(item for item in rendered if item and item["kind"] == "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    told: dict[str, set[int]] = {}
    for rule in policy["egress"]:
        for peer in rule.get("to", ()):
            assert peer["namespaceSelector"] == {}
            (expression,) = peer["podSelector"]["matchExpressions"]
            assert (expression["key"], expression["operator"]) == (LABEL_ROLE, "In")
            for role in expression["values"]:
                told.setdefault(role, set()).update(port["port"] for port in rule["ports"])
    asked = {
        role.value: {flow.port for flow in FLOWS if (flow.peer, flow.role) == (OPERATOR, role)} for role in PodRole
    }
    assert told.keys() == asked.keys()
    for role, wanted in asked.items():
        assert wanted <= told[role] <= wanted | {ports.PROBE}
    deployment = next(item for item in rendered if item and item["kind"] == "Deployment")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= deployment["metadata"]["labels"].items()
    open_ports = {port["containerPort"] for port in deployment["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == open_ports
