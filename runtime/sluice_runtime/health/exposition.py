"""Prometheus metrics of one service, made from its supervisor's status: also while everything it watches is stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice_runtime.health.metrics import Buckets, MetricKind, MetricSpec, Sample, Status


def _flag(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        yield (), float(bool(status.get(key)))

    return samples


def _row(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        for row in status["rows"]:
            if row["state"] != "absent" and row[key] is not None:
                yield (row["name"],), float(row[key])

    return samples


def _verdict(status: Status) -> Iterator[Sample]:
    for kind in ("idle", "progressing", "slow", "wedged", "dead"):
        yield (kind,), float(status["verdict"] == kind)


def _memory(status: Status) -> Iterator[Sample]:
    for process, nbytes in status["memory_bytes"].items():
        yield (process,), float(nbytes)


def _certificate_left(status: Status) -> Iterator[Sample]:
    if status.get("certificate"):
        yield (status["certificate"]["name"],), float(status["certificate"]["left_s"])


def _trusted(status: Status) -> Iterator[Sample]:
    for authority in (status.get("certificate") or {}).get("trusted", ()):
        yield (authority,), 1.0


def _certificate_counters(status: Status) -> Iterator[Sample]:
    for what, count in (status.get("certificate") or {}).get("counters", {}).items():
        yield (what,), float(count)


G, C, H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM
HEALTH_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("sluice_ready", G, (), "1 when requests may come", _flag("ready")),
    MetricSpec("sluice_draining", G, (), "1 while the service finishes what it has", _flag("draining")),
    MetricSpec("sluice_quarantined", G, (), "1 while it stays down for a person to look", _flag("quarantined")),
    MetricSpec("sluice_verdict", G, ("verdict",), "1 for the present verdict on progress", _verdict),
    MetricSpec("sluice_thread_ticks", C, ("thread",), "turns of a watched loop", _row("ticks")),
    MetricSpec("sluice_thread_progress", C, ("thread",), "what must grow while work is pending", _row("progress")),
    MetricSpec("sluice_thread_pending", G, ("thread",), "work that waits for this thread", _row("pending")),
    MetricSpec("sluice_thread_pending_seconds", G, ("thread",), "since when something is pending", _row("pending_s")),
    MetricSpec("sluice_process_resident_bytes", G, ("process",), "memory of a process", _memory),
    MetricSpec("sluice_certificate_left_seconds", G, ("name",), "until its certificate expires", _certificate_left),
    MetricSpec("sluice_certificate_authority", G, ("authority",), "1 for each CA that it trusts", _trusted),
    MetricSpec(
        "sluice_certificate_events",
        C,
        ("event",),
        "changed; kept: new files were no good; refused_callers",
        _certificate_counters,
    ),
)


_FAMILIES: dict[MetricKind, Any] = {G: GaugeMetricFamily, C: CounterMetricFamily, H: HistogramMetricFamily}


def _cumulative(buckets: Buckets) -> list[tuple[str, float]]:
    """As Prometheus has them: each bucket counts what the smaller ones count too."""
    names = [*(repr(float(bound)) for bound in buckets.bounds), "+Inf"]
    return list(zip(names, accumulate(map(float, buckets.counts))))


class _Collector(Collector):
    def __init__(self, specs: tuple[MetricSpec, ...], status: Status, labels: Mapping[str, str]) -> None:
        self._specs, self._status, self._labels = specs, status, labels

    def collect(self) -> Iterator[Metric]:
        for spec in self._specs:
            family = _FAMILIES[spec.kind](spec.name, spec.help, labels=[*self._labels, *spec.labels])
            for told, value in spec.samples(self._status):
                labels = [*self._labels.values(), *told]
                if isinstance(value, Buckets):
                    family.add_metric(labels, _cumulative(value), value.total)
                else:
                    family.add_metric(labels, value)
            yield family


def exposition(specs: tuple[MetricSpec, ...], status: Status) -> bytes:
    """Of a service, in Prometheus' text format. `specs`: of its kind; those of its health come with them."""
    labels = {"service": status["name"], "role": status["role"]}
    return exposition_of((*HEALTH_METRICS, *specs), status, labels)


def exposition_of(specs: tuple[MetricSpec, ...], status: Status, labels: Mapping[str, str]) -> bytes:
    """Of a table over what it is made from; `labels`: of every metric."""
    registry = CollectorRegistry()
    registry.register(_Collector(specs, status, labels))
    return generate_latest(registry)
