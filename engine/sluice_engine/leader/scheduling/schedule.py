"""`plan`: what the next step does. No clock, no I/O, no torch: a function of the state and the facts handed to it.

The state is moved, not copied: the caller gives it away and goes on with what it has become. Equal states and equal
facts make equal plans; the step records' chain digests prove it.

`plan(N)` sees results of steps <= N-2 only, in lockstep and in overlap alike (`SchedulerState.sees`). A row
that chose a stop token therefore runs one surplus step, whose token is dropped.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from sluice_engine.errors import LedgerError
from sluice_engine.leader.scheduling.condemn import Condemned, condemn
from sluice_engine.leader.scheduling.ledger import CACHE, RecordState, Seal
from sluice_engine.leader.scheduling.sequence import (
    Aborted,
    Corrupted,
    EndCause,
    Fact,
    Fenced,
    Gone,
    LeaseEnded,
    Mode,
    Phase,
    PullCommitted,
    PullGranted,
    PullsTerminal,
    ScrubDue,
    Sequence,
    StepDone,
    StrandingEnded,
    Suspected,
)
from sluice_engine.leader.scheduling.state import Plan, SchedulerState, sequence_records
from sluice_engine.leader.scheduling.step_builder import StepBuilder
from sluice_engine.step import PageAppend, PullItem, PullSet, RecordRef, RowBinding, RowWork, StateCopy
from sluice_records import RecordKind, block_keys
from sluice_runtime import fault_points


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


class _Planner(StepBuilder):
    """Applies facts, then gives rows, chunks and pulls to sequences."""

    # -- facts -------------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        match fact:
            case StepDone():
                self._apply_result(fact)
            case Fenced():
                self.ledger.fence()
            case StrandingEnded(records):
                for ref in records:
                    self.ledger.unstrand(ref)
            case Suspected(records):
                for ref in records:
                    self._check(ref)
            case Corrupted(records):
                self._condemn(condemn(self.state, records))
                for (
                    ref
                ) in records:  # also one that has begun another generation meanwhile: it is the memory that is bad
                    self.ledger.quarantine(ref.kind, ref.record)
            case ScrubDue(nbytes):
                self._scrub(nbytes)
            case _:
                sequence = self.state.sequences.get(fact.id)
                if sequence is not None:  # a fact about a sequence that has ended is only late
                    self._apply_to(sequence, fact)

    def _apply_to(
        self, sequence: Sequence, fact: Aborted | PullGranted | PullCommitted | PullsTerminal | LeaseEnded
    ) -> None:
        match fact:
            case Aborted(_, cause):
                self._end(sequence, cause)
            case LeaseEnded():
                self.ledger.drop_all(sequence.leased, sequence.lease_holder)
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
        is_shown = number < self.number - 1 or (number == self.number - 1 and self.sees_last)
        if not is_shown or number != self.state.completed + 1:
            raise LedgerError(f"plan {self.number} was shown the result of step {number}")
        rows, sequences = self.state.in_flight.pop(number), self.state.sequences
        self.state.completed = number
        for sampled in fact.result.sampled:
            sequence = sequences.get(rows[sampled.row])
            if sequence is None or sequence.stopped:
                continue
            if sampled.failed:
                sequence.stopped = True
                if sequence.spec.mode is not Mode.SOURCE:  # a room's records stay until its lease has ended
                    self._end(sequence, EndCause.FAILED)
            known, stops = sequence.tokens, sequence.limit.stops
            for token in sampled.tokens:
                known.append(token)
                if token in stops:
                    sequence.stopped = True
                    if sequence.spec.mode is not Mode.SOURCE:
                        self._end(sequence, EndCause.FINISHED)
                    break

    # -- ends --------------------------------------------------------------------------------------------------------

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

    def _condemn(self, condemned: Condemned) -> None:
        """Drop from the cache what stands on the records, end the sequences that have any of it."""
        self.ledger.drop_all(self.cache.remove(condemned.pages, condemned.snapshots), CACHE)
        for sequence_id in condemned.sequences:
            sequence = self.state.sequences[sequence_id]
            sequence.tainted, sequence.requeue = True, False
            if sequence.mode is Mode.SOURCE:  # a room's records stay until its lease has ended
                sequence.stopped = True
            else:
                self._end(sequence, EndCause.FAILED)

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
            self.state.rows_freed.append(sequence.row)
        self.state.free_rows.append(sequence.row)
        sequence.row = None

    def end_exhausted(self) -> None:
        """Sequences whose last token is planned have nothing left to run; a room that is done gives its row back."""
        for sequence in self.state.sequences.values():
            if sequence.phase is Phase.DECODING:
                if sequence.is_exhausted:
                    self._end(sequence, EndCause.FINISHED)
            elif sequence.phase is Phase.HELD:
                self._free_row(sequence)

    def _reap(self) -> bool:
        """Give back the records of sequences that no step and no handle uses any more; False when there is none."""
        reaped = False
        ending = Phase.ENDING
        for sequence in [s for s in self.state.sequences.values() if s.phase is ending]:
            if sequence.last_step > self.state.completed or not sequence.handles_terminal:
                continue
            reaped = True
            self.ledger.drop_all(sequence_records(sequence), sequence.holder)
            self.ledger.drop_all(sequence.leased, sequence.lease_holder)
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

    # -- admission to a row ------------------------------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """In order of arrival, until one does not fit."""
        while self.state.waiting and not fault_points.holds("leader.admit"):
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
        # Held before room is made, so that they are not what is evicted.
        self.ledger.hold_all((*kept, *borrowed), sequence.holder)
        missing = limits.pages_for(len(tokens)) - boundary
        if not (self._make_room(RecordKind.PAGE, missing) and self._make_room(RecordKind.STATE, 1)):
            self.ledger.drop_all((*kept, *borrowed), sequence.holder)
            return False
        self._check_reused(kept, borrowed)
        self.cache.touch(sequence.keys[:boundary])
        announce = not is_reader
        fresh = self._reserve_all(RecordKind.PAGE, sequence.holder, missing, announce=announce)
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
        sampling, spec = sequence.sampling, sequence.spec
        history, prompt = (tuple(sequence.tokens), len(spec.prompt)) if sampling.needs_history else ((), 0)
        pages = tuple(ref.record for ref in sequence.pages)
        self.bound.append(
            RowBinding(sequence.row, sequence.state.record, pages, position, sampling, history, last_token, prompt)
        )

    # -- work --------------------------------------------------------------------------------------------------------

    def schedule_decodes(self) -> None:
        size, decoding = self.limits.page_tokens, Phase.DECODING
        for sequence in list(self.state.sequences.values()):
            # An earlier turn of this loop may have preempted it.
            if sequence.phase is not decoding or fault_points.holds_one("leader.schedule", sequence.id):
                continue
            if sequence.computed < len(sequence.pages) * size or self._add_page(sequence):
                self._work(sequence, (), sequence.computed + 1, sample=True)

    def _add_page(self, sequence: Sequence) -> bool:
        """Append the page that the next position needs; under pressure the newest sequence makes way."""
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
        prefilling = Phase.PREFILLING
        for sequence in [s for s in self.state.sequences.values() if s.phase is prefilling]:
            if fault_points.holds_one("leader.schedule", sequence.id):
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

    # -- pulls -------------------------------------------------------------------------------------------------------

    def _authorise_pull(self, sequence: Sequence, fact: PullGranted) -> None:
        if sequence.phase is not Phase.PULLING:
            return
        items = []
        for granted in fact.records:
            ref = self._destination(sequence, granted.kind, granted.index)
            if ref is None:
                self._end(sequence, EndCause.FAILED)
                return
            self.ledger.begin_fill(ref, Seal(granted.identity, granted.valid_tokens))
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
        if not self.ledger.are(pulled, RecordState.FILLING):
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
        if full > sequence.num_closed:
            self._cache_pages(sequence, sequence.num_closed, full)
        sequence.num_closed, sequence.computed, sequence.handles_terminal = full, num_tokens, True
        sequence.phase, sequence.sampled = Phase.DECODING, 1
        sequence.tokens.append(token)
        self._bind(sequence, num_tokens, token)

    # -- the end of the plan -----------------------------------------------------------------------------------------

    @staticmethod
    def _has_written(sequence: Sequence) -> bool:
        """Whether it may have pages or a state to close: one that pulls has none of its own yet."""
        if sequence.mode is Mode.READER and not sequence.handles_terminal:
            return False
        if sequence.phase is Phase.ENDING:
            return sequence.cause is EndCause.FINISHED and bool(sequence.pages)
        return sequence.phase in (Phase.PREFILLING, Phase.DECODING, Phase.HELD)

    def finish(self) -> Plan:
        size, decoding, held = self.limits.page_tokens, Phase.DECODING, Phase.HELD
        for sequence in self.state.sequences.values():
            # Nothing for us here: a row that decodes between two page boundaries, a prompt that is held after its end.
            if sequence.phase is decoding:
                at_rest = sequence.computed % size and (sequence.num_closed + 1) * size > sequence.computed
            else:
                at_rest = sequence.phase is held and sequence.last_step != self.number
            if at_rest and not sequence.snapshots:
                continue
            if self._has_written(sequence):
                self._close_full_pages(sequence)
                self._take_snapshot(sequence)
                self._close_snapshots(sequence)
                self._grant(sequence)
        self.drop_stale_checks()
        # Lives that end by reaping are told to ranks in the next step: this one may have closed such a record.
        rows_freed, released = self.take_freed()
        reaped = self._reap()
        record = self.build(rows_freed, released)
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
            tokens=self.limits.step_tokens - self.tokens_left,
        )
