"""A real leader over real executors of the scripted model, in one process; a test says when a rank reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.server import TokenSink
from sluice_engine.pool import Pools, RecordPool
from sluice_engine.rank.executor import Executor
from sluice_engine.rank.host_store import HostStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.scripted import Script, ScriptedModel
from sluice_engine.spec import resolve
from sluice_engine.step import StepResult
from sluice_protocol.engine_spec import EngineSpec, ScriptedSpec
from sluice_protocol.generate import GenerateRequest, Refused, Role
from sluice_protocol.sampling import Sampling
from sluice_records import RecordKind


class HeldRank:
    """Executes what it is given at once and reports when it is told to. `on_send` hears of every step that arrives."""

    def __init__(self, leader: Leader, rank: int = 0, on_send: Callable[[int], None] = lambda number: None) -> None:
        self.rank = rank
        layouts, plan = leader.resolved.layouts, leader.resolved.pools
        self.pools: Pools = {
            kind: RecordPool(layouts[kind], plan[kind], np.zeros(plan[kind] * layouts[kind].stride, dtype=np.uint8))
            for kind in RecordKind
        }
        mirror = RecordMirror(plan)
        self._executor = Executor(
            rank, HostStore(rank, self.pools), mirror, ScriptedModel(Script(), self.pools, mirror)
        )
        self._leader, self._on_send = leader, on_send
        self.frames: list[bytes] = []
        self.held: list[StepResult] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.held.append(self._executor.execute(frame))
        self._on_send(len(self.frames) - 1)

    async def report(self) -> None:
        self._leader.on_result(self.held.pop(0))
        await turns()


class PromptRank(HeldRank):
    """Reports in a turn of its own."""

    def send(self, frame: bytes) -> None:
        super().send(frame)
        asyncio.get_running_loop().call_later(0, self._leader.on_result, self.held.pop(0))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def make_leader(
    tmp_path: Path,
    role: Role = Role.UNIFIED,
    *,
    marks: LeaderMarks | None = None,
    clock: Callable[[], float] = time.monotonic,
    **spec: Any,
) -> Leader:
    test = asyncio.current_task()
    assert test is not None

    def died(error: Exception) -> None:
        test.cancel(f"the leader died: {error!r}")

    told: dict[str, Any] = {"memory_bytes": 80_000, "max_running": 4} | spec  # nine pages
    built = EngineSpec(role=role, name="e", run_dir=str(tmp_path), scripted=ScriptedSpec(), **told)
    leader = Leader(built, resolve(built), "e.1", on_death=died, marks=marks, clock=clock)
    leader.attach("gw", TokenSink().put)
    return leader


def ask(leader: Leader, number: int, prompt: tuple[int, ...], max_tokens: int) -> Generation:
    generation = try_to_ask(leader, number, prompt, max_tokens)
    assert isinstance(generation, Generation)
    return generation


def try_to_ask(leader: Leader, number: int, prompt: tuple[int, ...], max_tokens: int) -> Generation | Refused:
    request = GenerateRequest(
        f"r{number}", "gw", prompt, (), Sampling(max_tokens=max_tokens), stream=number, source_address="there:1"
    )
    return leader.submit(request)
