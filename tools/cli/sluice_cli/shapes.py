"""What a doctor takes for granted of documents that were written by a process that may have died of damaged memory, or
that somebody handed over. A document of another shape is left out, and that is said."""

from __future__ import annotations

from typing import Any

import msgspec

from sluice_engine.watched_rows import EngineMirror
from sluice_gateway.status.watched_rows import GATEWAY_MIRROR
from sluice_runtime.health.reading import Copy, Mirror


class Spec(msgspec.Struct):
    name: str = ""
    role: str = ""


class About(msgspec.Struct):
    """`arguments`: of a gateway, which has no spec."""

    spec: Spec | None = None


class Judged(msgspec.Struct):
    """As `Verdict.as_dict`."""

    verdict: str
    reason: str
    culprit: str
    doing: str
    age_s: float
    budget_s: float
    pending: int
    detail: str


class Books(msgspec.Struct):
    ledger: dict[str, dict[str, int]]
    sequences: dict[str, int]
    waiting: int
    oldest_waiting_s: float


class Transfers(msgspec.Struct):
    leases: int
    in_flight: int
    stranded: int
    pulls: list[dict[str, Any]] = []


class RoutedEngine(msgspec.Struct):
    role: str
    address: str
    trouble: str


class Gateway(msgspec.Struct):
    queued: int
    running: int
    engines: list[RoutedEngine]
    reason: str = ""


MIRRORS: dict[str, Any] = {
    EngineMirror.BOOKS: Books,
    EngineMirror.LEASES: list[dict[str, Any]],
    EngineMirror.TRANSFERS: Transfers,
    GATEWAY_MIRROR: Gateway,
}


def has_shape(value: Any, shape: Any) -> bool:
    try:
        msgspec.convert(value, shape)
    except (msgspec.ValidationError, OverflowError, RecursionError):
        return False
    return True


def read_mirrors(copy: Copy) -> tuple[dict[str, Mirror], list[str]]:
    """(those of a shape that we know, the names of the others). One that was never written is empty, not damaged."""
    found: dict[str, Mirror] = {}
    damaged = []
    for name, shape in MIRRORS.items():
        try:
            mirror = copy.mirror(name)
        except RecursionError:
            mirror = Mirror(0, ...)
        if mirror.value is not None and not has_shape(mirror.value, shape):
            damaged.append(str(name))
            mirror = Mirror(mirror.at_ns, None)
        found[name] = mirror
    return found, damaged
