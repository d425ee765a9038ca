"""Yes or no at once: an ordered list of checks, each named by the fault it finds. No clock, no I/O."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import chain

from sluice_engine.leader.scheduling.sampling_checks import fault_of
from sluice_engine.leader.scheduling.sequence import Mode, Phase, Sequence, SequenceSpec
from sluice_engine.leader.scheduling.state import SchedulerState
from sluice_protocol.generate import Refused
from sluice_records import RecordKind

# A refusal for want of room: another engine, or this one a little later, may well say yes.
RETRY_MS = 50

Check = Callable[[SchedulerState, SequenceSpec], Refused | None]


def token_out_of_range(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    highest = max(chain(spec.prompt, spec.outputs))
    if highest < state.limits.vocab_size:
        return None
    return Refused("TokenOutOfRange", f"token id {highest} is not below the vocabulary size {state.limits.vocab_size}")


def bad_sampling(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    fault = fault_of(spec.sampling, state.limits.vocab_size)
    return None if fault is None else Refused("BadSampling", fault)


def nothing_to_produce(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    if spec.limit.most >= 1:
        return None
    return Refused(
        "NothingToProduce",
        f"max_tokens is {spec.sampling.max_tokens} and {len(spec.outputs)} outputs are there already",
    )


def context_too_long(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    total = spec.num_tokens + spec.limit.most
    if total <= state.limits.max_context_tokens:
        return None
    return Refused(
        "ContextTooLong",
        f"{spec.num_tokens} tokens and {spec.limit.most} to come are {total};"
        f" this engine holds {state.limits.max_context_tokens} a sequence",
    )


def larger_than_pool(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    needed = _pages_at_most(state, spec)
    pages = state.ledger.count(RecordKind.PAGE)
    total = pages.total - pages.quarantined
    if needed <= total:
        return None
    return Refused("LargerThanPool", f"it may need {needed} pages and the pool has {total}")


def no_row_free(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    if len(state.sequences) < state.limits.max_running:
        return None
    return Refused("NoRowFree", f"all {state.limits.max_running} rows are taken", RETRY_MS)


def no_state_free(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    """Stranded records cannot be used; sequences in the queue come first."""
    free = state.ledger.num_free(RecordKind.STATE) - len(state.waiting)
    if free > 0:
        return None
    return Refused("NoStateFree", "every state record is taken, stranded or promised", RETRY_MS)


def no_pages_free(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    """Those in the queue come first."""
    promised = sum(state.limits.pages_for(len(s.tokens)) for s in state.sequences.values() if s.phase is Phase.WAITING)
    needed = state.limits.pages_for(spec.num_tokens)
    room = state.ledger.num_free(RecordKind.PAGE) - promised
    if needed <= room or cache_could_give(state, needed - room):
        return None
    room += pages_of_cache_alone(state)
    return Refused("NoPagesFree", f"{needed} pages are needed and {max(room, 0)} could be free", RETRY_MS)


def cache_could_give(state: SchedulerState, pages: int) -> bool:
    """Whether the cache could give so many back at once. An engine that has been busy for a while has its pool full of
    cached pages: what is asked for every request must not cost more with every page. Sequences that have P pages in all
    keep no more than P cached ones, and that they may share them matters only where this is too little."""
    held = sum(len(sequence.pages) for sequence in state.sequences.values())
    return pages <= len(state.cache) - held or pages <= pages_of_cache_alone(state)


def pages_of_cache_alone(state: SchedulerState) -> int:
    """Pages that the cache could give back at once. Looks at each page that sequences have."""
    return state.cache.num_evictable((sequence.keys, sequence.pages) for sequence in state.sequences.values())


def starving(state: SchedulerState) -> tuple[int, int]:
    """(first, number) of those that wait though a plan could give the first its records; (0, 0) where there is none."""
    if not (state.waiting and state.free_rows and state.ledger.num_free(RecordKind.STATE)):
        return 0, 0
    head = state.sequences[state.waiting[0]]
    missing = state.limits.pages_for(len(head.tokens)) - state.ledger.num_free(RecordKind.PAGE)
    if missing > 0 and not cache_could_give(state, missing):
        return 0, 0
    return head.id, len(state.waiting)


CHECKS: tuple[Check, ...] = (
    bad_sampling,
    token_out_of_range,
    nothing_to_produce,
    context_too_long,
    larger_than_pool,
    no_row_free,
    no_state_free,
    no_pages_free,
)


def admit(state: SchedulerState, spec: SequenceSpec) -> Refused | None:
    """The first check that fails; or None, and the sequence waits for the next plan, counted by the next admission."""
    for check in CHECKS:
        refused = check(state, spec)
        if refused is not None:
            return refused
    state.sequences[spec.id] = Sequence(spec, [*spec.prompt, *spec.outputs], spec.num_tokens)
    insort(state.waiting, spec.id)
    return None


def _pages_at_most(state: SchedulerState, spec: SequenceSpec) -> int:
    """The last token is chosen, never computed. A source computes no output at all."""
    outputs = 0 if spec.mode is Mode.SOURCE else spec.limit.most - 1
    return state.limits.pages_for(spec.num_tokens + outputs)
