"""Do the records that a source grants belong to this reader's own tokens? Asked at the grant and again at the commit.
No I/O.

A source that mixes up two leases, or a relay that has the key, grants records whose trailers and digests agree with
each other. Only the reader's own hash chain can tell that they are another prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from sluice_engine.leader.scheduling.ledger import Seal
from sluice_engine.leader.scheduling.sequence import Sequence
from sluice_engine.leader.scheduling.state import SchedulerState
from sluice_protocol.source import GrantedRecord
from sluice_records import ChainKey, RecordKind, extend_chain, record_identity


def fault_of_grant(state: SchedulerState, sequence: Sequence, records: Iterable[GrantedRecord]) -> str:
    """What is wrong with the first record that is not of this sequence; empty if all are."""
    own = _OwnRecords(state, sequence)
    for granted in records:
        wanted = own.seal(granted.kind, granted.index)
        if wanted is None:
            return f"it granted {granted.kind} {granted.index}, which this sequence does not have"
        if granted.identity != wanted.identity:
            return f"it granted {granted.kind} {granted.index} of other tokens than this request has"
        if granted.valid_tokens != wanted.valid_tokens:
            count = f"{granted.valid_tokens} tokens where {wanted.valid_tokens} are needed"
            return f"it granted {granted.kind} {granted.index} with {count}"
    return ""


def fault_of_commit(state: SchedulerState, sequence: Sequence) -> str:
    """What is wrong with the first record that would be committed under a key of another record; empty if none is."""
    own, first = _OwnRecords(state, sequence), sequence.num_closed
    pulled = [(RecordKind.PAGE, index, sequence.pages[index]) for index in range(first, len(sequence.pages))]
    if sequence.state is not None:
        pulled.append((RecordKind.STATE, 0, sequence.state))
    for kind, index, ref in pulled:
        filled = state.ledger.filling(ref)
        if filled is None:
            return f"it completed without {kind} {index}"
        if filled != own.seal(kind, index):
            return f"{kind} {index} was filled with other tokens than this request has"
    return ""


class _OwnRecords:
    """What the records of a reader's sequence must be, from its own tokens."""

    def __init__(self, state: SchedulerState, sequence: Sequence) -> None:
        self._state, self._sequence = state, sequence
        self._full, self._tail = divmod(len(sequence.tokens), state.limits.page_tokens)

    def seal(self, kind: str, index: int) -> Seal | None:
        """Of the record with this index; None if the sequence has no such record."""
        if kind == RecordKind.PAGE and 0 <= index < self._full:
            return self._seal(RecordKind.PAGE, self._sequence.keys[index], self._state.limits.page_tokens)
        if kind == RecordKind.PAGE and index == self._full and self._tail:
            return self._seal(RecordKind.PAGE, self._last_key, self._tail)
        if kind == RecordKind.STATE and index == 0:
            return self._seal(RecordKind.STATE, self._last_key, len(self._sequence.tokens))
        return None

    def _seal(self, kind: RecordKind, key: ChainKey, valid_tokens: int) -> Seal:
        return Seal(record_identity(self._state.layouts[kind], key), valid_tokens)

    @cached_property
    def _last_key(self) -> ChainKey:
        """Of all tokens, those of the tail page included."""
        key = self._sequence.keys[self._full - 1] if self._full else self._state.salt
        return extend_chain(key, self._sequence.tokens[-self._tail :]) if self._tail else key
