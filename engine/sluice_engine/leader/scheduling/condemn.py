"""What must go when the bytes of a closed record have changed: it, what was computed from it, and its readers.

A digest proves bytes, not what they were computed from. So every page and snapshot below a bad one leaves the prefix
cache as well, and every sequence that has any of them is ended. Reads, never changes: `schedule.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sluice_engine.leader.scheduling.sequence import Phase, Sequence
from sluice_engine.leader.scheduling.state import SchedulerState, sequence_records
from sluice_engine.step import RecordRef
from sluice_records import ChainKey


@dataclass(frozen=True, slots=True)
class Condemned:
    """`pages`, `snapshots`: keys that leave the cache. `sequences`: ids of those that have a bad record or what stands
    on one; `readers`: those of them that may have computed from it."""

    pages: frozenset[ChainKey]
    snapshots: frozenset[ChainKey]
    sequences: tuple[int, ...]
    readers: frozenset[int]


def condemn(state: SchedulerState, bad: Collection[RecordRef]) -> Condemned:
    """Linear in what is cached and in what sequences hold. It runs when memory fails, not for each request."""
    living = {ref for ref in bad if state.ledger.ref(ref.kind, ref.record) == ref and state.ledger.holders(ref)}
    bad_pages, bad_snapshots = state.cache.keys_of(living)
    pages = bad_pages | state.cache.below(bad_pages | bad_snapshots | _keys_in_sequences(state, living))
    snapshots = pages | bad_snapshots
    tainted = living.union(state.cache.refs(pages, snapshots))
    holders = [
        sequence
        for sequence in state.sequences.values()
        if any(ref in tainted for ref in (*sequence_records(sequence), *sequence.leased))
    ]
    return Condemned(
        frozenset(pages),
        frozenset(snapshots),
        tuple(sequence.id for sequence in holders),
        frozenset(sequence.id for sequence in holders if not tainted.isdisjoint(_read_by(state, sequence))),
    )


def _read_by(state: SchedulerState, sequence: Sequence) -> Iterator[RecordRef]:
    """Records that it may have computed from since they were closed. A source closes its state and its tail page with
    its last chunk: nothing here reads them after that."""
    for ref in sequence_records(sequence):
        is_last = sequence.phase is Phase.HELD and ref in (sequence.state, *_tail_page(state, sequence))
        if not is_last:
            yield ref


def _tail_page(state: SchedulerState, sequence: Sequence) -> list[RecordRef]:
    return sequence.pages[sequence.num_given // state.limits.page_tokens :]


def _keys_in_sequences(state: SchedulerState, refs: Collection[RecordRef]) -> set[ChainKey]:
    """Keys of pages and snapshots that sequences have of their own: the cache may know what was computed from them."""
    found: set[ChainKey] = set()
    for sequence in state.sequences.values():
        found.update(key for key, ref in zip(sequence.keys, sequence.pages, strict=False) if ref in refs)
        found.update(sequence.keys[boundary - 1] for boundary, ref in sequence.snapshots if ref in refs)
    return found
