"""Carry out step records on a rank, in the order of their fields (step.py)."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sluice_engine.rank.device import BatchModel, Checked, Later, RecordCopy, RecordStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.step import (
    CHAIN_START,
    RecordDigest,
    SampledRow,
    StateCopy,
    StepDivergence,
    StepRecord,
    StepResult,
    decode_step,
)
from sluice_records import RecordKind

# Steps that are with the device at once: the one that it computes and the next.
MOST_LAUNCHED = 2


@dataclass(frozen=True, slots=True)
class _Launched:
    """`began_ns`: by the monotonic clock. `computes`: the model has a batch of it."""

    record: StepRecord
    began_ns: int
    computes: bool
    checked: Later[Checked] | None
    digests: Later[tuple[int, ...]] | None


class Executor:
    """One rank's end of the chain of steps: each is launched, and its result collected, in order."""

    def __init__(self, rank: int, store: RecordStore, mirror: RecordMirror, model: BatchModel) -> None:
        self.rank = rank
        self.mirror = mirror
        self.model = model
        self._store = store
        self._chain = CHAIN_START
        self._next = 0
        self._launched: deque[_Launched] = deque()

    @property
    def num_launched(self) -> int:
        """Steps whose results were not collected yet."""
        return len(self._launched)

    @property
    def is_done(self) -> bool:
        """Whether the oldest of them can be collected without waiting."""
        if not self._launched:
            return False
        completion = self.model.completion
        if completion is None or not self._launched[0].computes:
            return True
        return bool(select.select([completion], [], [], 0)[0])

    def launch(self, frame: bytes | memoryview) -> None:
        """Raises StepDivergence when number or chain do not follow, or a record is not in the state to do it."""
        record, chain = decode_step(frame, self._chain)
        if record.number != self._next:
            raise StepDivergence(f"step {record.number} came, {self._next} was next")
        self._launch(record)
        self._chain, self._next = chain, record.number + 1

    def collect(self) -> StepResult:
        """Of the oldest step that was launched. Waits for it."""
        launched = self._launched.popleft()
        sampled: tuple[SampledRow, ...] = self.model.collect() if launched.computes else ()
        checked = Checked() if launched.checked is None else launched.checked()
        record = launched.record
        found = () if launched.digests is None else launched.digests()
        digests = tuple([RecordDigest(close.ref, digest) for close, digest in zip(record.closed, found, strict=True)])
        busy_ns = time.monotonic_ns() - launched.began_ns
        return StepResult(record.number, self.rank, sampled, digests, busy_ns, checked.bad, checked.busy_ns)

    def execute(self, frame: bytes | memoryview) -> StepResult:
        """`launch`, and `collect` at once."""
        self.launch(frame)
        return self.collect()

    def _launch(self, record: StepRecord) -> None:
        began_ns = time.monotonic_ns()
        self._move_records(record)
        checked = None
        if record.checks:
            for check in record.checks:
                self.mirror.check_closed(check.ref)
            checked = self._store.check(record.checks)
        for binding in record.rows_bound:
            self.model.bind(binding)
        for append in record.pages_appended:
            self.model.append_pages(append.row, append.pages)
        if record.resumes:
            self._store.copy(self._resumes(record.resumes))
        if record.work:
            self.model.launch(record.work)
        if record.snapshots:
            self._store.copy(self._snapshots(record.snapshots))
        digests = None
        if record.closed:
            self.mirror.close([close.ref for close in record.closed])
            digests = self._store.close(record.closed)
        self._launched.append(_Launched(record, began_ns, bool(record.work), checked, digests))

    def _move_records(self, record: StepRecord) -> None:
        for row in record.rows_freed:
            self.model.free(row)
        self.mirror.release(record.released)
        self.mirror.reserve(record.reserved)
        self._store.zero(record.reserved)
        self.mirror.begin_fill(record.filling)
        self.mirror.commit(record.committed)
        self._store.claim(record.committed)
        self.mirror.reopen(record.reopened)

    def _resumes(self, copies: Sequence[StateCopy]) -> list[RecordCopy]:
        for copy in copies:
            self.mirror.check_readable(RecordKind.SNAPSHOT, copy.snapshot)
            self.mirror.check_writable(RecordKind.STATE, copy.state)
        return [RecordCopy(RecordKind.SNAPSHOT, copy.snapshot, RecordKind.STATE, copy.state) for copy in copies]

    def _snapshots(self, copies: Sequence[StateCopy]) -> list[RecordCopy]:
        for copy in copies:
            self.mirror.check_readable(RecordKind.STATE, copy.state)
            self.mirror.check_writable(RecordKind.SNAPSHOT, copy.snapshot)
        return [RecordCopy(RecordKind.STATE, copy.state, RecordKind.SNAPSHOT, copy.snapshot) for copy in copies]
