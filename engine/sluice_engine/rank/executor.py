"""Carry out step records on a rank, in the order of their fields (step.py)."""

from __future__ import annotations

import time

from sluice_engine.pool import Pools
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.step import (
    CHAIN_START,
    BadRecord,
    BatchModel,
    Check,
    Close,
    RecordDigest,
    SampledRow,
    StateCopy,
    StepDivergence,
    StepRecord,
    StepResult,
    decode_step,
)
from sluice_records import RecordKind, Trailer


class Executor:
    """One rank's end of the chain of steps."""

    def __init__(self, rank: int, pools: Pools, mirror: RecordMirror, model: BatchModel) -> None:
        self.rank = rank
        self.pools = pools
        self.mirror = mirror
        self.model = model
        self._chain = CHAIN_START
        self._next = 0

    def execute_frame(self, frame: bytes | memoryview) -> StepResult:
        """Raises StepDivergence when number or chain do not follow, or a record is not in the state to do it."""
        record, chain = decode_step(frame, self._chain)
        if record.number != self._next:
            raise StepDivergence(f"step {record.number} came, {self._next} was next")
        result = self.execute(record)
        self._chain, self._next = chain, record.number + 1
        return result

    def execute(self, record: StepRecord) -> StepResult:
        started = time.monotonic_ns()
        self._move_records(record)
        bad: tuple[BadRecord, ...] = ()
        check_ns = 0
        if record.checks:
            began = time.monotonic_ns()
            bad = self._check(record.checks)
            check_ns = time.monotonic_ns() - began
        for binding in record.rows_bound:
            self.model.bind(binding)
        for append in record.pages_appended:
            self.model.append_pages(append.row, append.pages)
        for copy in record.resumes:
            self._resume(copy)
        sampled: tuple[SampledRow, ...] = ()
        for batch in record.batches:
            sampled += self.model.run(batch)
        for copy in record.snapshots:
            self._snapshot(copy)
        digests = self._close(record.closed)
        return StepResult(record.number, self.rank, sampled, digests, time.monotonic_ns() - started, bad, check_ns)

    def _move_records(self, record: StepRecord) -> None:
        for row in record.rows_freed:
            self.model.free(row)
        self.mirror.release(record.released)
        self.mirror.reserve(record.reserved)
        for ref in record.reserved:
            self.pools[ref.kind].zero(ref.record)
        self.mirror.begin_fill(record.filling)
        self.mirror.commit(record.committed)
        for ref in record.committed:
            # The trailer names the new owner's life; payload and identity stay.
            self.pools[ref.kind].claim(ref.record, ref.generation)
        self.mirror.reopen(record.reopened)

    def _check(self, checks: tuple[Check, ...]) -> tuple[BadRecord, ...]:
        """Those whose trailer or bytes are not what was written."""
        bad: list[BadRecord] = []
        by_kind: dict[RecordKind, list[Check]] = {}
        for check in checks:
            self.mirror.check_closed(check.ref)
            by_kind.setdefault(check.ref.kind, []).append(check)
        for kind, of_kind in by_kind.items():
            pool = self.pools[kind]
            found = pool.digests([check.ref.record for check in of_kind], [check.identity for check in of_kind])
            for check, digest in zip(of_kind, found, strict=True):
                wanted = Trailer(
                    pool.layout.format_id, check.identity, check.ref.generation, check.valid_tokens, digest
                )
                if (difference := pool.difference(check.ref.record, wanted)) is not None:
                    bad.append(BadRecord(check.ref, f"rank {self.rank}: {': '.join(difference)}"))
        return tuple(bad)

    def _resume(self, copy: StateCopy) -> None:
        self.mirror.check_readable(RecordKind.SNAPSHOT, copy.snapshot)
        self.mirror.check_writable(RecordKind.STATE, copy.state)
        self.pools[RecordKind.SNAPSHOT].copy_sections(copy.snapshot, self.pools[RecordKind.STATE], copy.state)

    def _snapshot(self, copy: StateCopy) -> None:
        self.mirror.check_readable(RecordKind.STATE, copy.state)
        self.mirror.check_writable(RecordKind.SNAPSHOT, copy.snapshot)
        self.pools[RecordKind.STATE].copy_sections(copy.state, self.pools[RecordKind.SNAPSHOT], copy.snapshot)

    def _close(self, closed: tuple[Close, ...]) -> tuple[RecordDigest, ...]:
        """Digest and trailer of each, in the order of `closed`."""
        self.mirror.close([close.ref for close in closed])
        places: dict[RecordKind, list[int]] = {}
        for place, close in enumerate(closed):
            places.setdefault(close.ref.kind, []).append(place)
        digests = [0] * len(closed)
        for kind, of_kind in places.items():
            pool, closes = self.pools[kind], [closed[place] for place in of_kind]
            found = pool.digests([close.ref.record for close in closes], [close.identity for close in closes])
            format_id = pool.layout.format_id
            for place, close, digest in zip(of_kind, closes, found, strict=True):
                ref, digests[place] = close.ref, digest
                told = Trailer(format_id, close.identity, ref.generation, close.valid_tokens, digest)
                pool.write_trailer(ref.record, told)
        return tuple([RecordDigest(close.ref, digest) for close, digest in zip(closed, digests, strict=True)])
