"""Does what a source grants belong to this reader's own tokens? No I/O.

A source that mixes up two leases, or a relay that has the key, grants records whose trailers and digests agree with
each other. Only the reader's own hash chain can tell that they are another prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable

from sluice_engine.sequence import Sequence
from sluice_engine.state import SchedulerState
from sluice_protocol.source import GrantedRecord
from sluice_records import ChainKey, RecordKind, extend_chain, record_identity


def fault_of_grant(state: SchedulerState, sequence: Sequence, records: Iterable[GrantedRecord]) -> str:
    """What is wrong with the first one that is not of this sequence; empty if all are."""
    for granted in records:
        wanted = expected_seal(state, sequence, granted.kind, granted.index)
        if wanted is None:
            return f"it granted {granted.kind} {granted.index}, which this sequence does not have"
        identity, valid_tokens = wanted
        if granted.identity != identity:
            return f"it granted {granted.kind} {granted.index} of other tokens than this request has"
        if granted.valid_tokens != valid_tokens:
            told = f"{granted.valid_tokens} tokens where {valid_tokens} are needed"
            return f"it granted {granted.kind} {granted.index} with {told}"
    return ""


def expected_seal(state: SchedulerState, sequence: Sequence, kind: str, index: int) -> tuple[bytes, int] | None:
    """(identity, valid tokens) of a record that a reader needs, from its own tokens; None for one that there is not."""
    size, count = state.limits.page_tokens, len(sequence.tokens)
    if kind == RecordKind.PAGE and 0 <= index < count // size:
        return record_identity(state.layouts[RecordKind.PAGE], sequence.keys[index]), size
    if kind == RecordKind.PAGE and index == count // size and count % size:
        return record_identity(state.layouts[RecordKind.PAGE], _last_key(state, sequence)), count % size
    if kind == RecordKind.STATE and index == 0:
        return record_identity(state.layouts[RecordKind.STATE], _last_key(state, sequence)), count
    return None


def _last_key(state: SchedulerState, sequence: Sequence) -> ChainKey:
    """Of all tokens, those of the tail page included."""
    size, count = state.limits.page_tokens, len(sequence.tokens)
    key, tail = (sequence.keys[count // size - 1] if count >= size else state.salt), count % size
    return extend_chain(key, sequence.tokens[count - tail :]) if tail else key
