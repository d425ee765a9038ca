"""Named places where a fault can be injected. Inert, one comparison each, unless a package outside the product is
installed *and* an engine's spec asks for it: a production build has none, and refuses such a spec."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from typing import Protocol

from sluice_engine.errors import SpecError

GROUP = "sluice.faults"

POINTS = {
    "leader.turn": "a callback of the leader's loop outside the plan",
    "leader.plan": "inside `plan`",
    "leader.admit": "sequences that wait are about to be given their records (may be held back)",
    "leader.schedule": "a running sequence is about to get its share of a step (one may be held back)",
    "leader.kick": "another turn of the step loop is wanted (may be held back)",
    "leader.publish": "a step's tokens are about to go out",
    "leader.frame": "the encoded step record (may be changed; nothing is sent where nothing is left of it)",
    "lease.turn": "a turn of the lease thread's loop",
    "lease.message": "a message on a lease's stream, before it is understood",
    "lease.event": "a lease is about to act on an event (may stay there while its loop goes on)",
    "rank.load": "before the model is built",
    "rank.progress": "some more of the weights has been read (a real model's only)",
    "rank.receive": "a step record has come",
    "rank.device": "the model is about to run",
    "rank.report": "a result is about to go out",
    "sidecar.socket": "a turn of the sidecar's socket loop",
    "sidecar.poll": "a turn of the transfer poller",
    "sidecar.complete": "a READ has completed (may be held back)",
    "sidecar.verify": "a record is about to be verified",
    "gateway.turn": "a turn of the gateway's loop",
    "gateway.tokenize": "a prompt is about to be tokenised in the pool",
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
