"""What a gateway tells the operator: whom it routes to, and what those who wait are short of."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from sluice_gateway.http.server import serving_reports
from sluice_gateway.routing.fleet import Engine, Member
from sluice_gateway.routing.lack import describe_queue
from sluice_gateway.routing.report import Known, make_report
from sluice_gateway.routing.route import Wanted
from sluice_gateway.status.latency import MOST, WINDOW_S, Gaps
from sluice_protocol import codec
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.fleet import MAX_ENGINES, MAX_TROUBLE, FleetReport, Queue
from sluice_protocol.generate import SCHEMA_VERSION, EngineHello, Load, Role
from sluice_protocol.v1 import fleet_pb2, fleet_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

PREFILL, DECODE, UNIFIED = Role.PREFILL, Role.DECODE, Role.UNIFIED
FULL = {"running": 8}


def engine(role: Role, model: str = "a", address: str = "x:1", **load: Any) -> Engine:
    hello = EngineHello(role, Fingerprint.of({"model": model}), "life", 4096, 4, "", 1, 512)
    base = Load("life", running=0, waiting=0, max_running=8, free_pages=9, total_pages=9)
    return Engine(Member(None, address), hello, replace(base, **load))


ONE_WAITS = [(Wanted((1,)), 0.25)]


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ((), Queue(1, 0, 1, 0, 250)),
        ((engine(PREFILL),), Queue(1, 0, 1, 0, 250)),
        ((engine(PREFILL), engine(DECODE, **FULL)), Queue(1, 0, 1, 0, 250)),
        ((engine(PREFILL, **FULL), engine(DECODE)), Queue(1, 1, 0, 250, 0)),
        ((engine(DECODE),), Queue(1, 1, 0, 250, 0)),
        ((engine(PREFILL, draining=True), engine(DECODE)), Queue(1, 1, 0, 250, 0)),
        ((engine(PREFILL, **FULL), engine(DECODE, **FULL)), Queue(1, 0, 1, 0, 250)),
        ((engine(PREFILL, "b"), engine(DECODE, "a")), Queue(1, 1, 0, 250, 0)),
        ((engine(UNIFIED, **FULL),), Queue(1, 0, 1, 0, 250)),
        ((engine(PREFILL), engine(DECODE)), Queue(1)),
        ((engine(UNIFIED),), Queue(1)),
        ((engine(PREFILL, **FULL), engine(PREFILL), engine(DECODE, **FULL), engine(DECODE)), Queue(1)),
    ],
)
def test_who_waits_is_counted_by_what_would_help(engines: tuple[Engine, ...], expected: Queue) -> None:
    assert describe_queue(ONE_WAITS, engines) == expected


def test_a_sentence_that_was_begun_waits_for_engines_of_its_own_model() -> None:
    theirs, other = Fingerprint.of({"model": "a"}), Fingerprint.of({"model": "b"})
    fleet = (engine(PREFILL, "a", **FULL), engine(DECODE, "a"), engine(PREFILL, "b"), engine(DECODE, "b"))
    assert describe_queue([(Wanted((1,), theirs), 1.0)], fleet) == Queue(1, 1, 0, 1000, 0)
    assert describe_queue([(Wanted((1,), other), 1.0)], fleet) == Queue(1)


def test_the_age_is_that_of_the_oldest() -> None:
    waiting = [(Wanted((1,)), 0.1), (Wanted((1,)), 3.0), (Wanted((1,)), 0.2)]
    assert describe_queue(waiting, ()) == Queue(3, 0, 3, 0, 3000)


def test_times_between_tokens_are_of_the_last_half_minute() -> None:
    gaps = Gaps()
    assert gaps.p95_ms(0.0) == 0.0
    for number in range(100):
        gaps.add(float(number) / 100, 0.02 if number < 94 else 0.5)
    assert gaps.p95_ms(1.0) == 500.0
    gaps.add(WINDOW_S, 0.04)
    assert gaps.p95_ms(WINDOW_S + 2) == pytest.approx(40.0)
    assert gaps.p95_ms(3 * WINDOW_S) == 0.0


def test_however_many_tokens_come_the_window_has_a_bound() -> None:
    gaps = Gaps()
    for number in range(3 * MOST):
        gaps.add(1.0, 0.001 if number < 2 * MOST else 0.002)
    assert gaps.p95_ms(1.0) == 2.0


def test_a_report_says_what_is_known_of_each_engine() -> None:
    ready = Known(engine(DECODE, address="d:1", running=2, block_keys=(b"k",)), 0.3, 21.5)
    drains = Known(engine(PREFILL, address="p:1", draining=True))
    unmet = Known(Engine(Member(None, "n:1"), trouble="t" * 500))
    told = make_report("g", True, 5, Queue(2), [unmet, drains, ready])
    assert (told.gateway_id, told.ready, told.running, told.queue, told.engines_omitted) == ("g", True, 5, Queue(2), 0)
    by_address = {engine.address: engine for engine in told.engines}
    one = by_address["d:1"]
    assert (one.role, one.ready, one.incarnation, one.inter_token_p95_ms) == (DECODE, True, "life", 21.5)
    assert one.fingerprint == Fingerprint.of({"model": "a"}).digest.hex()
    assert one.load is not None
    assert (one.load.running, one.load.block_keys, one.load_age_ms) == (2, (), 300)
    two = by_address["p:1"]
    assert (two.ready, two.draining, two.trouble) == (False, True, "Draining")
    three = by_address["n:1"]
    assert (three.role, three.fingerprint, three.load, len(three.trouble)) == (None, "", None, MAX_TROUBLE)


def test_a_report_is_bounded_and_leaves_out_those_that_get_no_work_first() -> None:
    links = [Known(Engine(Member(None, f"n{i}:1"), trouble="NotConnected")) for i in range(MAX_ENGINES)]
    links += [Known(engine(DECODE, address=f"d{i}:1")) for i in range(10)]
    told = make_report("g", True, 0, Queue(), links)
    assert (len(told.engines), told.engines_omitted) == (MAX_ENGINES, 10)
    assert sum(engine.ready for engine in told.engines) == 10
    assert len(codec.encode_fleet_report(told).SerializeToString()) < 100 * 1024


# -- over gRPC ---------------------------------------------------------------------------------------------------------


async def ask(address: str, key: str = "key", version: int = SCHEMA_VERSION) -> FleetReport:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        request = fleet_pb2.ReportRequest(schema_version=version)
        return codec.decode_fleet_report(await stub.Report(request, metadata=((KEY_HEADER, key),), timeout=20))


async def test_a_running_gateway_tells_of_its_engines_and_of_the_times_between_tokens(start: Any) -> None:
    stack = await start()
    async with serving_reports(stack.gateway.fleet_report, "127.0.0.1:0", "key") as address:
        before = await ask(address)
        assert before.ready
        assert {(e.address, e.role, e.ready) for e in before.engines} == {("p1", PREFILL, True), ("d1", DECODE, True)}
        assert {e.inter_token_p95_ms for e in before.engines} == {0.0}
        assert (await stack.chat(max_tokens=40)).status_code == 200
        after = {e.address: e for e in (await ask(address)).engines}
        assert after["d1"].inter_token_p95_ms > 0.0
        assert after["p1"].inter_token_p95_ms == 0.0
        assert after["d1"].load is not None


async def test_what_waits_is_in_the_report_with_its_age(start: Any) -> None:
    stack = await start()
    for engine_ in stack.fleet.engines.values():
        engine_.max_running = 0
    await stack.until(lambda: all(link.view.room == 0 for link in stack.gateway.members.links.values()))
    asking = asyncio.create_task(stack.chat())
    await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
    await stack.until(lambda: stack.gateway.fleet_report().queue.oldest_for_decode_ms > 20)
    assert stack.gateway.fleet_report().queue.for_prefill == 0
    stack["d1"].max_running = 8
    await stack.until(lambda: stack.gateway.fleet_report().queue.for_prefill == 1)
    stack["p1"].max_running = 8
    assert (await asking).status_code == 200
    assert stack.gateway.fleet_report().queue == Queue()


async def test_strangers_and_other_versions_get_no_report() -> None:
    async with serving_reports(lambda: FleetReport("g", True), "127.0.0.1:0", "key") as address:
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await ask(address, "guess")
        assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as other:
            await ask(address, version=SCHEMA_VERSION + 1)
        assert other.value.code() is grpc.StatusCode.FAILED_PRECONDITION
