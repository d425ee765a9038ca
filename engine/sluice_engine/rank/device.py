"""What a rank computes with: its records, and its model. Implementations differ by device.

Both are given their work in order. On a device of its own, work may still be under way when a call returns; results are
collected later, in the same order. So a rank can launch step N+1 before it has collected step N.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sluice_engine.step import BadRecord, Check, Close, RecordRef, RowBinding, RowWork, SampledRow
from sluice_records import RecordKind

T = TypeVar("T")
Later = Callable[[], T]
"""A result that is asked for once the work that makes it has been collected."""


@dataclass(frozen=True, slots=True)
class RecordCopy:
    """Copy every section that both kinds of record have (state <-> snapshot: window and overlaps)."""

    source_kind: RecordKind
    source: int
    destination_kind: RecordKind
    destination: int


@dataclass(frozen=True, slots=True)
class Checked:
    """`bad`: the records whose trailer or bytes are not what was written. `busy_ns`: what the checks took."""

    bad: tuple[BadRecord, ...] = ()
    busy_ns: int = 0


class RecordStore(Protocol):
    """The records of one rank. It moves bytes as it is told; which record may be touched is the mirror's to say."""

    def zero(self, refs: Sequence[RecordRef]) -> None:
        """A generation begins with zeros, so that equal content means equal bytes."""
        ...

    def claim(self, refs: Sequence[RecordRef]) -> None:
        """The trailers name these generations from now on; payload and identity stay."""
        ...

    def copy(self, copies: Sequence[RecordCopy]) -> None: ...

    def check(self, checks: Sequence[Check]) -> Later[Checked]: ...

    def close(self, closes: Sequence[Close]) -> Later[tuple[int, ...]]:
        """Write digest and trailer of each. The digests, uint64, in the order of `closes`."""
        ...


class BatchModel(Protocol):
    """What a rank runs inside a step: a real model, or the scripted one. Rows are small stable integers.

    The token that a row sampled last stays with the model: work without tokens goes on from it.
    """

    @property
    def completion(self) -> int | None:
        """A descriptor that is readable while the oldest batch that was launched is complete; None when every batch is
        complete as soon as `launch` returns."""
        ...

    def bind(self, binding: RowBinding) -> None: ...

    def append_pages(self, row: int, pages: tuple[int, ...]) -> None: ...

    def free(self, row: int) -> None: ...

    def launch(self, work: tuple[RowWork, ...]) -> None:
        """Execute all rows, in this order. Raises StepDivergence for work that the rows cannot mean."""
        ...

    def collect(self) -> tuple[SampledRow, ...]:
        """Of the oldest batch that was not collected yet: the tokens of the rows that sample, in order. Waits for them.

        A row whose logits no token can be chosen from is reported as failed; the others are not affected.
        """
        ...


class SynchronousModel(ABC):
    """A `BatchModel` on the CPU: `run` computes a batch before it returns."""

    completion: int | None = None

    def __init__(self) -> None:
        self._sampled: deque[tuple[SampledRow, ...]] = deque()

    @abstractmethod
    def run(self, work: tuple[RowWork, ...]) -> tuple[SampledRow, ...]:
        """What `collect` returns of it."""

    def launch(self, work: tuple[RowWork, ...]) -> None:
        self._sampled.append(self.run(work))

    def collect(self) -> tuple[SampledRow, ...]:
        return self._sampled.popleft()
