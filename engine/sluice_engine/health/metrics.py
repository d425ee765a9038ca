"""Prometheus metrics of one service, made from its supervisor's status: also while everything it watches is stuck.

The table is the documentation (`docs/metrics.md` is generated from it) and the code: nothing else is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Buckets:
    """`counts` has one place more than `bounds`, for what is above all of them; a place counts its own bucket alone."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Sample = tuple[tuple[str, ...], float | Buckets]


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`samples` makes (label values, value) from a status; none when the status does not know."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    samples: Callable[[Status], Iterator[Sample]]

    @property
    def exported(self) -> str:
        """The name in /metrics; a histogram's is that of its `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


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


def _book(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.get("books"):
            yield (), float(status["books"][key])

    return samples


def _verdict(status: Status) -> Iterator[Sample]:
    for kind in ("idle", "progressing", "slow", "wedged", "dead"):
        yield (kind,), float(status["verdict"] == kind)


def _records(status: Status) -> Iterator[Sample]:
    for pool, counts in (status.get("books") or {}).get("ledger", {}).items():
        for state, count in counts.items():
            yield (pool, state), float(count)


def _sequences(status: Status) -> Iterator[Sample]:
    for phase, count in (status.get("books") or {}).get("sequences", {}).items():
        yield (phase,), float(count)


def _rooms(status: Status) -> Iterator[Sample]:
    for side, count in (status.get("books") or {}).get("rooms", {}).items():
        yield (side,), float(count)


def _counters(status: Status) -> Iterator[Sample]:
    for what, count in (status.get("books") or {}).get("counters", {}).items():
        yield (what,), float(count)


def _transfer_counters(status: Status) -> Iterator[Sample]:
    for what, count in (status.get("transfers") or {}).get("counters", {}).items():
        yield (what,), float(count)


def _transfer(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.get("transfers"):
            yield (), float(status["transfers"][key])

    return samples


def _lane(status: Status) -> Iterator[Sample]:
    transport = (status.get("books") or {}).get("transport") or {}
    if transport:
        yield (transport["name"], transport["lane"]), float(transport["bytes_per_second"])


def _pairs(status: Status) -> Iterator[Sample]:
    for pair in (status.get("books") or {}).get("pairs", ()):
        yield (pair["source"],), float(pair["failures"])


def _memory(status: Status) -> Iterator[Sample]:
    for process, nbytes in status["memory_bytes"].items():
        yield (process,), float(nbytes)


def _gateway(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.get("gateway"):
            yield (), float(status["gateway"][key])

    return samples


def _gateway_counters(status: Status) -> Iterator[Sample]:
    for what, count in (status.get("gateway") or {}).get("counters", {}).items():
        yield (what,), float(count)


def _gateway_histogram(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        told = (status.get("gateway") or {}).get("histograms", {}).get(key)
        if told:
            yield (), Buckets(tuple(told["bounds"]), tuple(told["counts"]), float(told["total"]))

    return samples


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
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("sluice_ready", G, (), "1 when requests may come", _flag("ready")),
    MetricSpec("sluice_draining", G, (), "1 while the service finishes what it has", _flag("draining")),
    MetricSpec("sluice_quarantined", G, (), "1 while it stays down for somebody to look", _flag("quarantined")),
    MetricSpec("sluice_verdict", G, ("verdict",), "1 for the present verdict on progress", _verdict),
    MetricSpec("sluice_thread_ticks", C, ("thread",), "turns of a watched loop", _row("ticks")),
    MetricSpec("sluice_thread_progress", C, ("thread",), "what must grow while work is pending", _row("progress")),
    MetricSpec("sluice_thread_pending", G, ("thread",), "work that waits for this thread", _row("pending")),
    MetricSpec("sluice_thread_pending_seconds", G, ("thread",), "since when something is pending", _row("pending_s")),
    MetricSpec("sluice_process_resident_bytes", G, ("process",), "memory of a process", _memory),
    MetricSpec("sluice_records", G, ("pool", "state"), "records of a pool by physical state", _records),
    MetricSpec("sluice_sequences", G, ("phase",), "sequences in the engine by phase", _sequences),
    MetricSpec("sluice_rooms", G, ("side",), "open rooms: leases given (source) and held (reader)", _rooms),
    MetricSpec("sluice_waiting_sequences", G, (), "sequences without a row yet", _book("waiting")),
    MetricSpec("sluice_oldest_waiting_seconds", G, (), "age of the oldest without a token", _book("oldest_waiting_s")),
    MetricSpec("sluice_streams", G, (), "Generate streams that are open", _book("streams")),
    MetricSpec("sluice_steps", C, (), "steps planned", _book("step")),
    MetricSpec("sluice_engine_events", C, ("event",), "counters of the leader and the lease thread", _counters),
    MetricSpec("sluice_transfer_leases", G, (), "leases that the transport pulls for", _transfer("leases")),
    MetricSpec("sluice_transfer_reads_in_flight", G, (), "READs that are not terminal", _transfer("in_flight")),
    MetricSpec("sluice_transfer_stranded_records", G, (), "records a late READ may still reach", _transfer("stranded")),
    MetricSpec(
        "sluice_transfer_lane_bytes_per_second",
        G,
        ("transport", "lane"),
        "what the transport's self-test measured at its start, and over which lane",
        _lane,
    ),
    MetricSpec(
        "sluice_pair_failures",
        G,
        ("source",),
        "leases, Hellos and pings in a row that failed of a source that this reader cannot take records from",
        _pairs,
    ),
    MetricSpec("sluice_transfer_events", C, ("event",), "counters of the transport", _transfer_counters),
    MetricSpec("sluice_gateway_queued", G, (), "requests that wait for a place", _gateway("queued")),
    MetricSpec("sluice_gateway_running", G, (), "requests that run", _gateway("running")),
    MetricSpec("sluice_gateway_events", C, ("event",), "counters of the gateway", _gateway_counters),
    MetricSpec(
        "sluice_time_to_first_token_seconds",
        H,
        (),
        "from a request's whole body to its first token; per choice",
        _gateway_histogram("first_token"),
    ),
    MetricSpec(
        "sluice_inter_token_latency_seconds",
        H,
        (),
        "between two tokens of an answer, as they reach the gateway; the first gap behind a handoff apart",
        _gateway_histogram("gap"),
    ),
    MetricSpec(
        "sluice_e2e_request_latency_seconds",
        H,
        (),
        "from a request's whole body to its last token; per choice that was answered",
        _gateway_histogram("request"),
    ),
    MetricSpec(
        "sluice_request_queue_time_seconds",
        H,
        (),
        "in the gateway's queue; each wait for a pair of engines",
        _gateway_histogram("queue"),
    ),
    MetricSpec(
        "sluice_request_prefill_time_seconds",
        H,
        (),
        "from the dispatch to a pair to the first token that it sends; each attempt",
        _gateway_histogram("prefill"),
    ),
    MetricSpec(
        "sluice_request_handoff_time_seconds",
        H,
        (),
        "from the prefill engine's first token to the decode engine's first: rest of the pull, commit, one step",
        _gateway_histogram("handoff"),
    ),
    MetricSpec("sluice_request_prompt_tokens", H, (), "tokens of a prompt", _gateway_histogram("prompt_tokens")),
    MetricSpec(
        "sluice_request_generation_tokens",
        H,
        (),
        "tokens of an answer; per choice that was answered",
        _gateway_histogram("output_tokens"),
    ),
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


def exposition(status: Status) -> bytes:
    """Of a service: Prometheus text format."""
    return exposition_of(METRICS, status, {"service": status["name"], "role": status["role"]})


def exposition_of(specs: tuple[MetricSpec, ...], status: Status, labels: Mapping[str, str]) -> bytes:
    """Of a table over what it is made from; `labels`: of every metric."""
    registry = CollectorRegistry()
    registry.register(_Collector(specs, status, labels))
    return generate_latest(registry)


def render_markdown() -> str:
    """The first half of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `sluice_engine.health.metrics` by `make proto`. A service's supervisor answers `GET /metrics`,",
        "also while all it watches is stuck. All have the labels `service` and `role`; counters end in `_total`.",
        "",
    ]
    return "\n".join([*lines, *table(METRICS)]) + "\n"


def table(specs: tuple[MetricSpec, ...]) -> Iterator[str]:
    """Its lines in Markdown."""
    yield "| name | kind | more labels | what it says |"
    yield "| --- | --- | --- | --- |"
    for spec in specs:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        yield f"| `{spec.exported}` | {spec.kind} | {labels} | {spec.help} |"
