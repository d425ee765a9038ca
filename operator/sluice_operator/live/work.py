"""Which ModelDeployments are to be looked at next: each once at a time, soon after news, later after failures."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

Key = tuple[str, str]  # namespace, name
# News comes in bursts: a Deployment's pods, one after the other.
SETTLE_S = 0.1
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0


@dataclass
class Work:
    """`add` may be called at any time from the loop's thread; `take` by any number of workers.

    A key that is told of while a worker has it comes again after `done`. `clock`: seconds.
    """

    clock: Callable[[], float]
    _due: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list)
    _running: dict[Key, float] = field(default_factory=dict)  # since when
    _failures: dict[Key, int] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: Key, delay: float = SETTLE_S) -> None:
        """No later than `delay` from now; what was due earlier stays so."""
        due = self.clock() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._numbers), key))
            self._news.set()

    async def take(self) -> Key:
        """The next one that is due and that no worker has; `done` must follow."""
        while True:
            key, wait = self._next()
            if key is not None:
                self._running[key] = self.clock()
                del self._due[key]
                return key
            self._news.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                pass

    def done(self, key: Key, again_s: float | None) -> None:
        """It went well; `again_s`: look again then, whatever happens. None: only on news."""
        self._running.pop(key, None)
        self._failures.pop(key, None)
        if again_s is not None:
            self.add(key, again_s)
        self._news.set()

    def failed(self, key: Key) -> None:
        """Again after a second, then two, then four, ..."""
        self._running.pop(key, None)
        count = self._failures[key] = self._failures.get(key, 0) + 1
        # What news has made due meanwhile waits as well: it would fail the same way.
        self._due.pop(key, None)
        self.add(key, min(FIRST_RETRY_S * 2 ** (count - 1), LAST_RETRY_S))
        self._news.set()

    @property
    def depth(self) -> int:
        """Keys that wait, due or not, and those that workers have."""
        return len(self._due) + len(self._running)

    @property
    def longest_running(self) -> tuple[Key | None, float]:
        """Which key a worker has had longest, and for how many seconds; (None, 0.0) when nobody works."""
        key = min(self._running, key=self._running.__getitem__, default=None)
        return key, 0.0 if key is None else self.clock() - self._running[key]

    @property
    def lateness(self) -> float:
        """Seconds that the oldest key has been due without a worker to take it; 0.0 when none is."""
        waiting = [due for key, due in self._due.items() if key not in self._running]
        return max(0.0, self.clock() - min(waiting)) if waiting else 0.0

    def _next(self) -> tuple[Key | None, float | None]:
        """(a key, None), or (None, seconds to wait; None: for news)."""
        held: list[tuple[float, int, Key]] = []
        try:
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)  # told of again, or failed, since
                elif due > self.clock():
                    return None, due - self.clock()
                else:
                    entry = heapq.heappop(self._heap)
                    if key not in self._running:
                        return key, None
                    held.append(entry)
            return None, None
        finally:
            for entry in held:
                heapq.heappush(self._heap, entry)
