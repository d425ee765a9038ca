"""Everything that decides, and what a plan is. Values and their invariants; `schedule.py` moves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sluice_engine.leader.scheduling.ledger import CACHE, Holder, Ledger
from sluice_engine.leader.scheduling.prefix import PrefixCache
from sluice_engine.leader.scheduling.sequence import Gone, Grant, Phase, Sequence
from sluice_engine.limits import Limits
from sluice_engine.step import RecordRef, StepRecord
from sluice_records import ChainKey, Layouts


@dataclass(slots=True)
class SchedulerState:
    """Everything that decides. `salt` starts the hash chain (the fingerprint's digest)."""

    limits: Limits
    layouts: Layouts
    salt: ChainKey
    ledger: Ledger
    cache: PrefixCache = field(default_factory=PrefixCache)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # ascending ids: first come, first served
    free_rows: list[int] = field(default_factory=list)
    rows_freed: list[int] = field(default_factory=list)  # ranks have not heard of it yet
    next_number: int = 0
    completed: int = -1
    stalled: bool = False  # the last plan had nothing to do, though something waits
    in_flight: dict[int, dict[int, int]] = field(default_factory=dict)  # step -> row -> sequence
    reused_pages: int = 0  # read again so far: every n-th is verified
    scrubbed: tuple[int, int] = (0, 0)  # where the scrubber goes on: (pool, record)

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.limits.max_running - 1, -1, -1))

    @property
    def can_run(self) -> bool:
        """Whether some sequence has something to compute."""
        if self.waiting:
            return True
        prefilling, decoding = Phase.PREFILLING, Phase.DECODING
        for sequence in self.sequences.values():
            phase = sequence.phase
            if phase is decoding:
                if not sequence.is_exhausted:
                    return True
            elif phase is prefilling:
                return True
        return False

    def sees(self, step: int) -> bool:
        """Whether the next plan, N, sees the result of that step: while something can run, of those up to N-2; when
        nothing can, or what waits has no place, of every step planned so far."""
        behind = self.next_number - step
        return behind > 1 or (behind == 1 and (self.stalled or not self.can_run))

    @property
    def has_work(self) -> bool:
        """Whether another plan is due now. A sequence that only waits for facts from outside is not work."""
        return bool(self.in_flight) or self.can_run or any(_is_reapable(s) for s in self.sequences.values())

    def references(self) -> Iterator[tuple[Holder, RecordRef]]:
        """Every reference that a living holder has: what the ledger must have on its books."""
        for sequence in self.sequences.values():
            for ref in sequence_records(sequence):
                yield sequence.holder, ref
            for ref in sequence.leased:
                yield sequence.lease_holder, ref
        for ref in self.cache.references():
            yield CACHE, ref

    def check_integrity(self) -> None:
        """Raises LedgerError when a byte is not accounted for."""
        self.ledger.check_integrity(self.references())


@dataclass(frozen=True, slots=True)
class Plan:
    """An empty record is not sent and has no number of its own.

    `rows`: row -> sequence of the rows that sample. `rooms`: (sequence, full pages held) whose lease may be opened.
    `cancelled`: rooms whose pulls must stop. `grants` wait for the step's result. `progressed`: another plan may find
    more to do even without a new fact. `tokens`: that go in, of all rows.
    """

    record: StepRecord
    rows: dict[int, int]
    grants: tuple[Grant, ...]
    rooms: tuple[tuple[int, int], ...]
    cancelled: tuple[int, ...]
    gone: tuple[Gone, ...]
    progressed: bool
    tokens: int


def _is_reapable(sequence: Sequence) -> bool:
    return sequence.phase is Phase.ENDING and sequence.handles_terminal


def sequence_records(sequence: Sequence) -> Iterator[RecordRef]:
    yield from sequence.pages
    if sequence.state is not None:
        yield sequence.state
    for _, ref in sequence.snapshots:
        yield ref
    yield from sequence.borrowed
