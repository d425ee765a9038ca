"""What a gateway exports beside its health, from the mirror in its recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sluice_runtime.health.metrics import Buckets, MetricKind, MetricSpec, Sample, Status


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


G, C, H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM
GATEWAY_METRICS: tuple[MetricSpec, ...] = (
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
)
