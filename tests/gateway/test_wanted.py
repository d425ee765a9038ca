"""An engine that is wanted and away is missed: it stays on the status page, with the reason, until it is withdrawn."""

from __future__ import annotations

import asyncio
from typing import Any

from sluice_gateway.memory import MemoryEngine
from sluice_gateway.routing.fleet import Fleet, Member, parse_fleet
from sluice_protocol.generate import Role

WHY = "it died (exit status 1) and is started again; deaths so far: 7"
DOCUMENT = {
    "members": [
        {"role": "prefill", "name": "prefill-0", "address": "p1"},
        {"role": "decode", "name": "decode-0", "address": "d1"},
        {"role": "decode", "name": "decode-1", "down": WHY},
    ]
}
AWAY = Member(Role.DECODE, "decode-1", WHY)


def engines() -> dict[str, MemoryEngine]:
    return {"p1": MemoryEngine(Role.PREFILL, lambda _p, _i: 97), "d1": MemoryEngine(Role.DECODE, lambda _p, _i: 97)}


def test_a_fleet_tells_of_members_that_are_away() -> None:
    here = (Member(Role.PREFILL, "p1"), Member(Role.DECODE, "d1"))
    assert parse_fleet(DOCUMENT) == Fleet((*here, AWAY))


async def test_it_is_on_the_status_page_with_the_reason(start: Any) -> None:
    stack = await start(engines(), extra=(AWAY,))
    told = (await stack.http.get("/status/now")).json()
    (away,) = [service for service in told["services"] if service["name"] == "decode-1"]
    assert (away["role"], away["answers"]) == ("decode", False)
    assert WHY in away["message"]
    health = (await stack.http.get("/health")).json()
    assert [engine["trouble"] for engine in health["engines"] if engine["address"] == "decode-1"] == [f"Down: {WHY}"]


async def test_others_serve_and_it_serves_when_it_is_back(start: Any) -> None:
    stack = await start(engines(), extra=(AWAY,))
    assert (await stack.chat()).status_code == 200
    back = stack.fleet.engines["d2"] = MemoryEngine(Role.DECODE, lambda _p, _i: 97)
    members = [Member(Role.PREFILL, "p1"), Member(Role.DECODE, "d1")]
    stack.gateway.members.set_fleet(Fleet((*members, Member(Role.DECODE, "d2"))))
    await stack.until(lambda: stack.gateway.members.links["d2"].view.load is not None)
    assert "decode-1" not in stack.gateway.members.links
    assert back.hello.role is Role.DECODE
    stack.gateway.members.set_fleet(Fleet((*members, AWAY)))
    assert stack.gateway.members.links["decode-1"].view.unusable == f"Down: {WHY}"
    stack.gateway.members.set_fleet(Fleet(tuple(members)))
    told = (await stack.http.get("/health")).json()
    assert {engine["address"] for engine in told["engines"]} == {"p1", "d1"}


async def test_a_client_hears_that_it_is_away_and_not_what_it_said_at_its_end(start: Any) -> None:
    stack = await start({"p1": engines()["p1"]}, wait=False, extra=(AWAY,), outage_s=0.0)
    await stack.until(lambda: stack.gateway.members.links["p1"].view.load is not None)
    answer = await stack.chat()
    assert answer.status_code == 503
    assert "decode decode-1: Down" in answer.json()["error"]["message"]
    assert "exit status" not in answer.text


async def test_a_gateway_that_has_just_started_waits_for_who_is_being_started(start: Any) -> None:
    """Gateway and engines died together, and the gateway is back first."""
    stack = await start({"p1": engines()["p1"]}, wait=False, extra=(AWAY,))
    await stack.until(lambda: stack.gateway.members.links["p1"].view.load is not None)
    asked = asyncio.create_task(stack.chat())
    await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
    stack.fleet.engines["d2"] = back = MemoryEngine(Role.DECODE, lambda _p, _i: 97)
    steps = asyncio.create_task(back.run())
    stack.gateway.members.set_fleet(Fleet((Member(Role.PREFILL, "p1"), Member(Role.DECODE, "d2"))))
    assert (await asked).status_code == 200
    steps.cancel()
