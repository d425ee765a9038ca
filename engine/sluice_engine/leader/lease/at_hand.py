"""What leases are at just now: one stream that hangs while the loop turns is a wedge that no tick shows."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from sluice_runtime.health.recorder import Row

T = TypeVar("T")


class AtHand:
    """The events that some lease is at, oldest first. All of it belongs to the lease loop."""

    def __init__(self) -> None:
        self._next = 1
        self._held: dict[int, str] = {}

    def take(self, doing: str) -> int:
        """A ticket, higher than all before it."""
        ticket, self._next = self._next, self._next + 1
        self._held[ticket] = doing
        return ticket

    def put_down(self, ticket: int) -> None:
        self._held.pop(ticket, None)

    def tell(self, row: Row) -> None:
        """Progress is the oldest ticket held: it stands while that one stays, whatever the others do."""
        oldest = next(iter(self._held), self._next)
        row.progress(oldest)
        row.pending(len(self._held))
        row.doing(self._held.get(oldest, ""))


class Hand:
    """One lease's: at most one event is in it."""

    def __init__(self, all_leases: AtHand) -> None:
        self._all = all_leases
        self._ticket = 0
        self._doing = ""

    def take(self, doing: str) -> None:
        self._doing, self._ticket = doing, self._all.take(doing)

    def put_down(self) -> None:
        self._all.put_down(self._ticket)
        self._ticket = 0

    async def for_peer(self, waiting: Awaitable[T]) -> T:
        """Waiting for a peer is not ours to be judged for: whatever is in hand is put down meanwhile."""
        held = self._ticket
        self.put_down()
        try:
            return await waiting
        finally:
            if held:
                self.take(self._doing)
