"""What an engine exports beside its health, from the mirrors in its recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sluice_runtime.health.metrics import MetricKind, MetricSpec, Sample, Status


def _book(key: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.get("books"):
            yield (), float(status["books"][key])

    return samples


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


G, C = MetricKind.GAUGE, MetricKind.COUNTER
ENGINE_METRICS: tuple[MetricSpec, ...] = (
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
)
