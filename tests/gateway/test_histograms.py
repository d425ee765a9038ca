"""How long requests and tokens took, from the gateway to what Prometheus reads."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sluice_gateway.memory import MemoryEngine
from sluice_gateway.status.gateway_metrics import GATEWAY_METRICS
from sluice_gateway.status.histograms import Histogram, Latencies
from sluice_protocol.generate import Role
from sluice_runtime.health.exposition import exposition_of
from sluice_runtime.health.metrics import MetricKind


def exported(latencies: Latencies) -> dict[str, Any]:
    """Family name -> {sample name and `le`: value}, as a scraper reads it."""
    specs = tuple(spec for spec in GATEWAY_METRICS if spec.kind is MetricKind.HISTOGRAM)
    text = exposition_of(specs, {"gateway": {"histograms": latencies.report()}}, {"service": "gateway"}).decode()
    return {
        family.name: {sample.name + sample.labels.get("le", ""): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_a_value_counts_in_the_first_bucket_that_it_does_not_exceed() -> None:
    kept = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 3), (2.5, 4)):
        kept.add(value, times)
    assert kept.counts == [3, 3, 4]
    assert kept.total == 0.5 + 2.0 + 4.5 + 10.0


def test_what_is_exported_is_cumulative_and_has_a_sum() -> None:
    latencies = Latencies()
    latencies.queue.add(0.02)
    latencies.queue.add(70.0)
    latencies.queue.add(1e6)
    told = exported(latencies)["sluice_request_queue_time_seconds"]
    name = "sluice_request_queue_time_seconds"
    buckets = [told[f"{name}_bucket{le}"] for le in ("0.01", "0.05", "60.0", "120.0", "7680.0", "+Inf")]
    assert buckets == [0, 1, 1, 2, 2, 3]
    assert (told[f"{name}_count"], told[f"{name}_sum"]) == (3, 1_000_070.02)


def test_every_histogram_of_the_gateway_is_exported_and_none_else() -> None:
    assert len(exported(Latencies())) == len(vars(Latencies())) == 8
    specs = tuple(spec for spec in GATEWAY_METRICS if spec.kind is MetricKind.HISTOGRAM)
    assert b"_bucket" not in exposition_of(specs, {}, {"service": "p"}), "an engine has none"


async def test_a_request_counts_once_in_each_and_its_tokens_in_the_gaps(start: Any) -> None:
    stack = await start()
    assert (await stack.chat(max_tokens=8)).status_code == 200
    assert (await stack.chat(max_tokens=8, n=2, stream=True)).status_code == 200
    await stack.idle()
    kept = {name: sum(histogram.counts) for name, histogram in vars(stack.gateway.latencies).items()}
    assert kept == {
        "first_token": 3,
        "gap": 3 * 6,
        "request": 3,
        "queue": 3,
        "prefill": 3,
        "handoff": 3,
        "prompt_tokens": 2,
        "output_tokens": 3,
    }
    assert stack.gateway.latencies.output_tokens.total == 24
    assert stack.gateway.latencies.prompt_tokens.total == 2 * 6
    assert "histograms" not in (await stack.http.get("/health")).json()


async def test_one_engine_for_both_halves_hands_nothing_over(start: Any) -> None:
    stack = await start({"u": MemoryEngine(Role.UNIFIED, lambda _prompt, position: 97 + position % 26)})
    assert (await stack.chat(max_tokens=8)).status_code == 200
    latencies = stack.gateway.latencies
    assert (sum(latencies.handoff.counts), sum(latencies.gap.counts)) == (0, 7)


async def test_a_refused_request_has_no_time_to_a_token(start: Any) -> None:
    stack = await start()
    assert (await stack.chat(temperature=9)).status_code == 400
    assert not any(sum(histogram.counts) for histogram in vars(stack.gateway.latencies).values())
