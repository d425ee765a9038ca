"""A mass abort: sessions in every phase go away at the same moment, and then somebody asks something.

That was how both original wedges began. Measured is how long the one who asks waits for the first token, and whether
everything that a session holds goes back: leases, sequences, records, threads, file descriptors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sluice_faults import Action, Order, place, withdraw
from sluice_harness.chat import Chat
from sluice_harness.phases import fresh_prompt
from sluice_harness.prober import Probing
from sluice_harness.profiles import Profile
from sluice_harness.service import Service
from sluice_harness.stack import Stack
from sluice_launch.process import eventually

GOAL_S = 0.3
UNLOADED = 20
LONG_PROMPT = "the whole history of the world, with all its wars " * 45
BACK_S = 60.0
# As gRPC names its timers' threads; the system keeps 15 characters.
GRPC_TIMER = "grpc_global_tim"


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process. `threads`: without gRPC's timers, of which it begins a second one when the first fires."""

    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token after the drop; `phases`: how many sessions were in which at that moment."""

    first_token_s: float
    phases: Mapping[str, int]


@dataclass
class Storm:
    """`grown`: processes that hold more than after the first round, which is not counted, and by how much."""

    unloaded_s: float
    rounds: list[Round] = field(default_factory=list)
    grown: dict[str, str] = field(default_factory=dict)

    @property
    def worst_s(self) -> float:
        return max(told.first_token_s for told in self.rounds)

    @property
    def median_s(self) -> float:
        return median(told.first_token_s for told in self.rounds)


def profile_for(sessions: int) -> Profile:
    """A quarter of the sessions finds no row."""
    spec: dict[str, Any] = {"max_running": sessions * 3 // 4, "chunk_tokens": 64}
    return Profile(("prefill", "decode"), {"token_cost_us": 100.0}, spec)


def run_storm(sessions: int, rounds: int, health: Mapping[str, Any]) -> Storm:
    """Raises Late: something did not come back, or did not come at all."""
    with Stack(profile_for(sessions), health, Probing()) as stack:
        settle(stack)
        storm = Storm(median(_first_token_s(stack) for _ in range(UNLOADED)))
        blow(stack, sessions)  # what is made once and kept (threads of a pool, channels) is made here
        settle(stack)
        baseline = usage_of(stack)
        for _ in range(rounds):
            storm.rounds.append(blow(stack, sessions))
            settle(stack)
            storm.grown = grown(baseline, stack)
        return storm


def blow(stack: Stack, sessions: int) -> Round:
    """One round: fill, drop, ask."""
    decode, prefill, quarter = stack.engine("decode"), stack.engine("prefill"), sessions // 4
    chats = [stack.chat(fresh_prompt("decode"), 4000) for _ in range(quarter)]
    eventually(lambda: decode.phase_count("decoding") >= quarter, "a quarter decodes")
    place(decode.faults, "sidecar.complete", Order(Action.HOLD))
    chats += [stack.chat(fresh_prompt("pull"), 4000) for _ in range(quarter)]
    eventually(lambda: decode.phase_count("pulling") >= quarter, "a quarter is pulled")
    chats += [stack.chat(fresh_prompt(LONG_PROMPT), 4000) for _ in range(sessions - 2 * quarter)]
    eventually(lambda: prefill.phase_count("prefilling") > 0, "prompts are prefilled")
    phases = _phases(decode, prefill, sessions)
    _drop_all(chats)
    withdraw(decode.faults, "sidecar.complete")
    told = Round(_first_token_s(stack), phases)
    for chat in chats:
        chat.wait(30.0)
    return told


def _phases(decode: Service, prefill: Service, sessions: int) -> dict[str, int]:
    there, reading = decode.inspect(), prefill.inspect()["sequences"]
    return {
        "queued": sessions - int(there["streams"]),
        "prefilling": int(reading.get("prefilling", 0)) + int(reading.get("waiting", 0)),
        "pulling": int(there["sequences"].get("pulling", 0)),
        "decoding": int(there["sequences"].get("decoding", 0)),
    }


def _drop_all(chats: Sequence[Chat]) -> None:
    """At once: each from a thread of its own, all let go together."""
    gate = threading.Barrier(len(chats))

    def drop(chat: Chat) -> None:
        gate.wait()
        chat.drop()

    threads = [threading.Thread(target=drop, args=(chat,)) for chat in chats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _first_token_s(stack: Stack) -> float:
    began = time.monotonic()
    chat = stack.chat(fresh_prompt("who is there?"), 2)
    chat.wait(60.0)
    if not chat.is_answered:
        raise AssertionError(f"the request after it: {chat.error or 'no answer'}")
    return chat.pieces[0][0] - began


def settle(stack: Stack) -> None:
    for engine in stack.engines.values():
        engine.settled()


def usage_of(stack: Stack) -> dict[str, Usage]:
    told: dict[str, int] = {}
    for service in stack.services.values():
        told |= {f"{service.name}.{name}": pid for name, pid in service.note_pids().items()}
        told[f"{service.name}.supervisor"] = service.process.pid
    return {name: _usage(pid) for name, pid in told.items()}


def _usage(pid: int) -> Usage:
    names = [_name_of(task) for task in Path(f"/proc/{pid}/task").iterdir()]
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Usage(sum(name != GRPC_TIMER for name in names), descriptors)


def _name_of(task: Path) -> str:
    """Empty for one that has just ended."""
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""


def grown(baseline: Mapping[str, Usage], stack: Stack) -> dict[str, str]:
    """What has not gone back within BACK_S."""
    told: dict[str, str] = {}

    def is_back() -> bool:
        told.clear()
        for name, now in usage_of(stack).items():
            before = baseline.get(name, now)
            if now.threads > before.threads or now.descriptors > before.descriptors:
                told[name] = f"{before} -> {now}"
        return not told

    deadline = time.monotonic() + BACK_S
    while not is_back() and time.monotonic() < deadline:
        time.sleep(0.2)
    return told
