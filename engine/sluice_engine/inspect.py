"""The leader's books as plain values: what `Engine/Inspect` answers. Reads, never changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from sluice_engine.errors import LedgerError
from sluice_engine.leader import Leader
from sluice_records import RecordKind


def inspect(leader: Leader) -> dict[str, Any]:
    """Law 8 in one look: `integrity` is "exact", or says what does not add up."""
    state = leader.state
    try:
        state.check_integrity()
        integrity = "exact"
    except LedgerError as error:
        integrity = str(error)
    return {
        "role": leader.spec.role.value,
        "name": leader.spec.name,
        "incarnation": leader.incarnation,
        "integrity": integrity,
        "ledger": {kind.value: asdict(state.ledger.count(kind)) for kind in RecordKind},
        "cached": {"pages": len(state.cache), "snapshots": state.cache.num_snapshots},
        "sequences": dict(Counter(sequence.phase.value for sequence in state.sequences.values())),
        "rooms": dict(leader.rooms.summary()),
        "streams": len(leader.generations),
        "gateways": len(leader.sinks),
        "step": state.next_number,
        "draining": leader.draining,
        "counters": dict(leader.counters),
    }
