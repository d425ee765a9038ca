"""Who may write, as values: what a Lease says, and when a standby may take it. No clock, no API.

A leader trusts only its own clock: what it holds is as old as the moment *before* it asked for it. A standby trusts
only what it saw change: a lease that has stayed the same for its whole duration, by the standby's clock, is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A leader renews every `period` and ends itself when what it holds is `deadline` old; a standby waits for
    `duration`. `call`: the time-out of every API call. A write that began just before the deadline has ended before a
    standby may begin: deadline + call < duration. Raises ValueError otherwise."""

    duration: float = 20.0
    deadline: float = 10.0
    period: float = 2.0
    call: float = 8.0

    def __post_init__(self) -> None:
        if not (0 < self.period < self.deadline and self.deadline + self.call < self.duration):
            raise ValueError("lease: needs period < deadline and deadline + call < duration")


@dataclass(frozen=True, slots=True)
class Held:
    """What a Lease said when it was last read. `holder` empty: given back."""

    holder: str
    resource_version: str
    transitions: int


def read(lease: Mapping[str, Any]) -> Held:
    spec = lease.get("spec", {})
    version = lease["metadata"]["resourceVersion"]
    return Held(spec.get("holderIdentity") or "", version, int(spec.get("leaseTransitions") or 0))


@dataclass(frozen=True, slots=True)
class Sighting:
    """`since`: the standby's own clock when it first saw exactly this."""

    held: Held
    since: float


def look(last: Sighting | None, held: Held, now: float) -> Sighting:
    return last if last is not None and last.held == held else Sighting(held, now)


def may_take(seen: Sighting, identity: str, now: float, timing: Timing) -> bool:
    """One of the same identity was an earlier life of ours: it is over, or was never another's."""
    return not seen.held.holder or seen.held.holder == identity or now - seen.since >= timing.duration


def body(name: str, namespace: str, identity: str, held: Held | None, timing: Timing, wall: float) -> dict[str, Any]:
    """The Lease to write. `held` None: it does not exist yet. `wall`: seconds since the epoch, for people only."""
    is_new_holder = held is None or held.holder != identity
    moment = datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    meta = {"name": name, "namespace": namespace}
    if held is not None:
        meta["resourceVersion"] = held.resource_version
    spec = {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(timing.duration),
        "renewTime": moment,
        "leaseTransitions": 0 if held is None else held.transitions + is_new_holder,
    }
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
