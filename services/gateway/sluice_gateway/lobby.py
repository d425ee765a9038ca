"""Connections that wait for their clients' next request: in bounds, for they cost a descriptor each and ask nothing."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# From the connection's beginning, or from the first byte of a later request, to the end of its head.
HEAD_S = 20.0
# From an answer to the first byte of the next request, by uvicorn's timer; to the end of its head, whatever came first.
KEEP_ALIVE_S = 75
NEXT_S = KEEP_ALIVE_S + HEAD_S
# Not for clients: engines, logs, and what a process is born with.
RESERVED = 128
MOST_IDLE = 1024


class Guest(Protocol):
    def hang_up(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one server's connections. `most`: in all; whoever comes then is told so. `idle`: that ask nothing."""

    most: int
    idle: int


def bounds_of(descriptors: int) -> Bounds:
    """For a process that may hold so many files open: at its limit it hangs up on all who come, and nobody is told."""
    most = max(descriptors - RESERVED, descriptors // 2)
    return Bounds(most, min(MOST_IDLE, most // 2))


def own_bounds() -> Bounds:
    return bounds_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class Lobby:
    """Guests whose request has not come, the one who came first at the front. `clock`: seconds."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._clock = clock
        self._due: dict[Guest, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def enter(self, guest: Guest, within_s: float) -> None:
        """Behind all others. Who has been here longest makes room where there are too many."""
        self._due.pop(guest, None)
        if len(self._due) >= self._bounds.idle:
            self._show_out(next(iter(self._due)))
        self._due[guest] = self._clock() + within_s

    def leave(self, guest: Guest) -> None:
        self._due.pop(guest, None)

    def has_room(self, connections: int) -> bool:
        """For one more beside so many, after the one who has been here longest has made room if need be."""
        if connections < self._bounds.most:
            return True
        if not self._due:
            return False
        self._show_out(next(iter(self._due)))
        return True

    def sweep(self) -> None:
        """Once in a while: who has had his time."""
        now = self._clock()
        for guest in [guest for guest, due in self._due.items() if due <= now]:
            self._show_out(guest)

    def _show_out(self, guest: Guest) -> None:
        del self._due[guest]
        guest.hang_up()
