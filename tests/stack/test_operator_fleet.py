"""The operator's client against real engines and a real gateway: what plan would see."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from stack_double import KEY, RunningStack

from sluice_launch.process import eventually, stop_process
from sluice_operator.decide.observed import Pod
from sluice_operator.live.fleet import Contact, Heard
from sluice_operator.live.fleet_client import LiveFleet
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_runtime.address import split

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

# Each engine has a loopback address of its own, as a pod has.
HOSTS = {"prefill-0": "127.0.0.2", "decode-0": "127.0.0.3", "gateway": "127.0.0.1"}
QUICK = {"floor_s": 2.0, "quarantine_after": 1, "quarantine_s": 60.0}


@pytest.fixture
def stack() -> Iterator[RunningStack]:
    with RunningStack(scripted={"step_cost_us": 10_000.0}) as running:
        running.start("prefill", host=HOSTS["prefill-0"])
        running.start("decode", host=HOSTS["decode-0"], health=QUICK)
        running.start_gateway()
        yield running


def pods() -> tuple[Pod, ...]:
    roles = {"prefill-0": PodRole.PREFILL, "decode-0": PodRole.DECODE, "gateway": PodRole.GATEWAY}
    return tuple(
        Pod(name, f"uid-{name}", role, "r1", 0.0, ready=name != "decode-0", started=True)
        for name, role in roles.items()
    )


def call(stack: RunningStack, work: Any, key: str = KEY) -> Any:
    """`work` gets the client and the contact."""
    told = {(HOSTS[e.name], ports.ENGINE): e.address for e in stack.engines.values()}
    told |= {(HOSTS[e.name], ports.PROBE): f"{HOSTS[e.name]}:{e.ready['probes']}" for e in stack.engines.values()}
    told[HOSTS["gateway"], ports.CONTROL] = stack.report_address

    async def run() -> Any:
        live = LiveFleet(dial=lambda address, port: told[address, port], call_s=10.0)
        try:
            return await work(live, Contact("ns", "m", HOSTS, key))
        finally:
            await live.close()

    return asyncio.run(run())


def look(stack: RunningStack, key: str = KEY) -> Heard:
    heard: Heard = call(stack, lambda live, contact: live.look(contact, pods()), key)
    return heard


def test_loads_and_routes_are_as_the_processes_have_them(stack):
    stream = stack.chat("tell me", max_tokens=400)
    pieces = iter(stream)
    for _ in range(30):
        next(pieces)
    heard = look(stack)
    assert heard.loads.keys() == {"prefill-0", "decode-0"}
    decode = heard.loads["decode-0"]
    assert (decode.running, decode.waiting, decode.quarantined) == (1, 0, False)
    assert (decode.draining, decode.empty) == (False, False)
    assert decode.running_pages > 0
    (report,) = heard.reports
    assert {(e.pod, e.role, e.routed) for e in report.engines} == {
        ("prefill-0", PodRole.PREFILL, True),
        ("decode-0", PodRole.DECODE, True),
    }
    assert len({e.fingerprint for e in report.engines}) == 1
    by_pod = {e.pod: e for e in report.engines}
    assert by_pod["decode-0"].load.inter_token_p95_ms > 5.0
    assert by_pod["decode-0"].load.incarnation == decode.incarnation
    stream.drop()


def test_a_drain_by_the_operator_is_seen_in_loads_and_routes(stack):
    call(stack, lambda live, contact: live.drain(contact, pods()[1]))
    assert look(stack).loads["decode-0"].draining
    eventually(lambda: look(stack).loads["decode-0"].empty, "it is empty")

    def is_out() -> bool:
        (report,) = look(stack).reports
        return {e.pod: e.routed for e in report.engines} == {"prefill-0": True, "decode-0": False}

    eventually(is_out, "the gateway routes to it no more")
    assert not look(stack).loads["decode-0"].quarantined


def test_without_the_key_nobody_says_anything(stack):
    assert look(stack, "guess") == Heard()


def test_an_engine_in_quarantine_is_told_of_by_its_supervisor(stack):
    """Its leader is stuck, and answers nobody."""
    engine = stack.engines["decode-0"]
    host, port = split(engine.address)
    assert (host, int(port) > 0) == (HOSTS["decode-0"], True)
    stop_process(engine.pid("leader"))
    engine.process.wait_for("quarantined")
    load = look(stack).loads["decode-0"]
    assert (load.quarantined, load.empty) == (True, True)
