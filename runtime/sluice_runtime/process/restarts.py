"""A child whose death its service survives: it is started again, unless that helps no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sluice_runtime.health.guard import Guard
from sluice_runtime.process.children import ChildDied, Children
from sluice_runtime.process.processes import say


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """`most` deaths within `window_s` are a death of the service, for `reason`. `final`: exit statuses after which no
    restart helps; the child has said why."""

    most: int
    window_s: float
    reason: str
    final: frozenset[int]


class DeathWindow:
    """How often a child has died lately. Knows no clock."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: list[float] = []

    def died(self, now_s: float) -> int:
        """Deaths within the window, this one included."""
        self._deaths = [at for at in self._deaths if now_s - at < self._policy.window_s] + [now_s]
        return len(self._deaths)

    @property
    def is_full(self) -> bool:
        return len(self._deaths) >= self._policy.most


async def keep(
    children: Children,
    guard: Guard,
    name: str,
    start: Callable[[], Awaitable[object]],
    policy: RestartPolicy,
    is_over: Callable[[int], Awaitable[bool]],
) -> None:
    """Until `is_over` says, of an exit status, that the child is not needed any more. `start` starts it in `children`
    by that name. Raises ChildDied for a death that the service does not survive."""
    deaths, clock = DeathWindow(policy), asyncio.get_running_loop().time
    while True:
        await start()
        process, last = children.get(name), dict[str, object]()
        assert process is not None, f"{name} was started"
        async for last in children.events(name):
            say(name, **{f"{name}_{key}": value for key, value in last.items()})
        status = await process.wait()
        if await is_over(status):
            return
        if status in policy.final:
            raise ChildDied(name, status, str(last.get("reason")), str(last.get("detail")))
        guard.forget(name)
        guard.event(f"{name} died with {status}; it is started again")
        count = deaths.died(clock())
        say(f"{name}-died", status=status, deaths=count)
        if deaths.is_full:
            raise ChildDied(name, status, policy.reason, f"{count} times within {policy.window_s:.0f} s")
