"""What Engine/Load answers, from the leader's books. Reads, never changes; asked several times a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_protocol.generate import Load
from sluice_records import RecordKind
from sluice_runtime.health.layout import Readiness

if TYPE_CHECKING:
    from sluice_engine.leader.leader import Leader

MAX_BOUNDARY_HINTS = 256


def describe_load(leader: Leader) -> Load:
    pages = leader.state.ledger.count(RecordKind.PAGE)
    waiting = [g for g in leader.generations.values() if g.sent == 0]
    times = sorted(leader.loop.step_times)
    usable = pages.total - pages.quarantined
    running_pages, reserved_pages = pages_in_use(leader, usable)
    word = leader.marks.readiness
    return Load(
        incarnation=leader.incarnation,
        running=len(leader.state.sequences) - len(waiting),
        waiting=len(waiting),
        max_running=leader.resolved.limits.max_running,
        free_pages=pages.free,
        total_pages=usable,
        oldest_waiting_s=leader.oldest_waiting_s(),
        draining=leader.draining,
        empty=leader.is_empty,
        quarantined=word is Readiness.QUARANTINED,
        step_p95_ms=times[int(len(times) * 0.95)] * 1e3 if times else 0.0,
        block_keys=leader.state.cache.boundaries(MAX_BOUNDARY_HINTS),
        running_pages=running_pages,
        reserved_pages=reserved_pages,
        not_ready=word is not Readiness.READY,
        failing_sources=tuple(trouble.source for trouble in leader.readers.pairs.failing(leader.clock())),
    )


def pages_in_use(leader: Leader, total: int) -> tuple[int, int]:
    """(of sequences that have a token, of those that have none yet), together no more than there are. Sums of lengths:
    to count shared pages once would take milliseconds at full size."""
    running = reserved = 0
    for sequence in leader.state.sequences.values():
        generation = leader.generations.get(sequence.spec.id)
        if generation is not None and generation.sent == 0:
            reserved += max(len(sequence.pages), leader.state.limits.pages_for(len(sequence.tokens)))
        else:
            running += len(sequence.pages)
    running = min(running, total)
    return running, min(reserved, total - running)
