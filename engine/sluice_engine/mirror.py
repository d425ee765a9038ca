"""The rank's one-byte mirror of every record's state, changed only by step records.

A rank that is told to touch a record in the wrong state raises StepDivergence instead of touching it.
"""

from __future__ import annotations

from sluice_engine.ledger import RecordState
from sluice_engine.step import RecordRef, StepDivergence
from sluice_records import PoolPlan, RecordKind

CLOSED = 0x80
# As plain integers: they are compared with bytes, several times a row and step.
_FREE, _LIVE = int(RecordState.FREE), int(RecordState.LIVE)


class RecordMirror:
    """state | CLOSED in one byte, the generation beside it."""

    def __init__(self, plan: PoolPlan) -> None:
        self._state = {kind: bytearray(plan[kind]) for kind in RecordKind}
        self._generation = {kind: [0] * plan[kind] for kind in RecordKind}

    def reserve(self, ref: RecordRef) -> None:
        self._move(ref, _FREE, _LIVE, begin=True)

    def begin_fill(self, ref: RecordRef) -> None:
        self._move(ref, _FREE, RecordState.FILLING, begin=True)

    def commit(self, ref: RecordRef) -> None:
        self._move(ref, RecordState.FILLING, _LIVE | CLOSED)

    def close(self, ref: RecordRef) -> None:
        self._move(ref, _LIVE, _LIVE | CLOSED)

    def reopen(self, ref: RecordRef) -> None:
        self._move(ref, _LIVE | CLOSED, _LIVE)

    def release(self, ref: RecordRef) -> None:
        self._check_life(ref)
        if self._state[ref.kind][ref.record] == _FREE:
            raise StepDivergence(f"{ref} is released but free already")
        self._state[ref.kind][ref.record] = _FREE

    def check_readable(self, kind: RecordKind, record: int) -> None:
        if self._state[kind][record] & ~CLOSED != _LIVE:
            raise StepDivergence(f"read of {kind.value} record {record}, which is {self.describe(kind, record)}")

    def check_writable(self, kind: RecordKind, record: int) -> None:
        if self._state[kind][record] != _LIVE:
            raise StepDivergence(f"write to {kind.value} record {record}, which is {self.describe(kind, record)}")

    def describe(self, kind: RecordKind, record: int) -> str:
        value = self._state[kind][record]
        return RecordState(value & ~CLOSED).name + (" and closed" if value & CLOSED else "")

    def _move(self, ref: RecordRef, before: int, after: int, *, begin: bool = False) -> None:
        if begin:
            if self._generation[ref.kind][ref.record] >= ref.generation:
                raise StepDivergence(f"{ref} begins a life that is not newer than the last")
            self._generation[ref.kind][ref.record] = ref.generation
        self._check_life(ref)
        if self._state[ref.kind][ref.record] != before:
            told = self.describe(ref.kind, ref.record)
            raise StepDivergence(f"{ref} is {told} here; the step wants it from {before:#04x} to {after:#04x}")
        self._state[ref.kind][ref.record] = after

    def _check_life(self, ref: RecordRef) -> None:
        generation = self._generation[ref.kind][ref.record]
        if generation != ref.generation:
            raise StepDivergence(f"{ref} is of another life than this rank's generation {generation}")
