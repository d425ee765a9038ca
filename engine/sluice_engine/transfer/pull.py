"""One lease's pull: what is queued, in flight, arrived, verified. Plain state; the puller moves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluice_engine.step import PullItem
from sluice_engine.transfer.contract import Handle
from sluice_engine.transfer.plan import PIECE_BYTES, Piece
from sluice_records import RecordKind

RecordAt = tuple[RecordKind, int]


@dataclass(frozen=True, slots=True)
class PullerSettings:
    """Seconds and bytes. A lease's deadline: `deadline_base_s`, plus what its source owes to all leases at `floor`
    speed, from the last time that something was added to it."""

    piece_bytes: int = PIECE_BYTES
    max_in_flight_per_peer: int = 8
    settle_s: float = 0.5
    deadline_base_s: float = 5.0
    floor_bytes_per_s: float = 16e6
    stranded_cap: float = 0.05
    fence_after_s: float = 1.0
    zombie_poll_s: float = 0.05


DEFAULTS = PullerSettings()


class PullState(StrEnum):
    RUN = "run"
    SETTLE = "settle"  # nothing more is posted; the handle in flight is given time to end
    ZOMBIE = "zombie"  # it did not: its records are stranded
    ENDED = "ended"


@dataclass(slots=True)
class Flight:
    handle: Handle
    piece: Piece

    @property
    def records(self) -> tuple[RecordAt, ...]:
        """Where it may still land."""
        return tuple((item.kind, item.destination) for item in self.piece.touches)


@dataclass(slots=True)
class Pull:
    lease_id: str
    peer: str
    serial: int
    deadline: float
    state: PullState = PullState.RUN
    queue: deque[Piece] = field(default_factory=deque)
    flight: Flight | None = None
    items: list[PullItem] = field(default_factory=list)
    # Records added and not verified yet.
    outstanding: int = 0
    done_records: int = 0
    done_bytes: int = 0
    settle_by: float = 0.0
    poll_at: float = 0.0
    forgotten: bool = False

    def take(self, items: Sequence[PullItem], pieces: Sequence[Piece]) -> None:
        self.items += items
        self.queue += pieces
        self.outstanding += len(items)

    @property
    def in_flight_records(self) -> tuple[RecordAt, ...]:
        return () if self.flight is None else self.flight.records

    @property
    def owed_bytes(self) -> int:
        """Queued or in flight."""
        return sum(piece.nbytes for piece in self.queue) + (self.flight.piece.nbytes if self.flight else 0)

    @property
    def can_post(self) -> bool:
        return self.state is PullState.RUN and self.flight is None and bool(self.queue)
