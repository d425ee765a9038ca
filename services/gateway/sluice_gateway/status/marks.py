"""What the gateway says of itself in the flight recorder. Everything here but the work in the pool is on its loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sluice_gateway.status.watched_rows import GATEWAY_GRPC, GATEWAY_LOOP, GATEWAY_MIRROR, TOKENIZER
from sluice_runtime import fault_points
from sluice_runtime.health.layout import IDENTITY, Phase
from sluice_runtime.health.recorder import Recorder, Row, unrecorded
from sluice_runtime.health.throughput import SURPRISE, follow

TURN_S = 0.25
MAX_MIRRORED, MAX_TROUBLE = 64, 200
# The least that is expected, and what is until one was measured: a budget should rather be too long.
NS_PER_CHARACTER = 10_000.0
T = TypeVar("T")


def _short(engines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What fits into a mirror of fixed size, whatever the fleet is."""
    return [{**engine, "trouble": str(engine["trouble"])[:MAX_TROUBLE]} for engine in engines[:MAX_MIRRORED]]


class GatewayMarks:
    """`recorder` None: there is no supervisor."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.loop = self._row(GATEWAY_LOOP.name)
        self.tokenizer = self._row(TOKENIZER.name)
        self.grpc = self._row(GATEWAY_GRPC.name)
        self._in_pool: dict[int, int] = {}  # number of a prompt, from 1 on -> its characters
        self._begun = 0
        self._ns_per_character = NS_PER_CHARACTER
        self._troubles: dict[str, str] = {}

    def _row(self, name: str) -> Row:
        return unrecorded(name) if self._recorder is None else self._recorder.row(name)

    def begin(self) -> None:
        self.loop.begin(Phase.SERVING)
        self.tokenizer.begin(Phase.IDLE)

    @property
    def are_read(self) -> bool:
        return self._recorder is not None

    def end(self, failed: str = "") -> None:
        """`failed`: what has ended without being asked to."""
        if failed:
            self.loop.doing(failed)
        self.loop.end(failed=bool(failed))
        self.tokenizer.end()

    def turn(self, placeable: int, dispatched: int, report: Callable[[], Mapping[str, Any]]) -> None:
        """`placeable`: choices that wait though there is a place for one. `dispatched`: how many got one so far."""
        fault_points.reach("gateway.turn")
        self.loop.tick()
        self.loop.progress(dispatched)
        self.loop.pending(placeable)
        if self._recorder is not None:
            told = report()
            self._tell_changes(self._recorder, told["engines"])
            self._recorder.mirror(GATEWAY_MIRROR, {**told, "engines": _short(told["engines"])})

    def identity(self, told: Mapping[str, Any]) -> None:
        """Whose certificate this gateway has, and until when."""
        if self._recorder is not None:
            self._recorder.mirror(IDENTITY, told)

    def _tell_changes(self, recorder: Recorder, engines: list[Mapping[str, Any]]) -> None:
        """One line per engine that came, went, or is in another trouble than before."""
        now = {f"{engine['role']} {engine['address']}": str(engine["trouble"]) for engine in engines}
        for name in now.keys() | self._troubles.keys():
            if name not in now:
                recorder.event(GATEWAY_MIRROR, f"{name}: left the fleet")
            elif now[name] != self._troubles.get(name):
                recorder.event(GATEWAY_MIRROR, f"{name}: {now[name] or 'usable'}")
        self._troubles = now

    async def tokenize(self, characters: int, work: Callable[[], T]) -> T:
        """Do it in the pool. What is pending stays so until a thread of the pool is done with it, also when the
        request does not wait for it any more."""
        number = self._begun = self._begun + 1
        self._in_pool[number] = characters
        self._say()

        def guarded() -> tuple[T, int]:
            began = time.monotonic_ns()
            fault_points.reach("gateway.tokenize")
            return work(), time.monotonic_ns() - began

        task = asyncio.get_running_loop().run_in_executor(None, guarded)
        task.add_done_callback(lambda done: self._tokenized_one(number, done))
        return (await asyncio.shield(task))[0]

    def _tokenized_one(self, number: int, done: asyncio.Future[tuple[T, int]]) -> None:
        characters = self._in_pool.pop(number)
        if not done.cancelled() and done.exception() is None:
            told = min(done.result()[1] / max(1, characters), SURPRISE * self._ns_per_character)
            self._ns_per_character = max(NS_PER_CHARACTER, follow(self._ns_per_character, told))
        self._say()

    def _say(self) -> None:
        row = self.tokenizer
        row.enter(Phase.ENCODING if self._in_pool else Phase.IDLE)
        characters = sum(self._in_pool.values())
        row.expect(int(self._ns_per_character * characters))
        row.doing(f"{len(self._in_pool)} prompts of {characters} characters" if self._in_pool else "")
        # The oldest that is not done: one that is stuck must not be hidden by others that move.
        row.progress(min(self._in_pool, default=self._begun + 1))
        row.pending(len(self._in_pool))
