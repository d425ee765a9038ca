"""The lease thread (the field reports' bootstrap thread): a loop of its own, so that a commit never waits for a step.

Input can only end its own stream. If the loop itself ends, that is `LeaseThreadDead`: the process exits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from sluice_engine.errors import EngineError
from sluice_engine.leader.lease.at_hand import AtHand
from sluice_runtime import fault_points
from sluice_runtime.health.layout import Field, Phase
from sluice_runtime.health.recorder import Row

TICK_S = 0.5


class LeaseThreadDead(EngineError):
    """The loop that reads every lease stream has ended. Evidence, exit, restart of the service."""


class LeaseThread:
    """Owns the loop. It only reads `counters`, which are the leader's."""

    def __init__(
        self,
        leader_loop: asyncio.AbstractEventLoop,
        counters: Counter[str],
        on_death: Callable[[Exception], None],
        row: Row,
    ) -> None:
        self.counters = counters
        self.streams = 0  # that are open
        self.at_hand = AtHand()
        self._row = row
        self._leader_loop = leader_loop
        self._on_death = on_death
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """From any thread: run `function` on the lease loop, in order of the calls."""
        self._loop.call_soon_threadsafe(self._guard_own, function, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """From the leader's thread, at start and end only: run to its result on the lease loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def tell_leader(self, function: Callable[..., object], *args: object) -> None:
        """From the lease loop: run `function` on the leader's loop, in order of the calls."""
        self._leader_loop.call_soon_threadsafe(self._guard, function, *args)

    def _guard(self, function: Callable[..., object], *args: object) -> None:
        """An event loop would log a callback's error and go on without what it had to do: that is a death instead."""
        try:
            function(*args)
        except Exception as error:
            self._leader_loop.call_soon_threadsafe(self._on_death, error)

    def _guard_own(self, function: Callable[..., object], *args: object) -> None:
        """Of the lease loop itself: what it failed at is this thread's death, and its row says so."""
        try:
            function(*args)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """On the lease loop: something that must never end has ended."""
        self._row.doing(f"{type(error).__name__}: {error}")
        self._row.end(failed=True)
        self._leader_loop.call_soon_threadsafe(self._on_death, error)

    def _run(self) -> None:
        self._row.begin(Phase.SERVING)
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._guard_own, self._tick)
        try:
            self._loop.run_forever()
        finally:
            self._row.end(failed=True)
            self._leader_loop.call_soon_threadsafe(self._on_death, LeaseThreadDead("the lease loop ended"))

    def _tick(self) -> None:
        fault_points.reach("lease.turn")
        self._row.tick()
        self.at_hand.tell(self._row)
        self._row.count(Field.COUNT_A, self.counters["unknown_messages"])
        self._row.count(Field.COUNT_B, self.streams)
        self._loop.call_later(TICK_S, self._guard_own, self._tick)
