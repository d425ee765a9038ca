"""The step under construction: its lists, and the records that go into and out of it."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_engine.leader.scheduling.ledger import CACHE, Holder, Seal
from sluice_engine.leader.scheduling.sequence import Gone, Grant, Mode, Phase, Sequence
from sluice_engine.leader.scheduling.state import SchedulerState
from sluice_engine.step import (
    Check,
    Close,
    PageAppend,
    PullSet,
    RecordRef,
    RowBinding,
    RowWork,
    StateCopy,
    StepRecord,
)
from sluice_records import ChainKey, RecordKind, extend_chain, record_identity

# A grant costs messages between four processes, whatever is in it; so much is read in less time than they take.
LEAST_GRANT_BYTES = 64 * 1024
# Entries of the ledger that the scrubber looks at in one step, closed or not.
SCRUB_LOOKS = 4096


class StepBuilder:
    """Reserves, closes, caches, snapshots and grants records for one step; `schedule.py` picks the sequences."""

    def __init__(self, state: SchedulerState) -> None:
        self.state, self.ledger, self.cache, self.limits = state, state.ledger, state.cache, state.limits
        self.number = state.next_number
        self.sees_last = state.sees(self.number - 1)  # before any fact moves it
        self.reserved: list[RecordRef] = []
        self.filling: list[RecordRef] = []
        self.committed: list[RecordRef] = []
        self.reopened: list[RecordRef] = []
        self.checks: dict[RecordRef, Check] = {}
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

    # -- records -----------------------------------------------------------------------------------------------------

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
        (ref,) = self._reserve_all(kind, holder, 1, announce=announce)
        return ref

    def _reserve_all(self, kind: RecordKind, holder: Holder, count: int, *, announce: bool = True) -> list[RecordRef]:
        refs = self.ledger.reserve_all(kind, holder, count, announce=announce)
        if announce:
            self.reserved += refs
        return refs

    def _close(self, ref: RecordRef, key: ChainKey, valid_tokens: int) -> None:
        self._close_all([ref], [key], valid_tokens)

    def _close_all(self, refs: list[RecordRef], keys: list[ChainKey], valid_tokens: int) -> None:
        """Records of one kind, each with the key of the tokens that it covers."""
        layout = self.state.layouts[refs[0].kind]
        identities = [record_identity(layout, key) for key in keys]
        self.ledger.close_all(refs, [Seal(identity, valid_tokens) for identity in identities])
        self.closed += [Close(ref, identity, valid_tokens) for ref, identity in zip(refs, identities, strict=True)]

    # -- verifying ---------------------------------------------------------------------------------------------------

    def _check_reused(self, pages: Iterable[RecordRef], snapshots: Iterable[RecordRef]) -> None:
        """Records that a sequence is about to read again: snapshots, and every page or every n-th."""
        every = self.limits.check_every
        for ref in pages:
            self.state.reused_pages += 1
            if self.state.reused_pages % every == 1 % every:
                self._check(ref)
        for ref in snapshots:
            self._check(ref)

    def _check(self, ref: RecordRef) -> None:
        """Verify the record in this step, unless it is not closed any more or its generation has ended."""
        seal = self.ledger.seal(ref)
        if seal is not None:
            self.checks[ref] = Check(ref, *seal)

    def drop_stale_checks(self) -> None:
        """Of records that have begun another generation since, or none: ranks hear of that before they check."""
        if self.checks:
            self.checks = {ref: check for ref, check in self.checks.items() if self.ledger.seal(ref) is not None}

    def _scrub(self, nbytes: int) -> None:
        """Verify closed records in turn, until they are `nbytes` or SCRUB_LOOKS records were looked at."""
        kinds, looks = list(RecordKind), SCRUB_LOOKS
        pool, record = self.state.scrubbed
        while looks > 0 and nbytes > 0:
            kind = kinds[pool]
            size = self.ledger.count(kind).total
            end = min(record + looks, size)
            for ref, seal in self.ledger.sealed_from(kind, record, looks):
                if ref not in self.checks:
                    self.checks[ref] = Check(ref, *seal)
                    nbytes -= self.state.layouts[kind].record_bytes
                if nbytes <= 0:
                    end = ref.record + 1
                    break
            looks -= max(1, end - record)
            pool, record = (pool, end) if end < size else ((pool + 1) % len(kinds), 0)
        self.state.scrubbed = pool, record

    # -- closing, caching, granting ----------------------------------------------------------------------------------

    def _cache_pages(self, sequence: Sequence, first: int, end: int) -> None:
        if sequence.tainted:
            return
        parent = sequence.keys[first - 1] if first else None
        cached = self.cache.insert_chain(sequence.keys[first:end], parent, sequence.pages[first:end])
        self.ledger.hold_all(cached, CACHE)

    def _close_full_pages(self, sequence: Sequence) -> None:
        """Pages that are written to their end and whose tokens are all known."""
        size, first, keys = self.limits.page_tokens, sequence.num_closed, sequence.keys
        end = min(sequence.computed, len(sequence.tokens)) // size
        if end <= first:
            return
        for index in range(len(keys), end):
            parent = keys[-1] if keys else self.state.salt
            keys.append(extend_chain(parent, sequence.tokens[index * size : (index + 1) * size]))
        if sequence.phase is Phase.ENDING:  # what is there already is about to be dropped: nothing to keep
            end = next((index for index in range(first, end) if self.cache.has_page(keys[index])), end)
            if end == first:
                return
        self._close_all(sequence.pages[first:end], keys[first:end], size)
        self._cache_pages(sequence, first, end)
        sequence.num_closed = end

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
            if not sequence.tainted and self.cache.insert_snapshot(key, ref):
                self._close(ref, key, boundary * self.limits.page_tokens)
                self.ledger.hold(ref, CACHE)
                self.ledger.drop(ref, sequence.holder)
                sequence.snapshots.remove(entry)

    def _grant(self, sequence: Sequence) -> None:
        """Source: what is closed by now and not granted yet; at the end the tail page and the state too."""
        if sequence.spec.mode is not Mode.SOURCE or sequence.last_step != self.number:
            return
        if sequence.limit.most == 1:
            return  # the first token ends it: its reader needs no records
        size, count = self.limits.page_tokens, sequence.num_given
        final = sequence.phase is Phase.HELD
        first = max(sequence.num_granted, sequence.spec.have_prefix)
        if not final and self._waits_for_last_chunk(sequence, sequence.num_closed - first):
            return
        records = [(index, sequence.pages[index], size) for index in range(first, sequence.num_closed)]
        sequence.num_granted = sequence.num_closed
        if final:
            assert sequence.state is not None
            key, tail = (sequence.keys[-1] if sequence.keys else self.state.salt), count % size
            if tail:
                key = extend_chain(key, sequence.tokens[count - tail : count])
                self._close(sequence.pages[-1], key, tail)
                records.append((len(sequence.pages) - 1, sequence.pages[-1], tail))
            self._close(sequence.state, key, count)
            records.append((0, sequence.state, count))
        refs = [ref for _, ref, _ in records]
        self.ledger.hold_all(refs, sequence.lease_holder)
        sequence.leased += refs
        if records:
            self.grants.append(Grant(sequence.id, tuple(records), final))

    def _waits_for_last_chunk(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether so little is not worth a grant and a pull of its own: the next chunk brings the rest."""
        is_last = self.limits.chunk_end(sequence.computed, sequence.num_given) == sequence.num_given
        return is_last and num_pages * self.state.layouts[RecordKind.PAGE].record_bytes < LEAST_GRANT_BYTES

    @property
    def _has_orders(self) -> bool:
        """Whether ranks have something to do, beside forgetting."""
        work = self.work or self.bound or self.appended or self.resumes or self.snapshots or self.closed
        records = self.reserved or self.filling or self.committed or self.reopened or self.checks or self.pulls
        return bool(work or records)

    def take_freed(self) -> tuple[tuple[int, ...], tuple[RecordRef, ...]]:
        """Rows and records for the ranks to forget. They travel with the next step that has something to do, because
        nothing waits for them and a step of their own would cost as much as one that computes."""
        if not self._has_orders:
            return (), ()
        rows, self.state.rows_freed = tuple(self.state.rows_freed), []
        return rows, self.ledger.take_released()

    def build(self, rows_freed: tuple[int, ...], released: tuple[RecordRef, ...]) -> StepRecord:
        return StepRecord(
            number=self.number,
            rows_freed=rows_freed,
            released=released,
            reserved=tuple(self.reserved),
            filling=tuple(self.filling),
            committed=tuple(self.committed),
            reopened=tuple(self.reopened),
            checks=tuple(self.checks.values()),
            rows_bound=tuple(self.bound),
            pages_appended=tuple(self.appended),
            resumes=tuple(self.resumes),
            work=tuple(self.work),
            snapshots=tuple(self.snapshots),
            closed=tuple(self.closed),
            pulls=tuple(self.pulls),
        )
