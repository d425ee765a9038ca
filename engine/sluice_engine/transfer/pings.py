"""Pings of sources that are on their way: one a source, polled to the end like any other READ. No clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.transfer.contract import PENDING, Failure, Handle, Outcome, Transfer
from sluice_engine.transfer.errors import PeerLost
from sluice_engine.transfer.messages import Pinged

# For one small record.
PING_S = 1.5
POLL_S = 2e-3


@dataclass(slots=True)
class _Flight:
    handle: Handle
    deadline: float
    is_reported: bool = False


class Pings:
    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._flights: dict[str, _Flight] = {}
        self._events: list[Pinged] = []

    def start(self, peer: str, now: float) -> None:
        """One that still has a handle in flight has failed: no second one is posted beside it."""
        if peer in self._flights:
            self._events.append(Pinged(peer, "Deadline", "a READ of one record that was posted before is not done"))
            return
        try:
            handle = self._transfer.ping(peer)
        except PeerLost as error:
            self._events.append(Pinged(peer, error.reason, str(error)))
            return
        if handle is None:
            self._events.append(Pinged(peer))
        else:
            self._flights[peer] = _Flight(handle, now + PING_S)

    def tick(self, now: float) -> list[Pinged]:
        """What has ended since the last call, and what takes too long."""
        for peer, flight in list(self._flights.items()):
            outcome = self._transfer.poll(flight.handle)
            if outcome is not PENDING:
                self._transfer.release(flight.handle)
                del self._flights[peer]
                self._report(peer, flight, outcome)
            elif now >= flight.deadline:
                self._report(peer, flight, Failure("Deadline", f"a READ of one record is not done after {PING_S} s"))
        events, self._events = self._events, []
        return events

    def idle_for(self) -> float | None:
        """Seconds until the next look; None: nothing is in flight or to be told."""
        return 0.0 if self._events else POLL_S if self._flights else None

    def _report(self, peer: str, flight: _Flight, outcome: Outcome) -> None:
        if flight.is_reported:
            return
        flight.is_reported = True
        failed = outcome if isinstance(outcome, Failure) else None
        self._events.append(Pinged(peer, failed.reason, failed.detail) if failed else Pinged(peer))
