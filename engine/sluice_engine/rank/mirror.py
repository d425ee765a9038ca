"""The rank's one-byte mirror of every record's state, changed only by step records.

A rank that is told to touch a record in the wrong state raises StepDivergence instead of touching it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from sluice_engine.leader.scheduling.ledger import RecordState
from sluice_engine.step import RecordRef, StepDivergence
from sluice_records import PoolPlan, RecordKind

CLOSED = 0x80
# As plain integers: they are compared with bytes, several times a row and step.
_FREE, _LIVE, _FILLING = int(RecordState.FREE), int(RecordState.LIVE), int(RecordState.FILLING)
WRITABLE = _LIVE


class RecordMirror:
    """state | CLOSED in one byte, the generation beside it."""

    def __init__(self, plan: PoolPlan) -> None:
        self._state = {kind: bytearray(plan[kind]) for kind in RecordKind}
        # The same bytes: to look at many of them at once.
        self._states = {kind: np.frombuffer(self._state[kind], dtype=np.uint8) for kind in RecordKind}
        self._generation = {kind: [0] * plan[kind] for kind in RecordKind}

    # Of many at once: one is a dozen a request, and each call costs more than what it does. All of these raise
    # StepDivergence at the first that is in another state, or of another life, than the step wants it in.

    def reserve(self, refs: Iterable[RecordRef]) -> None:
        self._begin(refs, _LIVE)

    def begin_fill(self, refs: Iterable[RecordRef]) -> None:
        self._begin(refs, _FILLING)

    def commit(self, refs: Iterable[RecordRef]) -> None:
        self._move(refs, _FILLING, _LIVE | CLOSED)

    def close(self, refs: Iterable[RecordRef]) -> None:
        self._move(refs, _LIVE, _LIVE | CLOSED)

    def reopen(self, refs: Iterable[RecordRef]) -> None:
        self._move(refs, _LIVE | CLOSED, _LIVE)

    def release(self, refs: Iterable[RecordRef]) -> None:
        for ref in refs:
            self._check_life(ref)
            states, record = self._state[ref.kind], ref.record
            if states[record] == _FREE:
                raise StepDivergence(f"{ref} is released but free already")
            states[record] = _FREE

    def check_readable(self, kind: RecordKind, record: int) -> None:
        if self._state[kind][record] & ~CLOSED != _LIVE:
            raise StepDivergence(f"read of {kind.value} record {record}, which is {self.describe(kind, record)}")

    def check_all_readable(self, kind: RecordKind, records: NDArray[np.int64]) -> None:
        """`check_readable` of each; `records` int64, of any shape."""
        unreadable = self._states[kind].take(records) & ~np.uint8(CLOSED) != _LIVE
        if unreadable.any():
            self.check_readable(kind, int(records[unreadable][0]))

    def check_all_writable(self, kind: RecordKind, records: NDArray[np.int64]) -> None:
        """`check_writable` of each."""
        unwritable = self._states[kind].take(records) != _LIVE
        if unwritable.any():
            self.check_writable(kind, int(records[unwritable][0]))

    def check_closed(self, ref: RecordRef) -> None:
        self._check_life(ref)
        if self._state[ref.kind][ref.record] != _LIVE | CLOSED:
            raise StepDivergence(f"{ref} is to be verified, and is {self.describe(ref.kind, ref.record)}")

    def check_writable(self, kind: RecordKind, record: int) -> None:
        if self._state[kind][record] != _LIVE:
            raise StepDivergence(f"write to {kind.value} record {record}, which is {self.describe(kind, record)}")

    def states(self, kind: RecordKind) -> memoryview:
        """A byte a record, read-only: WRITABLE, or `check_writable` says what it is. It spares callers that look
        several times a row and step the calls."""
        return memoryview(self._state[kind]).toreadonly()

    def describe(self, kind: RecordKind, record: int) -> str:
        value = self._state[kind][record]
        return RecordState(value & ~CLOSED).name + (" and closed" if value & CLOSED else "")

    def _begin(self, refs: Iterable[RecordRef], after: int) -> None:
        for ref in refs:
            kind, record, generation = ref.kind, ref.record, ref.generation
            generations, states = self._generation[kind], self._state[kind]
            if generations[record] >= generation:
                raise StepDivergence(f"{ref} begins a life that is not newer than the last")
            if states[record] != _FREE:
                self._refuse(ref, _FREE, after)
            generations[record], states[record] = generation, after

    def _move(self, refs: Iterable[RecordRef], before: int, after: int) -> None:
        for ref in refs:
            kind, record = ref.kind, ref.record
            if self._generation[kind][record] != ref.generation:
                self._check_life(ref)
            states = self._state[kind]
            if states[record] != before:
                self._refuse(ref, before, after)
            states[record] = after

    def _refuse(self, ref: RecordRef, before: int, after: int) -> NoReturn:
        told = self.describe(ref.kind, ref.record)
        raise StepDivergence(f"{ref} is {told} here; the step wants it from {before:#04x} to {after:#04x}")

    def _check_life(self, ref: RecordRef) -> None:
        generation = self._generation[ref.kind][ref.record]
        if generation != ref.generation:
            raise StepDivergence(f"{ref} is of another life than this rank's generation {generation}")
