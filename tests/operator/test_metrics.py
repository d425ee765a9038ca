"""What a replica tells Prometheus: all of the table, from facts that it has anyway."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice_operator.decide import metrics
from sluice_operator.live.cluster import Cluster, NotFound, Unreachable
from sluice_operator.live.connection import Connection
from sluice_operator.live.probes import Probes
from sluice_operator.live.reconcile import RECONCILE_S
from sluice_operator.live.run import Operator, Options
from sluice_operator.live.work import Work
from sluice_operator.render.revision import StandardRenderer

NOWHERE = Connection("https://127.0.0.1:1", token="t")
FACTS = {
    "state": "leading",
    "lease_age_s": 1.5,
    "reconciles": 7,
    "reconcile_s": 0.5,
    "failures": {"Conflict": 2},
    "actions": {"Apply": 3},
    "queue": 4,
    "queue_age_s": 0.25,
    "running_s": 0.125,
    "lost": {"team-a": "Forbidden"},
    "last_look_s": 30.0,
    "requests": {"GET": 9, "PATCH": 1},
    "errors": {"Unreachable": 1},
}


async def get(port: int, path: str) -> tuple[str, str]:
    """(head, body) of a probe."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        told = (await reader.read()).decode()
        writer.close()
    head, _, body = told.partition("\r\n\r\n")
    return head, body


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(s.labels.items())): s.value for family in families for s in family.samples}


def test_every_metric_of_the_table_is_told_with_its_labels():
    told = samples(metrics.exposition(FACTS).decode())
    assert {name for name, _ in told} == {spec.exported for spec in metrics.METRICS}
    for spec in metrics.METRICS:
        assert {tuple(key for key, _ in labels) for name, labels in told if name == spec.exported} == {spec.labels}
    assert told["sluice_operator_leader", ()] == 1.0
    assert told["sluice_operator_api_requests_total", (("method", "PATCH"),)] == 1.0
    assert told["sluice_operator_queue_age_seconds", ()] == 0.25


async def test_a_look_that_cannot_be_cut_off_is_a_problem():
    now = [0.0]
    operator = Operator(NOWHERE, Options("one", "sluice"), StandardRenderer("image"), fleet=None)
    operator.work = Work(lambda: now[0])
    operator.work.add(("ns", "a"), 0)
    assert await operator.work.take() == ("ns", "a")
    now[0] = RECONCILE_S + 1
    assert (operator.answer().problem, operator.answer().facts["running_s"]) == ("", RECONCILE_S + 1)
    now[0] = 2 * RECONCILE_S + 1
    assert "ns/a has been looked at for 241 s" in operator.answer().problem


def test_what_is_not_known_is_not_told():
    told = samples(metrics.exposition(FACTS | {"state": "standby", "lease_age_s": None, "last_look_s": None}).decode())
    assert told["sluice_operator_leader", ()] == 0.0
    assert not {"sluice_operator_lease_age_seconds", "sluice_operator_last_look_seconds"} & {name for name, _ in told}


async def test_a_replica_answers_with_its_own_facts():
    operator = Operator(NOWHERE, Options("one", "sluice"), StandardRenderer("image"), fleet=None)
    operator.work.add(("ns", "a"))
    probes = Probes(operator.answer)
    port = await probes.start("127.0.0.1", 0)
    try:
        head, body = await get(port, "/metrics")
        assert "200 OK" in head
        assert "Content-Type: text/plain; version=0.0.4" in head
        told = samples(body)
        assert told["sluice_operator_queue", ()] == 1.0
        assert told["sluice_operator_leader", ()] == 0.0
        # It waits for the CRD: alive, but nobody who could take over.
        head, body = await get(port, "/readyz")
        assert ("503" in head, body) == (True, "starting\n")
        operator.state = "standby"
        assert "200 OK" in (await get(port, "/readyz"))[0]
        assert (await get(port, "/livez")) == ("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
                                               "Content-Length: 3\r\nConnection: close", "ok\n")  # fmt: skip
        assert "404" in (await get(port, "/other"))[0]
    finally:
        await probes.stop()


async def test_calls_are_counted_and_so_is_what_fails(monkeypatch):
    async with Cluster(NOWHERE, 5.0, lambda: None) as cluster:
        with pytest.raises(Unreachable):
            await cluster.get("/healthz")
        with pytest.raises(Unreachable):
            await cluster.call("POST", "/healthz", {})
        assert cluster.requests == {"GET": 1, "POST": 1}
        assert cluster.errors == {"Unreachable": 2}

        async def answer(*_):
            raise NotFound(404, "NotFound", "no such thing")

        monkeypatch.setattr(cluster, "_call", answer)
        assert await cluster.find("/there") is None
        assert cluster.requests == {"GET": 2, "POST": 1}
        assert cluster.errors == {"Unreachable": 2}


def test_lateness_is_that_of_the_oldest_key_that_nobody_has():
    now = [0.0]
    work = Work(lambda: now[0])
    assert work.lateness == 0.0
    work.add(("ns", "a"), 1.0)
    work.add(("ns", "b"), 5.0)
    assert work.lateness == 0.0
    now[0] = 4.0
    assert work.lateness == 3.0
    assert asyncio.run(work.take()) == ("ns", "a")
    assert work.lateness == 0.0
    now[0] = 7.0
    assert work.lateness == 2.0
