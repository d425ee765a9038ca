"""The leader's books: one physical state per record, a multiset of holders, a generation per life.

FREE -> LIVE (reserve) -> FILLING (begin_fill) -> LIVE (commit) -> FREE (last holder dropped). A record that is FILLING
becomes free only once its handles are terminal (`end_fill`), a STRANDED one only after the fence. A record whose bytes
changed by themselves goes to QUARANTINED instead of FREE and stays there: its memory may be bad.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from sluice_engine.errors import LedgerError
from sluice_engine.step import RecordRef
from sluice_records import PoolPlan, RecordKind


class RecordState(IntEnum):
    FREE = 0
    FILLING = 1
    LIVE = 2
    STRANDED = 3
    QUARANTINED = 4


class HolderKind(StrEnum):
    SEQUENCE = "sequence"
    CACHE = "cache"
    LEASE = "lease"
    TIER = "tier"


class Holder(NamedTuple):
    """What keeps a record alive. `id` is the sequence's or lease's number; 0 for the prefix cache."""

    kind: HolderKind
    id: int


CACHE = Holder(HolderKind.CACHE, 0)


class Seal(NamedTuple):
    """What the trailer of a closed record must say: its identity and the tokens that it covers."""

    identity: bytes
    valid_tokens: int


@dataclass(slots=True)
class _Entry:
    state: RecordState = RecordState.FREE
    generation: int = 0
    closed: bool = False
    seal: Seal | None = None
    is_bad: bool = False
    # Whether ranks were told of this life; one that they never heard of ends without a word too.
    announced: bool = False
    holders: list[Holder] | None = None


@dataclass(frozen=True, slots=True)
class PoolCount:
    """Records of one pool by physical state."""

    free: int
    filling: int
    live: int
    stranded: int
    quarantined: int = 0

    @property
    def total(self) -> int:
        return self.free + self.filling + self.live + self.stranded + self.quarantined


class Ledger:
    """Allocation is deterministic: the record that has been free for longest comes first."""

    def __init__(self, plan: PoolPlan) -> None:
        self._entries = {kind: [_Entry() for _ in range(plan[kind])] for kind in RecordKind}
        self._free = {kind: deque(range(plan[kind])) for kind in RecordKind}
        self._stranded = Counter[RecordKind]()
        self._filling = Counter[RecordKind]()
        self._quarantined = Counter[RecordKind]()
        # Lives that ended since `take_released`, of those ranks know about.
        self._released: list[RecordRef] = []

    # -- questions -------------------------------------------------------------------------------------------------

    def num_free(self, kind: RecordKind) -> int:
        return len(self._free[kind])

    def count(self, kind: RecordKind) -> PoolCount:
        total, free = len(self._entries[kind]), len(self._free[kind])
        filling, stranded, bad = self._filling[kind], self._stranded[kind], self._quarantined[kind]
        return PoolCount(free, filling, total - free - filling - stranded - bad, stranded, bad)

    def ref(self, kind: RecordKind, record: int) -> RecordRef:
        return RecordRef(kind, record, self._entries[kind][record].generation)

    def state(self, ref: RecordRef) -> RecordState:
        return self._entry(ref).state

    def are(self, refs: Iterable[RecordRef], state: RecordState) -> bool:
        """Whether each of them is in this state."""
        return all(self._entry(ref).state is state for ref in refs)

    def is_closed(self, ref: RecordRef) -> bool:
        return self._entry(ref).closed

    def seal(self, ref: RecordRef) -> Seal | None:
        """Of a record that is LIVE and closed in this very generation, and not known to be bad; None of any other."""
        entry = self._entries[ref.kind][ref.record]
        is_sealed = entry.generation == ref.generation and entry.closed and entry.state is RecordState.LIVE
        return entry.seal if is_sealed and not entry.is_bad else None

    def filling(self, ref: RecordRef) -> Seal | None:
        """Of what this record is being filled with; None if it is not being filled in this generation."""
        entry = self._entries[ref.kind][ref.record]
        is_filling = entry.generation == ref.generation and entry.state is RecordState.FILLING
        return entry.seal if is_filling else None

    def sealed_from(self, kind: RecordKind, start: int, looks: int) -> Iterator[tuple[RecordRef, Seal]]:
        """Closed LIVE records among the `looks` records from number `start` on."""
        for record in range(start, min(start + looks, len(self._entries[kind]))):
            entry = self._entries[kind][record]
            if entry.closed and entry.seal is not None and entry.state is RecordState.LIVE and not entry.is_bad:
                yield RecordRef(kind, record, entry.generation), entry.seal

    def holders(self, ref: RecordRef) -> tuple[Holder, ...]:
        return tuple(sorted(self._entry(ref).holders or ()))

    # -- lives -----------------------------------------------------------------------------------------------------

    def reserve(self, kind: RecordKind, holder: Holder) -> RecordRef:
        """A record leaves FREE. Raises LedgerError when there is none: ask `num_free` first."""
        (ref,) = self.reserve_all(kind, holder, 1)
        return ref

    def reserve_all(self, kind: RecordKind, holder: Holder, count: int, *, announce: bool = False) -> list[RecordRef]:
        """`count` of them, as `reserve`. `announce`: ranks will hear of these lives in the step that is being planned;
        of others they do when a fill begins."""
        free, entries, live = self._free[kind], self._entries[kind], RecordState.LIVE
        if len(free) < count:
            raise LedgerError(f"no {count} free {kind.value} records for {holder}")
        refs = []
        for _ in range(count):
            record = free.popleft()
            entry = entries[record]
            entry.state, entry.closed, entry.announced, entry.holders = live, False, announce, [holder]
            entry.seal = None
            entry.generation += 1
            refs.append(RecordRef(kind, record, entry.generation))
        return refs

    def hold(self, ref: RecordRef, holder: Holder) -> None:
        self.hold_all((ref,), holder)

    def hold_all(self, refs: Iterable[RecordRef], holder: Holder) -> None:
        """One reference more to each of them."""
        for ref in refs:
            entry = self._entry(ref)
            if entry.holders is None or entry.state is RecordState.FREE:
                raise LedgerError(f"{holder} cannot hold {ref}: it is free")
            entry.holders.append(holder)

    def drop(self, ref: RecordRef, holder: Holder) -> None:
        """One reference less. The last one of a LIVE record frees it; a FILLING one waits for `end_fill`."""
        self.drop_all((ref,), holder)

    def drop_all(self, refs: Iterable[RecordRef], holder: Holder) -> None:
        """One reference less to each of them."""
        live = RecordState.LIVE
        for ref in refs:
            entry = self._entry(ref)
            if entry.holders is None or holder not in entry.holders:
                raise LedgerError(f"{holder} does not hold {ref}; {entry.holders} do")
            entry.holders.remove(holder)
            if not entry.holders and entry.state is live:
                self._to_free(ref, entry)

    def close_all(self, refs: Iterable[RecordRef], seals: Iterable[Seal]) -> None:
        for ref, seal in zip(refs, seals, strict=True):
            entry = self._expect(ref, RecordState.LIVE)
            entry.closed, entry.seal = True, seal

    def reopen(self, ref: RecordRef) -> None:
        entry = self._expect(ref, RecordState.LIVE)
        entry.closed, entry.seal = False, None

    def quarantine(self, kind: RecordKind, record: int) -> None:
        """Its memory does not keep what was written: it is QUARANTINED now, or, whatever generation lives there by now,
        when its last holder drops it."""
        entry = self._entries[kind][record]
        if entry.state is RecordState.FREE:
            self._free[kind].remove(record)
            entry.state = RecordState.QUARANTINED
            self._quarantined[kind] += 1
        entry.is_bad = True

    # -- pulls and loads -------------------------------------------------------------------------------------------

    def begin_fill(self, ref: RecordRef, seal: Seal) -> None:
        """A pull or load into it is authorised from now on; ranks hear of it in the step that is being planned.
        `seal`: of what will be there."""
        entry = self._expect(ref, RecordState.LIVE)
        entry.state, entry.announced, entry.seal = RecordState.FILLING, True, seal
        self._filling[ref.kind] += 1

    def commit(self, ref: RecordRef) -> None:
        """Its handles are terminal and the bytes verified: LIVE and closed."""
        entry = self._expect(ref, RecordState.FILLING)
        entry.state, entry.closed = RecordState.LIVE, True
        self._filling[ref.kind] -= 1
        if not entry.holders:
            self._to_free(ref, entry)

    def end_fill(self, ref: RecordRef) -> None:
        """Its handles are terminal, the bytes are worth nothing: the holder drops it, or has done so."""
        entry = self._expect(ref, RecordState.FILLING)
        entry.state = RecordState.LIVE
        self._filling[ref.kind] -= 1
        if not entry.holders:
            self._to_free(ref, entry)

    def strand(self, ref: RecordRef) -> None:
        """A handle will not become terminal: nothing but the fence brings the record back."""
        entry = self._expect(ref, RecordState.FILLING)
        entry.state = RecordState.STRANDED
        self._filling[ref.kind] -= 1
        self._stranded[ref.kind] += 1

    def unstrand(self, ref: RecordRef) -> None:
        """Nothing can land in it any more, the transport says."""
        entry = self._expect(ref, RecordState.STRANDED)
        self._stranded[ref.kind] -= 1
        entry.state = RecordState.LIVE
        if not entry.holders:
            self._to_free(ref, entry)

    def fence(self) -> tuple[RecordRef, ...]:
        """The transport is dead and nothing can land any more: every STRANDED record ends its life."""
        stranded = tuple(
            RecordRef(kind, record, entry.generation)
            for kind, entries in self._entries.items()
            for record, entry in enumerate(entries)
            if entry.state is RecordState.STRANDED
        )
        for ref in stranded:
            self.unstrand(ref)
        return stranded

    def take_released(self) -> tuple[RecordRef, ...]:
        """Announced lives that ended since the last call, in the order they ended."""
        released, self._released = tuple(self._released), []
        return released

    # -- integrity -------------------------------------------------------------------------------------------------

    def check_integrity(self, references: Iterable[tuple[Holder, RecordRef]]) -> None:
        """Raise LedgerError unless states add up and `references` (all that living holders have) are exactly the
        holders on the books. It looks at every record, and nothing else runs meanwhile: one comparison for a free one.
        """
        told: dict[RecordRef, list[Holder]] = {}
        for holder, ref in references:
            told.setdefault(ref, []).append(holder)
        differing: list[tuple[RecordRef, list[Holder], list[Holder]]] = []
        unused = RecordState.FREE
        for kind, entries in self._entries.items():
            free = set(self._free[kind])
            if len(free) != len(self._free[kind]):
                raise LedgerError(f"{kind.value}: a record is in the free list twice")
            by_state = [0] * len(RecordState)
            for record, entry in enumerate(entries):
                if entry.state is unused and record in free and not entry.holders:
                    continue
                by_state[entry.state] += 1
                self._check_entry(kind, record, entry, record in free)
                if entry.holders:
                    ref = RecordRef(kind, record, entry.generation)
                    holders = told.pop(ref, [])
                    if holders != entry.holders and sorted(holders) != sorted(entry.holders):
                        differing.append((ref, entry.holders, holders))
            by_state[RecordState.FREE] = len(entries) - sum(by_state)
            counted = [by_state[state] for state in RecordState if state is not RecordState.LIVE]
            if counted != [len(free), self._filling[kind], self._stranded[kind], self._quarantined[kind]]:
                states = dict(zip(RecordState, by_state, strict=True))
                raise LedgerError(f"{kind.value}: states {states} do not add up to {self.count(kind)}")
        differing += [(ref, [], holders) for ref, holders in told.items()]
        if differing:
            on_books = Counter((ref, holder) for ref, booked, _ in differing for holder in booked)
            heard = Counter((ref, holder) for ref, _, holders in differing for holder in holders)
            missing, surplus = on_books - heard, heard - on_books
            raise LedgerError(f"holders differ: on the books only {dict(missing)}, told only {dict(surplus)}")

    # -- inside ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _check_entry(kind: RecordKind, record: int, entry: _Entry, is_listed: bool) -> None:
        state, held = entry.state, bool(entry.holders)
        if (state is RecordState.FREE) != is_listed:
            raise LedgerError(f"{kind.value} record {record} is {state.name} and free-listed: {is_listed}")
        if state is RecordState.LIVE and not held:
            raise LedgerError(f"{kind.value} record {record} is LIVE and has no holder")
        if state in (RecordState.FREE, RecordState.QUARANTINED) and held:
            raise LedgerError(f"{kind.value} record {record} is {state.name} and held by {entry.holders}")

    def _entry(self, ref: RecordRef) -> _Entry:
        entry = self._entries[ref.kind][ref.record]
        if entry.generation != ref.generation:
            raise LedgerError(f"{ref} is stale: generation {entry.generation} lives there now")
        return entry

    def _expect(self, ref: RecordRef, state: RecordState) -> _Entry:
        entry = self._entries[ref.kind][ref.record]
        if entry.generation != ref.generation:
            entry = self._entry(ref)  # raises, and says which life is there now
        if entry.state is not state:
            raise LedgerError(f"{ref} is {entry.state.name}, not {state.name}")
        return entry

    def _to_free(self, ref: RecordRef, entry: _Entry) -> None:
        entry.holders, entry.closed, entry.seal = None, False, None
        if entry.announced:
            self._released.append(ref)
        if entry.is_bad:
            entry.state = RecordState.QUARANTINED
            self._quarantined[ref.kind] += 1
        else:
            entry.state = RecordState.FREE
            self._free[ref.kind].append(ref.record)
