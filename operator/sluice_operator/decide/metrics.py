"""Prometheus metrics of one replica of the operator, made from the facts that `/status` tells.

As in sluice_runtime.health.metrics the table is the documentation and the code: nothing else is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sluice_runtime.health.exposition import exposition_of
from sluice_runtime.health.metrics import MetricKind, MetricSpec, Sample

Facts = Mapping[str, Any]
G, C = MetricKind.GAUGE, MetricKind.COUNTER


def _fact(key: str) -> Callable[[Facts], Iterator[Sample]]:
    """None where it is not known: a standby has no queue to be late with."""

    def samples(facts: Facts) -> Iterator[Sample]:
        if facts[key] is not None:
            yield (), float(facts[key])

    return samples


def _counts(key: str) -> Callable[[Facts], Iterator[Sample]]:
    def samples(facts: Facts) -> Iterator[Sample]:
        for what, count in facts[key].items():
            yield (what,), float(count)

    return samples


def _lost(facts: Facts) -> Iterator[Sample]:
    for namespace, why in facts["lost"].items():
        yield (namespace or "*", why), 1.0


def _leader(facts: Facts) -> Iterator[Sample]:
    yield (), float(facts["state"] == "leading")


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("sluice_operator_leader", G, (), "1 in the replica that leads", _leader),
    MetricSpec(
        "sluice_operator_lease_age_seconds", G, (), "since the leader's Lease was confirmed", _fact("lease_age_s")
    ),
    MetricSpec("sluice_operator_reconciles", C, (), "looks at a ModelDeployment", _fact("reconciles")),
    MetricSpec("sluice_operator_reconcile_seconds", C, (), "time that they took", _fact("reconcile_s")),
    MetricSpec("sluice_operator_failures", C, ("reason",), "reconciles that failed", _counts("failures")),
    MetricSpec("sluice_operator_actions", C, ("action",), "actions of plans, done or found done", _counts("actions")),
    MetricSpec(
        "sluice_operator_queue", G, (), "ModelDeployments that are due, will be, or are looked at", _fact("queue")
    ),
    MetricSpec("sluice_operator_queue_age_seconds", G, (), "how late the oldest that is due is", _fact("queue_age_s")),
    MetricSpec(
        "sluice_operator_running_age_seconds",
        G,
        (),
        "how long the longest look that goes on has taken",
        _fact("running_s"),
    ),
    MetricSpec(
        "sluice_operator_last_look_seconds",
        G,
        (),
        "since all were last listed, whatever watches say",
        _fact("last_look_s"),
    ),
    MetricSpec(
        "sluice_operator_lost_namespaces",
        G,
        ("lost_namespace", "reason"),
        "1 for a namespace that is to be served and could not be listed the last time",
        _lost,
    ),
    MetricSpec("sluice_operator_api_requests", C, ("method",), "to the API server, watches apart", _counts("requests")),
    MetricSpec("sluice_operator_api_errors", C, ("error",), "of them, those that failed", _counts("errors")),
)


def exposition(facts: Facts) -> bytes:
    """Prometheus text format."""
    return exposition_of(METRICS, dict(facts), {})
