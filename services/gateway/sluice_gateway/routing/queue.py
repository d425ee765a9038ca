"""The one queue, as decisions: which request enters, which is too late, which goes where next. Pure; time is an
argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice_gateway.routing.fleet import Engine, Pair
from sluice_gateway.routing.route import BlockKeys, NoRoute, Wanted, choose_pair


@dataclass(frozen=True, slots=True)
class Waiting:
    """A try that waits for a place. `order` is its choice's place in the order of arrival, which a retry keeps.

    It is not dispatched before `not_before` and not from `deadline` on, and before `calm_at` only to a pair without the
    `blamed` addresses: the pause after a fault is for the engine at fault.
    """

    order: int
    deadline: float
    wanted: Wanted
    not_before: float = 0.0
    calm_at: float = 0.0
    blamed: frozenset[str] = frozenset()

    def pauses(self, pair: Pair, now: float) -> bool:
        return now < self.calm_at and not self.blamed.isdisjoint(pair.addresses)


@dataclass(frozen=True, slots=True)
class Dispatch:
    waiting: Waiting
    pair: Pair


@dataclass(frozen=True, slots=True)
class Idle:
    """No entry can go now. `wake_at` is when time alone may change that; `reason` is what the head of the queue
    lacks."""

    wake_at: float | None
    reason: NoRoute | None = None


def fits(queued: int, arriving: int, limit: int) -> bool:
    """Whether `arriving` new tries may enter. All of a request's choices enter, or none."""
    return queued + arriving <= limit


def may_wait(usable_at: float | None, now: float, outage_s: float) -> bool:
    """Whether a new request waits for a fleet without a usable pair. `usable_at`: when it last had one, if ever."""
    return usable_at is not None and now - usable_at <= outage_s


def expired(waiting: Iterable[Waiting], now: float) -> list[Waiting]:
    return [entry for entry in waiting if entry.deadline <= now]


def next_dispatch(
    waiting: Sequence[Waiting], engines: Sequence[Engine], now: float, seed: int, block_keys: BlockKeys
) -> Dispatch | Idle:
    """The first in order of arrival that can go.

    An entry passes another one only if that one could not use its place: its time did not come, it pauses, or its model
    is not there or full. `waiting` is sorted by `order`; entries past their deadline must be gone.
    """
    reason: NoRoute | None = None
    for entry in waiting:
        if entry.not_before > now:
            continue
        choice = choose_pair(entry.wanted, engines, seed, block_keys)
        if isinstance(choice, Pair):
            if entry.pauses(choice, now):
                continue
            return Dispatch(entry, choice)
        reason = reason or choice
        if entry.wanted.fingerprint is None:
            break
    return Idle(wake_at(waiting, now), reason)


def wake_at(waiting: Iterable[Waiting], now: float) -> float | None:
    """The next moment at which an entry expires or becomes ready."""
    times = [t for entry in waiting for t in (entry.deadline, entry.not_before, entry.calm_at) if t > now]
    return min(times, default=None)
