"""Starvation detector: a sequence that runs must be in every step that it can be in, or the scheduler has lost it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice_engine.leader.scheduling.admission import cache_could_give
from sluice_engine.leader.scheduling.sequence import Phase, Sequence
from sluice_engine.leader.scheduling.state import SchedulerState
from sluice_records import RecordKind


@dataclass(frozen=True, slots=True)
class PassedOver:
    """`since`: the first step that could have had the sequence passed over longest, or the next step where none is.
    `number` of sequences are passed over; `first` is that one."""

    since: int
    number: int = 0
    first: Sequence | None = None


class Turns:
    """Since which step each sequence could have been in one and was not. One `look` after another, at any distance."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # sequence -> its last step, and since when it is that

    def look(self, state: SchedulerState, *, under_way: bool) -> PassedOver:
        """`under_way`: a step is with the ranks, and a sequence that is not in it may be in the next. Without one,
        every sequence that could be in a step is passed over, because the next step is made at once."""
        now, seen = state.next_number, {}
        for sequence in due(state):
            last, since = self._seen.get(sequence.id, (sequence.last_step, now))
            seen[sequence.id] = sequence.last_step, since if last == sequence.last_step else now
        passed = [state.sequences[id] for id, (_, since) in seen.items() if since < now or not under_way]
        if not _has_pages(state, sum(_needs_page(state, sequence) for sequence in passed)):
            for sequence in passed:
                if _needs_page(state, sequence):  # it waits for a page, as it may
                    seen[sequence.id] = sequence.last_step, now
            passed = [sequence for sequence in passed if not _needs_page(state, sequence)]
        self._seen = seen
        if not passed:
            return PassedOver(now)
        first = min(passed, key=lambda sequence: seen[sequence.id][1])
        return PassedOver(seen[first.id][1], len(passed), first)


def due(state: SchedulerState) -> Iterator[Sequence]:
    """The sequences that decode, and the first of those that prefill: a step takes more only as its tokens allow. A
    sequence that needs a page is included, whether or not there is one."""
    is_first = True
    for sequence in state.sequences.values():
        if sequence.phase is Phase.DECODING and not sequence.is_exhausted:
            yield sequence
        elif sequence.phase is Phase.PREFILLING and is_first:
            is_first = False
            yield sequence


def _needs_page(state: SchedulerState, sequence: Sequence) -> bool:
    """A prefill has all its pages from the start."""
    full = sequence.computed >= len(sequence.pages) * state.limits.page_tokens
    return sequence.phase is Phase.DECODING and full


def _has_pages(state: SchedulerState, number: int) -> bool:
    missing = number - state.ledger.num_free(RecordKind.PAGE)
    return missing <= 0 or cache_could_give(state, missing)
