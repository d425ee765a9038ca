"""What the operator makes of what pods say, and that nobody can hold it up."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest
from fake_fleet import FakeEngine, FakeGateway, _Engine, _Fleet

from sluice_operator.decide.actions import Drain
from sluice_operator.decide.observed import Load, Memory, Observed, Pod
from sluice_operator.keys.keyring import Keyring
from sluice_operator.live import fleet_client
from sluice_operator.live.apply import DONE, STALE, Applier
from sluice_operator.live.cluster import Cluster
from sluice_operator.live.connection import Connection
from sluice_operator.live.fleet import Contact, Heard, read_load, read_report, read_status
from sluice_operator.live.fleet_client import LiveFleet
from sluice_operator.live.observe import Known
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_protocol.fleet import FleetReport, Queue, RoutedEngine
from sluice_protocol.generate import Load as EngineLoad
from sluice_protocol.generate import Role
from sluice_protocol.v1 import engine_pb2_grpc, fleet_pb2_grpc
from sluice_runtime.address import join


def pod(name, role, ready=True, started=True):
    return Pod(name, f"uid-{name}", role, "r1", 0.0, ready=ready, started=started)


CONTACT = Contact("ns", "m", {"d-0": "10.0.0.1", "p-0": "10.0.0.2", "g-0": "10.0.0.3"}, "key")


def routed(address, role=Role.DECODE, incarnation="life", ready=True):
    return RoutedEngine(
        address, role, "f1", incarnation, ready, inter_token_p95_ms=12.5, load=EngineLoad("l", 1, 2, 3, 4, 5)
    )


def test_a_report_names_pods_by_their_addresses_and_nobody_elses():
    engines = (routed("10.0.0.1:7000"), routed("10.9.9.9:7000"), routed("10.0.0.2:7000", Role.PREFILL, ready=False))
    told = read_report("g-0", 100.0, FleetReport("id", True, 0, Queue(7, 2, 4, 200, 400), engines), CONTACT, {})
    assert [(e.pod, e.role, e.routed) for e in told.engines] == [
        ("d-0", PodRole.DECODE, True),
        ("p-0", PodRole.PREFILL, False),
    ]
    assert told.engines[0].load.inter_token_p95_ms == 12.5
    assert (told.queued, told.queue_age_ms, told.prefill_queued, told.prefill_queue_age_ms) == (4, 400.0, 2, 200.0)


def test_an_engine_that_started_anew_is_not_routed_to_until_the_gateway_has_met_its_new_life():
    report = FleetReport("id", True, engines=(routed("10.0.0.1:7000", incarnation="old"),))
    assert read_report("g-0", 0.0, report, CONTACT, {"d-0": Load(incarnation="new")}).engines == ()
    assert len(read_report("g-0", 0.0, report, CONTACT, {"d-0": Load(incarnation="old")}).engines) == 1


def test_an_engine_of_which_a_gateway_knows_no_load_yet_is_not_in_its_report():
    bare = RoutedEngine("10.0.0.1:7000", None, trouble="NotConnected")
    assert read_report("g-0", 0.0, FleetReport("id", False, engines=(bare,)), CONTACT, {}).engines == ()


def test_ipv6_addresses_have_brackets_on_the_way_out_and_none_on_the_way_in():
    contact = Contact("ns", "m", {"d-0": "fd00::1"}, "key")
    report = FleetReport("id", True, engines=(routed(join("fd00::1", 7000)),))
    assert join("fd00::1", 7000) == "[fd00::1]:7000"
    assert [e.pod for e in read_report("g-0", 0.0, report, contact, {}).engines] == ["d-0"]


def test_known_but_not_routed_to_is_not_useful_and_keeps_its_fingerprint():
    report = FleetReport("id", True, engines=(routed("10.0.0.1:7000", ready=False),))
    told = read_report("g-0", 0.0, report, CONTACT, {})
    pods = (pod("d-0", PodRole.DECODE), pod("g-0", PodRole.GATEWAY))
    seen = Observed("ns", "m", "u", 1, memory=None, pods=pods, gateways=(told,))
    assert seen.routed == frozenset()
    assert seen.fingerprints == {"d-0": "f1"}
    assert not seen.is_useful(pods[0])


@pytest.mark.parametrize("told", [None, [], "quarantined", {}, {"quarantined": False}, {"quarantined": "yes"}])
def test_a_supervisor_that_holds_nothing_in_quarantine_says_nothing_of_its_engine(told):
    assert read_status(told) is None


def test_an_engine_in_quarantine_whose_leader_is_stuck_is_known_by_its_supervisor():
    told = read_status({"quarantined": True, "draining": False})
    assert told is not None
    assert (told.quarantined, told.draining, told.empty) == (True, False, True)


def test_pages_come_from_the_engine_and_latency_from_the_gateway():
    told = read_load(EngineLoad("life", 3, 1, 8, 10, 100, running_pages=60, reserved_pages=30), 21.0)
    assert (told.running_pages, told.reserved_pages, told.total_pages, told.inter_token_p95_ms) == (60, 30, 100, 21.0)


# -- over gRPC ---------------------------------------------------------------------------------------------------------


class Engines:
    engines: dict[str, FakeEngine]


@pytest.fixture
async def world():
    """One decode engine and one gateway, each on a port of its own."""
    engine = FakeEngine("d-0", "m", "decode", "r1", "10.0.0.1:7000", "life", running=2)
    gateway = FakeGateway("g-0", "m")
    fleet = Engines()
    fleet.engines = {"d-0": engine}
    servers, told = [], {}
    for key, add, servicer in (
        (("10.0.0.1", ports.ENGINE), engine_pb2_grpc.add_EngineServicer_to_server, _Engine(engine)),
        (("10.0.0.3", ports.CONTROL), fleet_pb2_grpc.add_FleetServicer_to_server, _Fleet(gateway, fleet)),
    ):
        server = grpc.aio.server()
        add(servicer, server)
        told[key] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    live = LiveFleet(dial=lambda address, port: told.get((address, port), "127.0.0.1:1"), call_s=1.0)
    yield live, engine, gateway
    await live.close()
    for server in servers:
        await server.stop(0)


PODS = (pod("d-0", PodRole.DECODE), pod("p-0", PodRole.PREFILL), pod("g-0", PodRole.GATEWAY))


async def test_who_answers_is_heard_and_who_is_not_there_is_not(world):
    live, engine, gateway = world
    heard = await live.look(CONTACT, PODS)
    assert heard.loads.keys() == {"d-0"}
    assert heard.loads["d-0"].running == 2
    assert [(r.pod, [e.pod for e in r.engines]) for r in heard.reports] == [("g-0", ["d-0"])]
    assert engine.keys == gateway.keys == {"key"}


async def test_a_silent_engine_costs_one_time_out_and_no_other_answer(world):
    live, engine, _ = world
    engine.silent = True
    began = time.monotonic()
    heard = await live.look(CONTACT, PODS)
    assert time.monotonic() - began < 15
    assert heard.loads == {}
    assert len(heard.reports) == 1


async def test_looking_does_not_keep_the_loop_from_turning(world):
    live, engine, gateway = world
    engine.silent = gateway.silent = True
    looking = asyncio.create_task(live.look(CONTACT, PODS))
    turns = 0
    while not looking.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert await looking == Heard()
    assert turns > 10


async def test_a_drain_is_told_and_may_be_told_again(world):
    live, engine, _ = world
    engine.holds = True
    await live.drain(CONTACT, PODS[0])
    await live.drain(CONTACT, PODS[0])
    assert engine.drains == 2
    told = (await live.look(CONTACT, PODS)).loads["d-0"]
    assert (told.draining, told.empty) == (True, False)
    engine.finish()
    assert (await live.look(CONTACT, PODS)).loads["d-0"].empty


async def test_a_drain_of_nobody_is_no_error(world):
    live, _, _ = world
    await live.drain(CONTACT, PODS[1])
    await live.drain(Contact("ns", "m"), PODS[0])


# -- as an action ------------------------------------------------------------------------------------------------------


class LeaseLost(Exception):
    pass


class Deaf:
    """A fleet that remembers who was told to drain."""

    def __init__(self):
        self.told = []

    async def look(self, contact, pods):
        return Heard()

    async def drain(self, contact, pod):
        self.told.append((contact.name, pod.name))

    async def close(self):
        pass


def applier(fleet, before_write):
    seen = Observed("ns", "m", "u", 1, Memory(0.0), pods=PODS)
    return Applier(
        Cluster(Connection("http://127.0.0.1:1"), 1.0, before_write),
        fleet,
        seen,
        Known("u", Memory(0.0), Keyring("ns", "m"), contact=CONTACT),
    )


async def test_a_drain_is_told_by_the_leader_only():
    def lost():
        raise LeaseLost

    fleet = Deaf()
    with pytest.raises(LeaseLost):
        await applier(fleet, lost).obey(Drain("d-0", "uid-d-0"))
    assert fleet.told == []
    assert await applier(fleet, lambda: None).obey(Drain("d-0", "uid-d-0")) == DONE
    assert fleet.told == [("m", "d-0")]


async def test_a_pod_that_is_another_one_by_now_is_not_told_to_drain():
    fleet = Deaf()
    assert await applier(fleet, lambda: None).obey(Drain("d-0", "uid-of-the-last-one")) == STALE
    assert fleet.told == []


async def test_channels_are_bounded_whatever_the_fleet_is(monkeypatch):
    """Each takes 100 KiB: a fleet of 3,000 pods took as much again as the operator itself."""
    monkeypatch.setattr(fleet_client, "MAX_KEPT", 10)
    fleet, contact = LiveFleet(fleet_client.plaintext), Contact("ns", "m")
    try:
        for number in range(50):
            fleet._channel(contact, PodRole.DECODE, f"127.0.0.1:{number + 1}")
        await fleet._close_unused()
        assert len(fleet._channels) == 50  # calls may still run on them
        for age, kept in enumerate(reversed(fleet._channels.values())):
            kept.used_at -= 10 + age
        await fleet._close_unused()
        assert set(fleet._channels) == {f"127.0.0.1:{number + 1}" for number in range(40, 50)}
    finally:
        await fleet.close()
