"""An engine that is stuck ends nothing by itself: its clients go elsewhere where there is an elsewhere."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from sluice_gateway.memory import Fault, MemoryEngine
from sluice_gateway.routing.link import Timings
from sluice_protocol.generate import Role

pytestmark = pytest.mark.slow

TEXT = "The quick brown fox jumps over the lazy dog. "
TIMINGS = Timings(load_every_s=0.02, load_timeout_s=0.1, sick_s=0.3, first_backoff_s=0.01, most_backoff_s=0.05)


def two_pairs() -> dict[str, MemoryEngine]:
    def say(_prompt: object, position: int) -> int:
        return TEXT.encode()[position % len(TEXT)]

    roles = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE}
    return {name: MemoryEngine(role, say) for name, role in roles.items()}


def text_of(response: Any) -> str:
    """Of a whole stream, which must have ended well."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def mute(engine: MemoryEngine) -> None:
    """As a leader that is stuck: nothing comes back."""
    engine.voice.clear()


def set_unready(engine: MemoryEngine) -> None:
    engine.not_ready = True


async def hanging(start: Any, **changes: Any) -> tuple[Any, asyncio.Task[Any], str]:
    """A stream that stands after three tokens: (stack, its answer, the engine it runs on)."""
    stack = await start(two_pairs(), timings=replace(TIMINGS, **changes))
    for name in ("d1", "d2"):
        stack[name].faults.append(Fault("hang", 3))
    asking = asyncio.create_task(stack.chat(stream=True, max_tokens=20))
    await stack.until(lambda: any(s.quiet for name in ("d1", "d2") for s in stack[name].running.values()))
    name = next(name for name in ("d1", "d2") if stack[name].running)
    stack["d1" if name == "d2" else "d2"].faults.clear()
    return stack, asking, name


async def left_alone(stack: Any, name: str) -> str:
    """The other one, which takes no work any more."""
    other = "d1" if name == "d2" else "d2"
    set_unready(stack[other])
    await stack.until(lambda: bool(stack.gateway.members.links[other].view.unusable))
    return other


@pytest.mark.parametrize("trouble", [mute, set_unready])
async def test_what_runs_on_a_stuck_engine_goes_on_elsewhere(start: Any, trouble: Any) -> None:
    stack, asking, name = await hanging(start)
    trouble(stack[name])
    assert text_of(await asyncio.wait_for(asking, 20)) == TEXT[:20]
    stack[name].voice.set()
    await stack.idle()


@pytest.mark.parametrize("trouble", [mute, set_unready])
async def test_new_work_goes_elsewhere_long_before_that(start: Any, trouble: Any) -> None:
    stack = await start(two_pairs(), timings=replace(TIMINGS, sick_s=1000.0))
    trouble(stack["d1"])
    await stack.until(lambda: bool(stack.gateway.members.links["d1"].view.unusable))
    stack["d1"].gate.clear()
    for _ in range(4):
        assert text_of(await asyncio.wait_for(stack.chat(stream=True, max_tokens=20), 20)) == TEXT[:20]
    stack["d1"].gate.set()
    stack["d1"].voice.set()


async def test_it_is_used_again_once_it_answers(start: Any) -> None:
    stack = await start(two_pairs(), timings=TIMINGS)
    link = stack.gateway.members.links["d1"]
    mute(stack["d1"])
    await stack.until(lambda: "does not answer" in link.view.unusable)
    stack["d1"].voice.set()
    await stack.until(lambda: not link.view.unusable)


@pytest.mark.parametrize("trouble", [mute, set_unready])
async def test_without_another_pair_it_is_waited_for(start: Any, trouble: Any) -> None:
    stack, asking, name = await hanging(start)
    other = await left_alone(stack, name)
    trouble(stack[name])
    await asyncio.sleep(3 * TIMINGS.sick_s)
    assert not asking.done()
    assert stack[name].running
    stack[other].not_ready = False
    assert text_of(await asyncio.wait_for(asking, 20)) == TEXT[:20]
    stack[name].voice.set()


def quarantine(engine: MemoryEngine) -> None:
    engine.quarantined = True


def quarantine_in_a_drain(engine: MemoryEngine) -> None:
    engine.quarantined = engine.draining = True


@pytest.mark.parametrize("trouble", [quarantine, quarantine_in_a_drain, mute])
async def test_what_does_not_come_back_is_not_waited_for_though_nobody_else_is_there(start: Any, trouble: Any) -> None:
    """In quarantine an engine stays as it is for ten minutes, and so did the streams of its clients."""
    stack, asking, name = await hanging(start, silent_s=1.0)
    other = await left_alone(stack, name)
    trouble(stack[name])
    await stack.until(lambda: not stack[name].running or stack.gateway.dispatcher.queued > 0)
    stack[other].not_ready = False
    assert text_of(await asyncio.wait_for(asking, 20)) == TEXT[:20]
    stack[name].voice.set()


async def test_who_answers_and_is_only_not_ready_is_waited_for_however_long(start: Any) -> None:
    stack, asking, name = await hanging(start, silent_s=0.2)
    other = await left_alone(stack, name)
    set_unready(stack[name])
    await asyncio.sleep(3 * TIMINGS.sick_s)
    assert not asking.done()
    assert stack[name].running
    stack[other].not_ready = False
    assert text_of(await asyncio.wait_for(asking, 20)) == TEXT[:20]


async def test_an_engine_that_drains_finishes_what_it_has(start: Any) -> None:
    stack, asking, name = await hanging(start)
    stack[name].draining = stack[name].not_ready = True
    await asyncio.sleep(3 * TIMINGS.sick_s)
    assert stack[name].running
    stack[name].die()
    assert text_of(await asyncio.wait_for(asking, 20)) == TEXT[:20]


async def test_a_stuck_prefill_engine_gives_up_those_who_wait_for_its_first_token(start: Any) -> None:
    stack = await start(two_pairs(), timings=TIMINGS)
    for name in ("d1", "d2"):
        stack[name].faults.append(Fault("hang", 0))
    asking = asyncio.create_task(stack.chat(stream=True, max_tokens=20))
    await stack.until(lambda: any(s.quiet for name in ("d1", "d2") for s in stack[name].running.values()))
    for name in ("d1", "d2"):
        stack[name].faults.clear()
    links = stack.gateway.members.links
    source = next(name for name in ("p1", "p2") if links[name].leaning)
    mute(stack[source])
    assert text_of(await asyncio.wait_for(asking, 20)) == TEXT[:20]
    assert not any(link.leaning for link in links.values())
    stack[source].voice.set()


async def test_decode_engines_hear_of_the_sources_that_they_may_be_sent_to(start: Any) -> None:
    """Before any request; again when they change, or are new to a connection, and not with every Load."""
    engines = two_pairs()
    for number, name in enumerate(engines):
        engines[name].pid = number
    engines["p2"].facts = {"model": "another"}
    stack = await start(engines, timings=TIMINGS)
    await stack.until(lambda: stack["d1"].named_sources == [("memory-source-0",)] == stack["d2"].named_sources)
    engines["p2"].facts = engines["p1"].facts
    engines["p2"].die()
    engines["p2"].revive()
    await stack.until(lambda: stack["d1"].named_sources[1:] == [("memory-source-0", "memory-source-1")])
    assert stack["p1"].named_sources == []
