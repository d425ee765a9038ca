"""`plan`: what the next step does. No clock, no I/O, no torch: a function of the state and the facts handed to it.

The state is moved, not copied: the caller gives it away and goes on with what it has become. Equal states and equal
facts make equal plans; the step records' chain digests prove it.

`plan(N)` sees results of steps <= N-2 only, in lockstep and in overlap alike (`SchedulerState.visible_through`). A row
that chose a stop token therefore runs one surplus step, whose token is dropped.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sluice_engine.errors import LedgerError
from sluice_engine.ledger import CACHE, Holder, Ledger, RecordState
from sluice_engine.limits import Limits
from sluice_engine.prefix import PrefixCache
from sluice_engine.sequence import (
    Aborted,
    EndCause,
    Fact,
    Fenced,
    Gone,
    Grant,
    LeaseEnded,
    Mode,
    Phase,
    PullCommitted,
    PullGranted,
    PullsTerminal,
    Sequence,
    StepDone,
    StrandingEnded,
)
from sluice_engine.step import (
    Batch,
    Close,
    PageAppend,
    PullItem,
    PullSet,
    RecordRef,
    RowBinding,
    RowWork,
    StateCopy,
    StepRecord,
)
from sluice_records import ChainKey, Layouts, RecordKind, block_keys, extend_chain, record_identity


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
    next_number: int = 0
    completed: int = -1
    stalled: bool = False  # the last plan had nothing to do, though something waits
    in_flight: dict[int, dict[int, int]] = field(default_factory=dict)  # step -> row -> sequence

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.limits.max_running - 1, -1, -1))

    @property
    def can_run(self) -> bool:
        """Whether some sequence has something to compute."""
        return bool(self.waiting) or any(
            s.phase is Phase.PREFILLING or (s.phase is Phase.DECODING and not s.is_exhausted)
            for s in self.sequences.values()
        )

    @property
    def visible_through(self) -> int:
        """The next plan sees the results of all steps up to this one, and of no later one.

        While something can run that is N-2; when nothing can, or what waits has no place, every step planned so far.
        """
        return self.next_number - (2 if self.can_run and not self.stalled else 1)

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
    more to do even without a new fact.
    """

    record: StepRecord
    rows: dict[int, int]
    grants: tuple[Grant, ...]
    rooms: tuple[tuple[int, int], ...]
    cancelled: tuple[int, ...]
    gone: tuple[Gone, ...]
    progressed: bool


def plan(state: SchedulerState, facts: Iterable[Fact]) -> tuple[SchedulerState, Plan]:
    """The next step. Facts are applied in order; results of steps that `state.accepts` not are a caller's bug."""
    planner = _Planner(state)
    for fact in facts:
        planner.apply(fact)
    planner.end_exhausted()
    planner.schedule_decodes()
    planner.admit_waiting()
    planner.schedule_prefills()
    return state, planner.finish()


def _is_reapable(sequence: Sequence) -> bool:
    return sequence.phase is Phase.ENDING and sequence.handles_terminal


def sequence_records(sequence: Sequence) -> Iterator[RecordRef]:
    yield from sequence.pages
    if sequence.state is not None:
        yield sequence.state
    for _, ref in sequence.snapshots:
        yield ref
    yield from sequence.borrowed


class _Planner:
    """The step under construction."""

    def __init__(self, state: SchedulerState) -> None:
        self.state, self.ledger, self.cache, self.limits = state, state.ledger, state.cache, state.limits
        self.number = state.next_number
        self.visible_through = state.visible_through
        self.rows_freed: list[int] = []
        self.reserved: list[RecordRef] = []
        self.filling: list[RecordRef] = []
        self.committed: list[RecordRef] = []
        self.reopened: list[RecordRef] = []
        self.bound: list[RowBinding] = []
        self.appended: list[PageAppend] = []
        self.resumes: list[StateCopy] = []
        self.work: list[RowWork] = []
        self.snapshots: list[StateCopy] = []
        self.closed: list[Close] = []
        self.pulls: list[PullSet] = []
        self.rows: dict[int, int] = {}
        self.grants: list[Grant] = []
        self.rooms: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.gone: list[Gone] = []
        self.tokens_left = self.limits.step_tokens

    # -- facts -----------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        match fact:
            case StepDone():
                self._apply_result(fact)
            case Fenced():
                self.ledger.fence()
            case StrandingEnded(records):
                for ref in records:
                    self.ledger.unstrand(ref)
            case _:
                sequence = self.state.sequences.get(fact.id)
                if sequence is not None:  # facts about somebody who is gone already come late, that is all
                    self._apply_to(sequence, fact)

    def _apply_to(
        self, sequence: Sequence, fact: Aborted | PullGranted | PullCommitted | PullsTerminal | LeaseEnded
    ) -> None:
        match fact:
            case Aborted(_, cause):
                self._end(sequence, cause)
            case LeaseEnded():
                for ref in sequence.leased:
                    self.ledger.drop(ref, sequence.lease_holder)
                sequence.leased.clear()
                self._end(sequence, EndCause.FINISHED if sequence.phase is Phase.HELD else EndCause.ABORTED)
            case PullGranted():
                self._authorise_pull(sequence, fact)
            case PullCommitted(_, token):
                self._commit(sequence, token)
            case PullsTerminal(_, stranded):
                for ref in stranded:
                    self.ledger.strand(ref)
                self._end_fills(sequence)
                self._end(sequence, EndCause.FAILED)

    def _apply_result(self, fact: StepDone) -> None:
        number = fact.result.number
        if number > self.visible_through or number != self.state.completed + 1:
            raise LedgerError(f"plan {self.number} was shown the result of step {number}")
        rows = self.state.in_flight.pop(number)
        self.state.completed = number
        for sampled in fact.result.sampled:
            sequence = self.state.sequences.get(rows[sampled.row])
            if sequence is None or sequence.stopped:
                continue
            if sampled.failed:
                sequence.stopped = True
                if sequence.spec.mode is not Mode.SOURCE:  # a room's records stay until its lease has ended
                    self._end(sequence, EndCause.FAILED)
            for token in sampled.tokens:
                sequence.tokens.append(token)
                if token in sequence.sampling.stop_token_ids:
                    sequence.stopped = True
                    if sequence.spec.mode is not Mode.SOURCE:
                        self._end(sequence, EndCause.FINISHED)
                    break

    # -- ends ------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, cause: EndCause) -> None:
        """No more work from this step on; records go later (`_reap`)."""
        if sequence.phase is Phase.ENDING:
            return
        if sequence.phase is Phase.WAITING:
            self.state.waiting.remove(sequence.id)
        if sequence.phase is Phase.PULLING:
            self.cancelled.append(sequence.id)
        sequence.phase, sequence.cause = Phase.ENDING, cause
        self._free_row(sequence)

    def _end_fills(self, sequence: Sequence) -> None:
        """No handle of its pulls is alive any more."""
        for ref in sequence_records(sequence):
            if self.ledger.state(ref) is RecordState.FILLING:
                self.ledger.end_fill(ref)
        sequence.handles_terminal = True

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row is None:
            return
        bound_now = [binding for binding in self.bound if binding.row == sequence.row]
        if bound_now:
            self.bound.remove(bound_now[0])  # ranks need not hear of it at all
        else:
            self.rows_freed.append(sequence.row)
        self.state.free_rows.append(sequence.row)
        sequence.row = None

    def end_exhausted(self) -> None:
        """Sequences whose last token is planned have nothing left to run; a room that is done gives its row back."""
        for sequence in self.state.sequences.values():
            if sequence.phase is Phase.DECODING and sequence.is_exhausted:
                self._end(sequence, EndCause.FINISHED)
            elif sequence.phase is Phase.HELD:
                self._free_row(sequence)

    def _reap(self) -> bool:
        """Give back the records of sequences that no step and no handle uses any more; False when there is none."""
        reaped = False
        for sequence in [s for s in self.state.sequences.values() if s.phase is Phase.ENDING]:
            if sequence.last_step > self.state.completed or not sequence.handles_terminal:
                continue
            reaped = True
            for ref in sequence_records(sequence):
                self.ledger.drop(ref, sequence.holder)
            for ref in sequence.leased:
                self.ledger.drop(ref, sequence.lease_holder)
            if sequence.requeue and not sequence.stopped and not sequence.is_exhausted:
                self.state.sequences[sequence.id] = Sequence(
                    sequence.spec,
                    sequence.tokens,
                    len(sequence.tokens),
                    sampled=sequence.sampled,
                    cached_tokens=sequence.cached_tokens,
                )
                insort(self.state.waiting, sequence.id)
            else:
                del self.state.sequences[sequence.id]
                cause = sequence.cause or EndCause.FAILED
                self.gone.append(Gone(sequence.id, cause, sequence.cached_tokens, sequence.chunks))
        return reaped

    # -- records ---------------------------------------------------------------------------------------------------

    def _make_room(self, kind: RecordKind, count: int) -> bool:
        """Evict from the cache until `count` records of `kind` are free; False (and evicted what could be) if not."""
        while self.ledger.num_free(kind) < count:
            if kind is RecordKind.PAGE:
                evicted = self.cache.evict_page(lambda ref: self.ledger.holders(ref) == (CACHE,))
            else:
                snapshot = self.cache.evict_snapshot(self._is_settled) if kind is RecordKind.SNAPSHOT else None
                evicted = () if snapshot is None else (snapshot,)
            if not evicted:
                return False
            for ref in evicted:
                self.ledger.drop(ref, CACHE)
        return True

    def _is_settled(self, ref: RecordRef) -> bool:
        """Not made by this very step, which could not both close it and end its life."""
        return all(close.ref != ref for close in self.closed)

    def _reserve(self, kind: RecordKind, holder: Holder, *, announce: bool = True) -> RecordRef:
        ref = self.ledger.reserve(kind, holder)
        if announce:
            self.ledger.announce(ref)
            self.reserved.append(ref)
        return ref

    def _identity(self, kind: RecordKind, key: ChainKey) -> bytes:
        return record_identity(self.state.layouts[kind], key)

    def _close(self, ref: RecordRef, key: ChainKey, valid_tokens: int) -> None:
        self.ledger.close(ref)
        self.closed.append(Close(ref, self._identity(ref.kind, key), valid_tokens))

    # -- admission to a row ----------------------------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """In order of arrival, until one does not fit."""
        while self.state.waiting:
            sequence = self.state.sequences[self.state.waiting[0]]
            if not self._admit(sequence):
                return
            self.state.waiting.pop(0)

    def _admit(self, sequence: Sequence) -> bool:
        limits, tokens = self.limits, sequence.tokens
        sequence.keys = list(block_keys(self.state.salt, tokens, limits.page_tokens))
        match = self.cache.match(sequence.keys, (len(tokens) - 1) // limits.page_tokens)
        is_reader = sequence.spec.mode is Mode.READER
        boundary = len(match.pages) if is_reader else match.resume[0] if match.resume else 0
        kept = match.pages[:boundary]
        borrowed = () if is_reader or match.resume is None else (match.resume[1],)
        for ref in (*kept, *borrowed):  # held before room is made, so that they are not what is evicted
            self.ledger.hold(ref, sequence.holder)
        missing = limits.pages_for(len(tokens)) - boundary
        if not (self._make_room(RecordKind.PAGE, missing) and self._make_room(RecordKind.STATE, 1)):
            for ref in (*kept, *borrowed):
                self.ledger.drop(ref, sequence.holder)
            return False
        self.cache.touch(sequence.keys[:boundary])
        announce = not is_reader
        fresh = [self._reserve(RecordKind.PAGE, sequence.holder, announce=announce) for _ in range(missing)]
        sequence.state = self._reserve(RecordKind.STATE, sequence.holder, announce=announce)
        sequence.pages, sequence.borrowed = [*kept, *fresh], list(borrowed)
        sequence.num_closed = boundary
        if is_reader:
            sequence.phase, sequence.handles_terminal = Phase.PULLING, False
            sequence.cached_tokens = boundary * limits.page_tokens
            self.rooms.append((sequence.id, boundary))
        else:
            self._start_prefill(sequence, boundary * limits.page_tokens)
        return True

    def _start_prefill(self, sequence: Sequence, position: int) -> None:
        sequence.phase, sequence.computed = Phase.PREFILLING, position
        sequence.cached_tokens = max(sequence.cached_tokens, position)
        if position:
            assert sequence.state is not None
            self.resumes.append(StateCopy(sequence.state.record, sequence.borrowed[0].record))
        self._bind(sequence, position, -1)

    def _bind(self, sequence: Sequence, position: int, last_token: int) -> None:
        assert sequence.state is not None
        sequence.row = self.state.free_rows.pop()
        history = tuple(sequence.tokens) if sequence.sampling.needs_history else ()
        pages = tuple(ref.record for ref in sequence.pages)
        self.bound.append(
            RowBinding(sequence.row, sequence.state.record, pages, position, sequence.sampling, history, last_token)
        )

    # -- work ------------------------------------------------------------------------------------------------------

    def schedule_decodes(self) -> None:
        for sequence in list(self.state.sequences.values()):
            # An earlier turn of this loop may have preempted it.
            if sequence.phase is Phase.DECODING and self._has_page(sequence):
                self._work(sequence, (), sequence.computed + 1, sample=True)

    def _has_page(self, sequence: Sequence) -> bool:
        """Append the page that the next position needs; under pressure the newest sequence makes way."""
        if sequence.computed < len(sequence.pages) * self.limits.page_tokens:
            return True
        if not self._make_room(RecordKind.PAGE, 1):
            self._preempt_newest()
            return False
        ref = self._reserve(RecordKind.PAGE, sequence.holder)
        sequence.pages.append(ref)
        assert sequence.row is not None
        self.appended.append(PageAppend(sequence.row, (ref.record,)))
        return True

    def _preempt_newest(self) -> None:
        holders = [s for s in self.state.sequences.values() if s.pages]
        if any(s.phase is Phase.ENDING for s in holders):
            return  # its pages are on their way back
        candidates = [s for s in holders if s.phase in (Phase.PREFILLING, Phase.DECODING, Phase.PULLING)]
        newest = max(candidates, key=lambda s: s.id)
        newest.requeue = newest.spec.mode is Mode.UNIFIED
        self._end(newest, EndCause.PREEMPTED)

    def schedule_prefills(self) -> None:
        """Whole chunks only, first come first served; one chunk a step whatever the budget, so that none starves."""
        scheduled = False
        for sequence in list(self.state.sequences.values()):
            if sequence.phase is not Phase.PREFILLING:
                continue
            end = self.limits.chunk_end(sequence.computed, sequence.num_given)
            if scheduled and end - sequence.computed > self.tokens_left:
                return
            scheduled = True
            last = end == sequence.num_given
            self._work(sequence, tuple(sequence.tokens[sequence.computed : end]), end, sample=last)
            sequence.chunks += 1
            if last:
                sequence.phase = Phase.HELD if sequence.spec.mode is Mode.SOURCE else Phase.DECODING

    def _work(self, sequence: Sequence, tokens: tuple[int, ...], end: int, *, sample: bool) -> None:
        assert sequence.row is not None
        self.work.append(RowWork(sequence.row, sequence.computed, tokens, sample))
        self.tokens_left -= end - sequence.computed
        sequence.computed, sequence.last_step = end, self.number
        if sample:
            sequence.sampled += 1
            self.rows[sequence.row] = sequence.id

    # -- pulls -----------------------------------------------------------------------------------------------------

    def _authorise_pull(self, sequence: Sequence, fact: PullGranted) -> None:
        if sequence.phase is not Phase.PULLING:
            return
        items = []
        for granted in fact.records:
            ref = self._destination(sequence, granted.kind, granted.index)
            if ref is None:
                self._end(sequence, EndCause.FAILED)
                return
            self.ledger.begin_fill(ref)
            self.ledger.announce(ref)
            self.filling.append(ref)
            items.append(
                PullItem(
                    ref.kind,
                    granted.record,
                    granted.generation,
                    ref.record,
                    granted.identity,
                    granted.digest,
                    granted.valid_tokens,
                )
            )
        self.pulls.append(PullSet(fact.lease_id, fact.peer, tuple(items)))

    def _destination(self, sequence: Sequence, kind: str, index: int) -> RecordRef | None:
        """Where a granted record goes; None when the source has no business granting it (again)."""
        if kind == RecordKind.STATE:
            ref = sequence.state
        elif kind == RecordKind.PAGE and sequence.num_closed <= index < len(sequence.pages):
            ref = sequence.pages[index]
        else:
            return None
        if ref is None or self.ledger.state(ref) is not RecordState.LIVE:
            return None
        return ref

    def _commit(self, sequence: Sequence, token: int) -> None:
        if sequence.phase is not Phase.PULLING:
            return
        assert sequence.state is not None
        num_tokens = len(sequence.tokens)
        full = num_tokens // self.limits.page_tokens
        pulled = [*sequence.pages[sequence.num_closed :], sequence.state]
        if any(self.ledger.state(ref) is not RecordState.FILLING for ref in pulled):
            # The source completed without granting everything. What it did grant is here: no handle is alive.
            self._end_fills(sequence)
            self._end(sequence, EndCause.FAILED)
            return
        for ref in pulled:
            self.ledger.commit(ref)
            self.committed.append(ref)
        for ref in (*sequence.pages[full:], sequence.state):
            self.ledger.reopen(ref)
            self.reopened.append(ref)
        for index in range(sequence.num_closed, full):
            self._cache_page(sequence, index)
        sequence.num_closed, sequence.computed, sequence.handles_terminal = full, num_tokens, True
        sequence.phase, sequence.sampled = Phase.DECODING, 1
        sequence.tokens.append(token)
        self._bind(sequence, num_tokens, token)

    # -- closing, caching, granting --------------------------------------------------------------------------------

    def _cache_page(self, sequence: Sequence, index: int) -> bool:
        parent = sequence.keys[index - 1] if index else None
        ref = sequence.pages[index]
        if not self.cache.insert_page(sequence.keys[index], parent, ref):
            return False
        self.ledger.hold(ref, CACHE)
        return True

    def _close_full_pages(self, sequence: Sequence) -> None:
        """Pages that are written to their end and whose tokens are all known."""
        size = self.limits.page_tokens
        known = min(sequence.computed, len(sequence.tokens))
        while (sequence.num_closed + 1) * size <= known:
            index = sequence.num_closed
            if len(sequence.keys) == index:
                parent = sequence.keys[-1] if sequence.keys else self.state.salt
                sequence.keys.append(extend_chain(parent, sequence.tokens[index * size : (index + 1) * size]))
            if sequence.phase is Phase.ENDING and self.cache.has_page(sequence.keys[index]):
                return  # it is about to be dropped: nothing to keep
            self._close(sequence.pages[index], sequence.keys[index], size)
            self._cache_page(sequence, index)
            sequence.num_closed += 1

    def _take_snapshot(self, sequence: Sequence) -> None:
        """At a page boundary that this step reaches, if the policy wants one there."""
        size, position = self.limits.page_tokens, sequence.computed
        if position % size or sequence.last_step != self.number or sequence.state is None or not position:
            return
        prefilling = position < sequence.num_given
        if prefilling:
            previous = position - 1
            if self.limits.snapshots.next_boundary(previous, sequence.num_given, size) != position:
                return
            key = sequence.keys[position // size - 1]
            if self.cache.has_snapshot(key) or not self.cache.has_page(key):
                return
        elif not self.limits.snapshot_outputs or position == sequence.num_given:
            return
        if not self._make_room(RecordKind.SNAPSHOT, 1):
            return
        ref = self._reserve(RecordKind.SNAPSHOT, sequence.holder)
        self.snapshots.append(StateCopy(sequence.state.record, ref.record))
        sequence.snapshots.append((position // size, ref))

    def _close_snapshots(self, sequence: Sequence) -> None:
        """Snapshots whose tokens are known by now join the cache, or end when their content is there already."""
        for entry in list(sequence.snapshots):
            boundary, ref = entry
            if boundary > sequence.num_closed:
                continue
            key = sequence.keys[boundary - 1]
            if self.cache.insert_snapshot(key, ref):
                self._close(ref, key, boundary * self.limits.page_tokens)
                self.ledger.hold(ref, CACHE)
                self.ledger.drop(ref, sequence.holder)
                sequence.snapshots.remove(entry)

    def _grant(self, sequence: Sequence) -> None:
        """Source: what is closed by now and not granted yet; at the end the tail page and the state too."""
        if sequence.spec.mode is not Mode.SOURCE or sequence.last_step != self.number:
            return
        if sequence.spec.outputs_left == 1:
            return  # the first token ends it: nobody needs the records
        size, count = self.limits.page_tokens, sequence.num_given
        records = []
        for index in range(max(sequence.num_granted, sequence.spec.have_prefix), sequence.num_closed):
            records.append((index, sequence.pages[index], size))
        sequence.num_granted = sequence.num_closed
        final = sequence.phase is Phase.HELD
        if final:
            assert sequence.state is not None
            key, tail = (sequence.keys[-1] if sequence.keys else self.state.salt), count % size
            if tail:
                key = extend_chain(key, sequence.tokens[count - tail : count])
                self._close(sequence.pages[-1], key, tail)
                records.append((len(sequence.pages) - 1, sequence.pages[-1], tail))
            self._close(sequence.state, key, count)
            records.append((0, sequence.state, count))
        for _, ref, _ in records:
            self.ledger.hold(ref, sequence.lease_holder)
            sequence.leased.append(ref)
        if records:
            self.grants.append(Grant(sequence.id, tuple(records), final))

    # -- the end of the plan ---------------------------------------------------------------------------------------

    def finish(self) -> Plan:
        for sequence in self.state.sequences.values():
            if sequence.phase in (Phase.PREFILLING, Phase.DECODING, Phase.HELD) or (
                sequence.phase is Phase.ENDING and sequence.cause is EndCause.FINISHED and sequence.pages
            ):
                if sequence.spec.mode is Mode.READER and sequence.handles_terminal is False:
                    continue
                self._close_full_pages(sequence)
                self._take_snapshot(sequence)
                self._close_snapshots(sequence)
                self._grant(sequence)
        # Lives that end by reaping are told to ranks in the next step: this one may have closed such a record.
        released = self.ledger.take_released()
        reaped = self._reap()
        record = StepRecord(
            number=self.number,
            rows_freed=tuple(self.rows_freed),
            released=released,
            reserved=tuple(self.reserved),
            filling=tuple(self.filling),
            committed=tuple(self.committed),
            reopened=tuple(self.reopened),
            rows_bound=tuple(self.bound),
            pages_appended=tuple(self.appended),
            resumes=tuple(self.resumes),
            batches=(Batch(tuple(self.work)),) if self.work else (),
            snapshots=tuple(self.snapshots),
            closed=tuple(self.closed),
            pulls=tuple(self.pulls),
        )
        if not record.is_empty:
            self.state.in_flight[self.number] = self.rows
            self.state.next_number += 1
        self.state.stalled = record.is_empty
        return Plan(
            record,
            self.rows,
            tuple(self.grants),
            tuple(self.rooms),
            tuple(self.cancelled),
            tuple(self.gone),
            progressed=reaped or not record.is_empty,
        )
