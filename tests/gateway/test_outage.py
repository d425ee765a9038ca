"""A part of the fleet is away for a moment: requests wait for it, and for no longer than they may."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sluice_gateway import faults
from sluice_gateway.memory import Fault, MemoryEngine
from sluice_gateway.routing.fleet import Fleet
from sluice_gateway.routing.link import Timings
from sluice_gateway.routing.reasons import ENGINE_LOST
from sluice_protocol.generate import Refused, Role

pytestmark = pytest.mark.slow

TEXT = "The quick brown fox jumps over the lazy dog. "
SLOW_LINK = Timings(load_every_s=30.0, first_backoff_s=0.01, most_backoff_s=0.05)


def say(_prompt: Any, position: int) -> int:
    return TEXT.encode()[position % len(TEXT)]


def pairs(count: int) -> dict[str, MemoryEngine]:
    sides = ((Role.PREFILL, "p"), (Role.DECODE, "d"))
    return {f"{name}{i}": MemoryEngine(role, say, pid=10 * i) for role, name in sides for i in range(1, count + 1)}


def texts(answers: list[Any]) -> list[str]:
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


async def patient(stack: Any, patience_ms: int, **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8} | fields
    headers = {"x-sluice-deadline-ms": str(patience_ms)}
    return await stack.http.post("/v1/chat/completions", json=body, headers=headers)


async def test_the_only_prefill_engine_restarts_and_all_who_arrive_are_served(start: Any) -> None:
    stack = await start(pairs(1))
    stack["p1"].die()
    asked = []
    for _ in range(8):
        asked.append(asyncio.create_task(stack.chat()))
        await asyncio.sleep(0.2)
    stack["p1"].revive()
    answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert texts(answers) == [TEXT[:8]] * 8
    await stack.idle()


async def test_a_source_that_is_lost_unseen_for_a_second_costs_one_fault(start: Any) -> None:
    """The gateway still sees a healthy prefill engine; decode does not reach it."""
    stack = await start(pairs(1))
    stack["d1"].faults.extend(Fault("fail", 0, error) for error in ("SourceLost", "IncarnationChanged", "PeerLost"))
    stack["d1"].faults.append(Fault("fail", 0, "SourceLost"))
    answer = await stack.chat()
    assert texts([answer]) == [TEXT[:8]]
    assert len(stack["d1"].requests) == 5


async def test_a_sidecar_that_restarts_costs_nobody_his_answer(start: Any) -> None:
    stack = await start(pairs(1))
    stack["d1"].refusals.extend(Refused("TransportLost", "the sidecar died", 0) for _ in range(30))
    answers = await asyncio.gather(*(stack.chat() for _ in range(12)))
    assert [answer.status_code for answer in answers] == [200] * 12


async def test_a_broken_try_refuses_no_other_request(start: Any) -> None:
    """Between the broken try and the next Load the pair is suspect, and still a pair."""
    stack = await start(pairs(1), timings=SLOW_LINK)
    for address in ("p1", "d1"):
        stack.gateway.dispatcher.suspect(address)
        assert stack.gateway.members.links[address].view.suspect
        assert not stack.gateway.not_ready()
    assert (await stack.chat()).status_code == 200


async def test_with_one_of_two_pairs_broken_requests_go_to_the_other_at_once(start: Any) -> None:
    stack = await start(pairs(2))
    for address in ("p1", "d1"):
        stack[address].die()
    began = time.monotonic()
    answers = await asyncio.gather(*(stack.chat() for _ in range(8)))
    assert texts(answers) == [TEXT[:8]] * 8
    assert time.monotonic() - began < 5


async def test_a_fault_with_another_pair_to_go_to_pauses_nobody(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(faults, "DELAYS_S", (60.0,))
    stack = await start(pairs(2))
    for address in ("d1", "d2"):
        stack[address].faults.append(Fault("fail", 2, "SourceLost"))
    began = time.monotonic()
    assert texts([await stack.chat()]) == [TEXT[:8]]
    assert time.monotonic() - began < 5


async def test_a_fault_without_another_pair_waits_before_the_next_try(start: Any) -> None:
    stack = await start(pairs(1))
    stack["d1"].faults.append(Fault("fail", 0, "DigestMismatch"))
    began = time.monotonic()
    assert texts([await stack.chat()]) == [TEXT[:8]]
    assert time.monotonic() - began > 0.07


async def test_a_fleet_that_never_had_a_pair_answers_503_at_once(start: Any) -> None:
    engines = pairs(1)
    engines["p1"].alive = False
    stack = await start(engines, wait=False)
    await stack.until(lambda: stack.gateway.members.links["d1"].view.load is not None)
    began = time.monotonic()
    answer = await stack.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_pair")
    assert "p1" in answer.json()["error"]["message"]
    assert time.monotonic() - began < 5


async def test_a_fleet_that_is_told_anew_is_waited_for_though_nobody_is_known_between(start: Any) -> None:
    """A launcher takes engines that died out of its fleet file, and puts them in again when they are back."""
    engines = pairs(1)
    for engine in engines.values():
        engine.max_context_tokens = 64
    stack = await start(engines)
    fleet = Fleet(tuple(link.member for link in stack.gateway.members.links.values()))
    stack.gateway.members.set_fleet(Fleet())
    assert stack.gateway.not_ready() == "no engine is known"
    asked = [asyncio.create_task(stack.chat(max_tokens=tokens)) for tokens in (8, 8, None)]
    await stack.until(lambda: stack.gateway.dispatcher.queued == 3)
    stack.gateway.members.set_fleet(fleet)
    answers = await asyncio.gather(*asked)
    assert texts(answers[:2]) == [TEXT[:8]] * 2
    assert answers[2].json()["usage"]["total_tokens"] == 64  # the limits of before


async def test_a_gateway_that_restarts_waits_for_the_first_answers(start: Any) -> None:
    """It accepts before any engine has answered its first Load."""
    engines = pairs(1)
    for engine in engines.values():
        engine.voice.clear()
    stack = await start(engines, wait=False)
    asked = [asyncio.create_task(stack.chat()) for _ in range(3)]
    await stack.until(lambda: stack.gateway.dispatcher.queued == 3)
    for engine in engines.values():
        engine.voice.set()
    assert texts(list(await asyncio.gather(*asked))) == [TEXT[:8]] * 3


async def test_it_does_not_wait_for_first_answers_for_ever(start: Any) -> None:
    engines = pairs(1)
    engines["p1"].voice.clear()
    stack = await start(engines, wait=False, outage_s=0.0)
    await stack.until(lambda: stack.gateway.members.links["d1"].view.load is not None)
    answer = await stack.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_pair")


async def test_a_fleet_that_is_gone_for_too_long_answers_503_at_once(start: Any) -> None:
    stack = await start(pairs(1), outage_s=0.1)
    stack["p1"].die()
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    assert (await stack.chat()).status_code == 503
    assert time.monotonic() - began < 5


async def test_the_patience_of_a_request_bounds_its_wait_for_a_pair(start: Any) -> None:
    stack = await start(pairs(1))
    stack["p1"].die()
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    began = time.monotonic()
    answer = await patient(stack, 300)
    assert 0.25 < time.monotonic() - began < 5
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_pair")
    assert answer.headers["retry-after"]
    await stack.idle()


async def test_the_patience_of_a_request_bounds_its_retries(start: Any) -> None:
    stack = await start(pairs(1))
    stack["d1"].faults.extend(Fault("fail", 0, "SourceLost") for _ in range(50))
    began = time.monotonic()
    answer = await patient(stack, 400)
    assert answer.status_code in (429, 503)
    assert answer.headers["retry-after"]
    assert time.monotonic() - began < 5
    await stack.idle()


async def test_requests_that_wait_for_a_pair_fill_the_one_queue(start: Any) -> None:
    stack = await start(pairs(1), max_queued=2)
    stack["p1"].die()
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    asked = [asyncio.create_task(stack.chat()) for _ in range(2)]
    await stack.until(lambda: stack.gateway.dispatcher.queued == 2)
    assert (await stack.chat()).status_code == 429
    stack["p1"].revive()
    assert texts(list(await asyncio.gather(*asked))) == [TEXT[:8]] * 2


async def test_a_request_that_arrives_while_nobody_is_there_is_held_to_the_limits_of_before(start: Any) -> None:
    """Without max_tokens a chat fills the context: that of the engines, which are away."""
    engine = MemoryEngine(Role.UNIFIED, say, max_context_tokens=64)
    stack = await start({"u": engine})
    engine.die()
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    asked = asyncio.create_task(stack.chat(max_tokens=None))
    await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
    engine.revive()
    answer = (await asked).json()
    assert answer["usage"]["total_tokens"] == 64
    assert answer["system_fingerprint"] != "fp_none"


async def test_a_request_that_kills_its_engines_is_failed_as_suspect_at_the_third(start: Any) -> None:
    """Each incarnation that dies under it counts, though the engine is back every time. A client's own retries must not
    go on where ours end."""
    engine = MemoryEngine(Role.UNIFIED, say)
    stack = await start({"u": engine})
    engine.faults.extend(Fault("die", 1) for _ in range(9))
    asked = asyncio.create_task(stack.chat())
    while not asked.done():
        if not engine.alive:
            await asyncio.sleep(0.05)
            engine.revive()
        await asyncio.sleep(0.005)
    answer = await asked
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "PoisonSuspected")
    assert error["message"].startswith(f"3 engines failed while they ran this request, the last with {ENGINE_LOST}")
    assert "do not send it again unchanged" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert len(engine.requests) == 3
    engine.faults.clear()
    if not engine.alive:
        engine.revive()
    assert (await stack.chat()).status_code == 200


async def test_deaths_of_engines_that_did_not_have_it_in_work_blame_no_request(start: Any) -> None:
    """The decode engine dies whenever the request waits for prefill."""
    stack = await start(pairs(1))
    engine = stack["d1"]
    engine.faults.extend(Fault("die", 0) for _ in range(9))
    asked = asyncio.create_task(stack.chat())
    while not asked.done():
        if not engine.alive:
            await asyncio.sleep(0.05)
            engine.revive()
        await asyncio.sleep(0.005)
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, ENGINE_LOST)
    assert answer.headers["retry-after"]
    assert "x-should-retry" not in answer.headers
    assert len(engine.requests) == 3


async def test_a_fault_that_never_ends_on_a_living_engine_ends_the_request(start: Any) -> None:
    stack = await start(pairs(1))
    stack["d1"].faults.extend(Fault("fail", 1, "TransportLost") for _ in range(50))
    answer = await stack.chat(max_tokens=50)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "TransportLost")
    assert len(stack["d1"].requests) < 10
