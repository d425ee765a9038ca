"""Two pairs, one engine of which freezes: when does the gateway stop going there, and how long do its clients wait?"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sluice_faults import Action, Order, place, reached
from sluice_harness.chat import Chat
from sluice_harness.client import get
from sluice_harness.phases import fresh_prompt
from sluice_harness.profiles import PROFILES
from sluice_harness.runner import Scale, revive
from sluice_harness.service import Service
from sluice_harness.stack import Stack
from sluice_launch.process import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
# Long enough that the verdict cannot be what moves the clients of a silent leader.
FLOOR_S = 12.0
STOP_ROUTING_S, GAP_S = 3.0, 3.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(PROFILES["two-pairs"], Scale.of(FLOOR_S).health, Scale.of(FLOOR_S).probing) as running:
        addresses = {engine.address for engine in running.engines.values()}
        eventually(lambda: told_of(running).keys() >= addresses, "the gateway's supervisor has seen its engines")
        yield running


def answers_on_both(stack: Stack) -> list[Chat]:
    """Streams, some of them on each decode engine."""
    decodes = [engine for engine in stack.engines.values() if engine.role == "decode"]
    chats = [stack.chat(fresh_prompt("count"), 1000) for _ in range(6)]
    eventually(lambda: all(decode.phase_count("decoding") for decode in decodes), "both decode")
    eventually(lambda: all(len(chat.pieces) > 3 for chat in chats), "all answers stream")
    return chats


def told_of(stack: Stack) -> dict[str, str]:
    """What the gateway says against sending anything to an engine, by address, as its supervisor last read it: for its
    first look that can be before it knew any."""
    assert stack.gateway is not None
    told = get(stack.gateway.probes, "/status")[1]["gateway"] or {"engines": []}
    return {engine["address"]: engine["trouble"] for engine in told["engines"]}


def trouble_of(stack: Stack, engine: Service) -> str:
    return told_of(stack)[engine.address]


def finish(stack: Stack, chats: list[Chat]) -> float:
    """All are answered whole: the longest pause that one of them saw."""
    for chat in chats:
        chat.wait()
        assert chat.is_answered, chat.error
        assert len(chat.text) == chat.max_tokens
    return max(chat.longest_pause_s for chat in chats)


def heal(stack: Stack, victim: Service) -> None:
    """It ends by itself, for its fault stays until then."""
    victim.process.wait(60.0)
    for path in victim.faults.glob("*.json"):
        path.unlink()
    revive(stack)
    for engine in stack.engines.values():
        engine.settled()


def test_clients_of_a_leader_that_is_stuck_go_elsewhere_before_any_verdict(stack, record_property):
    chats, victim = answers_on_both(stack), stack.engines["decode-0"]
    place(victim.faults, "leader.plan", Order(Action.BLOCK))
    eventually(lambda: reached(victim.faults, "leader.plan"), "its leader is stuck")
    stuck_at = time.monotonic()
    eventually(lambda: trouble_of(stack, victim), "the gateway stops going there")
    routed_s = time.monotonic() - stuck_at
    gap_s = finish(stack, chats)
    heal(stack, victim)
    record_property("stops_routing_s", round(routed_s, 2))
    record_property("gap_s", round(gap_s, 2))
    print(f"stuck leader: no new work after {routed_s:.2f} s, longest pause of a client {gap_s:.2f} s")
    assert routed_s < STOP_ROUTING_S + 2.0
    assert gap_s < FLOOR_S


def test_clients_of_a_rank_that_is_stuck_wait_for_the_verdict_and_not_for_the_end(stack, record_property):
    """The leader answers, so the verdict is the first word. The evidence then takes its time, longer than they wait."""
    chats, victim = answers_on_both(stack), stack.engines["decode-1"]
    place(victim.faults, "supervisor.evidence", Order(Action.SLEEP, seconds=9.0))
    place(victim.faults, "rank.device", Order(Action.BLOCK))
    incident = eventually(lambda: victim.process.seen("incident"), "the verdict", FLOOR_S + 30.0)
    eventually(lambda: trouble_of(stack, victim), "the gateway stops going there")
    routed_s = time.monotonic() - incident.at
    gap_s = finish(stack, chats)
    heal(stack, victim)
    record_property("stops_routing_s", round(routed_s, 2))
    print(f"stuck rank: no new work {routed_s:.2f} s after the verdict, longest pause {gap_s:.2f} s of {FLOOR_S:.0f}")
    assert routed_s < STOP_ROUTING_S
    assert gap_s < FLOOR_S + GAP_S + 5.0
