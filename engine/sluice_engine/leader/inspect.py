"""The leader's books as plain values: what `Engine/Inspect` answers. Reads, never changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sluice_engine.errors import LedgerError
from sluice_records import RecordKind

if TYPE_CHECKING:
    from sluice_engine.leader.leader import Leader


def inspect(leader: Leader) -> dict[str, Any]:
    """Law 8 in one look: `integrity` is "exact", or says what does not add up."""
    try:
        leader.state.check_integrity()
        integrity = "exact"
    except LedgerError as error:
        integrity = str(error)
    return {"integrity": integrity, **summary(leader)}


def summary(leader: Leader) -> dict[str, Any]:
    """The same without the look at every record: cheap enough to be mirrored again and again."""
    state = leader.state
    return {
        "role": leader.spec.role.value,
        "name": leader.spec.name,
        "incarnation": leader.incarnation,
        "ledger": {kind.value: asdict(state.ledger.count(kind)) for kind in RecordKind},
        "cached": {"pages": len(state.cache), "snapshots": state.cache.num_snapshots},
        "sequences": dict(Counter(sequence.phase.value for sequence in state.sequences.values())),
        "rooms": {"source": len(leader.sources), "reader": len(leader.readers)},
        "transport": leader.readers.describe_transport(),
        "pairs": [asdict(trouble) for trouble in leader.readers.pairs.failing(leader.clock())],
        "streams": len(leader.generations),
        "gateways": len(leader.requests.sinks),
        "waiting": len(state.waiting),
        "max_running": state.limits.max_running,
        "oldest_waiting_s": round(leader.oldest_waiting_s(), 3),
        "step": state.next_number,
        "draining": leader.draining,
        "counters": dict(leader.counters),
    }
