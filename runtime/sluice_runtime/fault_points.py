"""Named places where a fault can be injected. Inert, one comparison each, unless a package outside the product is
installed *and* the spec of a service asks for it: a production build has none, and refuses such a spec."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from typing import Protocol

from sluice_runtime.errors import SpecError

GROUP = "sluice.faults"

# Each service has points of its own beside these.
SUPERVISOR_POINTS = {
    "supervisor.turn": "a turn of the supervisor's watch",
    "supervisor.evidence": "a bundle is about to be written",
}


class Faults(Protocol):
    """What the entry point `arm` of a fault package returns. Any of these may block, raise or end the thread."""

    def reach(self, point: str) -> None: ...

    def change(self, point: str, data: bytes) -> bytes: ...

    def holds(self, point: str) -> bool: ...

    def holds_one(self, point: str, which: int) -> bool: ...


_armed: Faults | None = None


def arm(directory: str) -> None:
    """Take orders from files in `directory`. Raises SpecError where no fault package is installed."""
    global _armed
    found = list(entry_points(group=GROUP))
    if not found:
        raise SpecError(
            "faults is set, but this build has no fault injection: install sluice-faults, or leave it empty"
        )
    _armed = found[0].load()(directory)


def reach(point: str) -> None:
    if _armed is not None:
        _armed.reach(point)


def change(point: str, data: bytes) -> bytes:
    return data if _armed is None else _armed.change(point, data)


def holds(point: str) -> bool:
    return _armed is not None and _armed.holds(point)


def holds_one(point: str, which: int) -> bool:
    """Of many that come by again and again, one alone is held back, and always the same."""
    return _armed is not None and _armed.holds_one(point, which)


async def stay(point: str) -> None:
    """For a task: held here until it is cancelled, while its loop turns."""
    if _armed is not None and _armed.holds(point):
        await asyncio.get_running_loop().create_future()
