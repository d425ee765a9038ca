"""The client's text is that of the undisturbed run, whatever happens to the engines."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from sluice_gateway.memory import Fault, MemoryEngine
from sluice_gateway.routing import dispatch
from sluice_gateway.routing.fleet import Member
from sluice_gateway.routing.link import Timings
from sluice_protocol.generate import Refused, Role

TEXT = "The quick brown fox jumps over the lazy dog. "


def say(text: str = TEXT) -> Any:
    data = text.encode()
    return lambda _prompt, position: data[position % len(data)]


def two_pairs() -> dict[str, MemoryEngine]:
    return {
        "p1": MemoryEngine(Role.PREFILL, say(), pid=11),
        "p2": MemoryEngine(Role.PREFILL, say(), pid=12),
        "d1": MemoryEngine(Role.DECODE, say(), pid=21),
        "d2": MemoryEngine(Role.DECODE, say(), pid=22),
    }


def unified(**fields: Any) -> dict[str, MemoryEngine]:
    return {"u": MemoryEngine(Role.UNIFIED, say(), **fields)}


def text_of(response: Any) -> str:
    """Content of a whole stream, which must have ended well."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


FAULTS = [
    Fault("die", 0),
    Fault("die", 5),
    Fault("preempt", 0),
    Fault("preempt", 5),
    Fault("fail", 5, "PullFailed"),
    Fault("fail", 5, "NeverHeardOf"),
    Fault("fail", 0, "Draining"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.error}-{f.after}")
async def test_a_fault_is_a_pause(start: Any, fault: Fault) -> None:
    stack = await start(two_pairs())
    for decode in ("d1", "d2"):
        stack[decode].faults.append(fault)
    stack["d2"].faults.clear() if fault.kind == "die" else None
    answers = [await stack.chat(stream=True, max_tokens=20) for _ in range(3)]
    assert [text_of(a) for a in answers] == [TEXT[:20]] * 3
    await stack.idle()


async def test_the_next_try_carries_what_was_produced_and_prefers_another_pair(start: Any) -> None:
    stack = await start(two_pairs())
    for engine in stack.fleet.engines.values():
        engine.faults.append(Fault("fail", 5, "PullFailed"))
    first = (await stack.chat(max_tokens=20, seed=9)).json()
    assert first["choices"][0]["message"]["content"] == TEXT[:20]
    tries = stack["d1"].requests + stack["d2"].requests
    assert len(stack["d1"].requests) in (1, 2)
    by_length = sorted(tries, key=lambda r: len(r.output_ids))
    assert [bytes(r.output_ids).decode() for r in by_length] == ["", TEXT[:5], TEXT[:10]]
    assert len({r.source_address for r in by_length[:2]}) == 2
    assert {r.sampling.seed for r in tries} == {9}
    assert {r.prompt_ids for r in tries} == {tries[0].prompt_ids}


async def test_the_fault_budget_ends_a_request_that_always_fails(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.extend(Fault("fail", 1, "PullFailed", "digest") for _ in range(3))
    response = await stack.chat(max_tokens=20)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "PullFailed"
    assert len(stack["u"].requests) == 3
    assert (await stack.chat()).status_code == 200


async def test_a_failure_in_mid_stream_is_an_event_and_never_done(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.extend(Fault("fail", 1, "PullFailed") for _ in range(3))
    response = await stack.chat(max_tokens=20, stream=True)
    assert response.status_code == 200
    lines = [line for line in response.text.split("\n\n") if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "PullFailed"
    assert "[DONE]" not in response.text
    assert 'finish_reason":"' not in response.text


async def test_preemption_costs_nothing_of_the_budget(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.extend(Fault("preempt", 1) for _ in range(6))
    assert text_of(await stack.chat(stream=True, max_tokens=20)) == TEXT[:20]
    assert len(stack["u"].requests) == 7


async def test_a_refusal_with_a_hint_waits_and_costs_nothing(start: Any) -> None:
    stack = await start(unified())
    stack["u"].refusals.extend(Refused("ResourceExhausted", "full", 10) for _ in range(5))
    assert text_of(await stack.chat(stream=True, max_tokens=20)) == TEXT[:20]


async def test_a_final_refusal_is_the_clients_error(start: Any) -> None:
    stack = await start(unified())
    stack["u"].refusals.append(Refused("InvalidArgument", "top_k is odd", 0))
    response = await stack.chat()
    assert response.status_code == 400
    assert "top_k is odd" in response.json()["error"]["message"]
    assert len(stack["u"].requests) == 1


async def test_an_answer_that_was_complete_is_not_asked_for_again(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.append(Fault("die", 99))
    stack["u"].gate.clear()
    asked = asyncio.create_task(stack.chat(max_tokens=1))
    await stack.until(lambda: bool(stack["u"].running))
    (sequence,) = stack["u"].running.values()
    stream, gateway_id = sequence.request.stream, sequence.request.gateway_id
    from sluice_protocol.generate import TokenBatch

    stack["u"]._attached[gateway_id].put_nowait(TokenBatch(1, (stream,), (1,), (84,)))
    await asyncio.sleep(0.05)
    stack["u"].die()
    response = await asked
    assert response.json()["choices"][0]["message"]["content"] == "T"
    assert len(stack["u"].requests) == 1


async def test_a_lone_engine_that_restarts_on_its_address_finishes_the_answer(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.append(Fault("die", 7))
    asked = asyncio.create_task(stack.chat(max_tokens=20, stream=True))
    await stack.until(lambda: not stack["u"].alive)
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    assert (await stack.http.get("/readyz")).status_code == 503
    new = asyncio.create_task(stack.chat(max_tokens=20, stream=True))
    await stack.until(lambda: stack.gateway.dispatcher.queued == 2)
    stack["u"].revive()
    assert text_of(await asked) == text_of(await new) == TEXT[:20]
    assert (await stack.http.get("/readyz")).status_code == 200


async def test_a_new_incarnation_fails_the_tries_of_the_old(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.append(Fault("hang", 3))
    asked = asyncio.create_task(stack.chat(max_tokens=20, stream=True))
    await stack.until(lambda: any(s.quiet for s in stack["u"].running.values()))
    stack["u"].life += 1
    assert text_of(await asked) == TEXT[:20]
    await stack.idle()


async def test_another_model_never_finishes_the_sentence(start: Any) -> None:
    engines = {
        "a": MemoryEngine(Role.UNIFIED, say(), facts={"model": "a"}, max_running=2),
        "b": MemoryEngine(Role.UNIFIED, say("x"), facts={"model": "b"}, max_running=1),
    }
    engines["b"].draining = True
    stack = await start(engines)
    engines["a"].faults.append(Fault("die", 4))
    asked = asyncio.create_task(stack.chat(max_tokens=20, stream=True))
    await stack.until(lambda: not engines["a"].alive)
    engines["b"].draining = False
    await stack.ready()
    assert (await stack.chat()).json()["choices"][0]["message"]["content"] == "x" * 8
    engines["a"].revive()
    assert text_of(await asked) == TEXT[:20]


async def test_unequal_fingerprints_make_no_pair(start: Any) -> None:
    engines = two_pairs()
    for name in ("p1", "p2"):
        engines[name].facts = {"model": "other"}
    stack = await start(engines, wait=False)
    response = await stack.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "no_pair"


async def test_an_address_where_nobody_listens_hurts_nobody(start: Any) -> None:
    stack = await start(unified(), extra=(Member(Role.UNIFIED, "nobody"),))
    assert text_of(await stack.chat(stream=True, max_tokens=20)) == TEXT[:20]
    report = (await stack.http.get("/health")).json()
    assert {e["address"]: bool(e["trouble"]) for e in report["engines"]} == {"u": False, "nobody": True}


async def test_draining_engines_get_no_new_work_and_finish_the_old(start: Any) -> None:
    stack = await start(two_pairs())
    stack["d1"].gate.clear()
    stack["d2"].gate.clear()
    asked = [asyncio.create_task(stack.chat(max_tokens=20, stream=True)) for _ in range(4)]
    await stack.until(lambda: len(stack["d1"].running) + len(stack["d2"].running) == 4)
    stack["d1"].draining = True
    await stack.until(lambda: any(link.view.unusable == "Draining" for link in stack.gateway.members.links.values()))
    before = len(stack["d1"].requests)
    stack["d1"].gate.set()
    stack["d2"].gate.set()
    assert [text_of(await a) for a in asked] == [TEXT[:20]] * 4
    for _ in range(6):
        await stack.chat()
    assert len(stack["d1"].requests) == before


@pytest.mark.parametrize("who", ["p1", "d1"])
async def test_a_refusal_tells_of_a_drain_long_before_the_next_load(start: Any, who: str) -> None:
    """A decode engine refuses for itself, or says that its source did: both of the pair are asked then."""
    timings = Timings(load_every_s=3600.0, first_backoff_s=0.01, most_backoff_s=0.05)
    engines = {name: engine for name, engine in two_pairs().items() if name in ("p1", "d1")}
    stack = await start(engines, timings=timings)
    stack[who].draining = True
    if who == "p1":
        stack["d1"].faults.append(Fault("fail", 0, "Draining"))
    asked = asyncio.create_task(stack.chat(max_tokens=20, stream=True))
    link = stack.gateway.members.links[who]
    await stack.until(lambda: link.view.unusable == "Draining")
    assert len(stack["d1"].requests) == 1
    # Nobody else can serve, so the request waits; it does not fail.
    stack[who].draining = False
    link.suspect()
    assert text_of(await asked) == TEXT[:20]


async def test_prompts_that_wait_are_bounded_together_by_their_tokens(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand places for prompts of a million tokens would be 36 GB."""
    monkeypatch.setattr(dispatch, "MOST_QUEUED_TOKENS", 100)
    stack = await start(unified(max_running=1))
    stack["u"].gate.clear()
    asked = [asyncio.create_task(stack.complete(prompt="a", max_tokens=4))]
    await stack.until(lambda: stack["u"].running)
    asked.append(asyncio.create_task(stack.complete(prompt="b" * 300, max_tokens=4)))  # nothing waits: it may
    await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
    response = await stack.complete(prompt="c", max_tokens=4)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert "100 tokens together" in response.json()["error"]["message"]
    stack["u"].gate.set()
    assert [(await a).status_code for a in asked] == [200] * 2


async def test_a_full_queue_is_429_and_the_waiting_are_served(start: Any) -> None:
    stack = await start(unified(max_running=1), max_queued=2)
    stack["u"].gate.clear()
    asked = [asyncio.create_task(stack.chat()) for _ in range(3)]
    await stack.until(lambda: stack.gateway.dispatcher.queued == 2)
    response = await stack.chat()
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "queue_full"
    whole = await stack.chat(stream=True, n=3)
    assert whole.status_code == 429
    stack["u"].gate.set()
    assert [(await a).status_code for a in asked] == [200] * 3


async def test_a_missed_deadline_is_429(start: Any) -> None:
    stack = await start(unified(max_running=1))
    stack["u"].gate.clear()
    first = asyncio.create_task(stack.chat())
    await stack.until(lambda: bool(stack["u"].running))
    began = time.monotonic()
    body = {"model": "m", "prompt": "x"}
    late = await stack.http.post("/v1/completions", json=body, headers={"x-sluice-deadline-ms": "150"})
    assert 0.1 < time.monotonic() - began < 10
    assert late.status_code == 429
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert late.headers["retry-after"]
    stack["u"].gate.set()
    assert (await first).status_code == 200


async def test_the_queue_is_first_come_first_served(start: Any) -> None:
    stack = await start(unified(max_running=1))
    stack["u"].gate.clear()
    asked = []
    for index in range(6):
        asked.append(asyncio.create_task(stack.complete(prompt=f"{index}")))
        await stack.until(lambda: stack.gateway.dispatcher.running + stack.gateway.dispatcher.queued == len(asked))
    stack["u"].gate.set()
    await asyncio.gather(*asked)
    prompts = [bytes(r.prompt_ids[1:]).decode() for r in stack["u"].requests]
    assert list(dict.fromkeys(prompts)) == list("012345")


@pytest.mark.slow
async def test_under_random_faults_every_answer_is_right_and_nothing_is_left(start: Any) -> None:
    """One seed, many requests, faults of all kinds on both decode engines."""
    rng = random.Random(4)
    stack = await start(two_pairs(), fault_budget=1000)
    kinds = ("preempt", "fail", "none")

    async def chaos() -> None:
        for _ in range(4):
            await asyncio.sleep(0.1)
            victim = stack[rng.choice(["d1", "d2"])]
            victim.die()
            await asyncio.sleep(0.05)
            victim.revive()

    for name in ("d1", "d2"):
        for _ in range(60):
            kind = rng.choice(kinds)
            stack[name].faults.append(
                Fault(kind if kind != "none" else "fail", rng.randrange(30) if kind != "none" else 999)
            )
        stack[name].step_s = 0.002
    noise = asyncio.create_task(chaos())
    answers = await asyncio.gather(*(stack.chat(stream=True, max_tokens=25) for _ in range(60)))
    await noise
    assert {text_of(answer) for answer in answers} == {TEXT[:25]}
    assert stack.gateway.counters.retries > 20
    await stack.idle()
    for link in stack.gateway.members.links.values():
        await stack.until(lambda link=link: link.view.own == 0)
