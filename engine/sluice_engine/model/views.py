"""No pointer without its gate: torch views over record pools, handed out for the records of one batch at a time.

The pools' memory as tensors is private to `PoolViews`. A view carries the table of its own records, so nobody can pair
sections of one acquisition with records of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from sluice_engine.pool import RecordPool
from sluice_kernels.view import LayerView, RecordTable, SectionView
from sluice_records import Layouts, Plane, RecordKind, SectionKind

Gate = Callable[[int, RecordKind, Sequence[int]], None]
# No record has this number: a write through a table that was not acquired for it fails instead of landing somewhere.
_NOT_ACQUIRED = -(1 << 40)


class Mirror(Protocol):
    """What a rank knows of its records' states (`sluice_engine.rank.mirror`). Both raise StepDivergence."""

    def check_readable(self, kind: RecordKind, record: int) -> None: ...

    def check_writable(self, kind: RecordKind, record: int) -> None: ...


def no_wait(layer: int, kind: RecordKind, records: Sequence[int]) -> None:
    """The gate where nothing fills records behind the steps' back. Load tickets wait here."""


@dataclass(frozen=True, slots=True)
class BatchRecords:
    """Records of a batch's rows: states, pages in order, and the range of page columns that each row writes."""

    states: Sequence[int]
    pages: Sequence[Sequence[int]]
    written: Sequence[range]
    _tables: dict[str, RecordTable] = field(default_factory=dict, repr=False, compare=False)


class PoolViews:
    """Built once per rank. `gate` is called before a read of (layer, kind, records); it returns when they are there."""

    def __init__(
        self, pools: Mapping[RecordKind, RecordPool], layouts: Layouts, mirror: Mirror, gate: Gate = no_wait
    ) -> None:
        self._layouts = layouts
        self._mirror = mirror
        self._gate = gate
        self._limits = {kind: pools[kind].num_records for kind in (RecordKind.STATE, RecordKind.PAGE)}
        self._sections: list[dict[tuple[SectionKind, Plane], SectionView]] = [{} for _ in layouts.geometry.layers]
        for kind in self._limits:
            memory = torch.from_numpy(pools[kind].buffer)
            for section in layouts[kind].sections:
                view = SectionView.over(memory, layouts[kind], section)
                self._sections[section.layer][section.kind, section.plane] = view

    def acquire_read(self, layer: int, records: BatchRecords) -> LayerView:
        """Waits at the gate. Raises StepDivergence for records that may not be read."""
        table = records._tables.get("read")
        if table is None:
            table = records._tables["read"] = self._read_table(records)
        self._gate(layer, RecordKind.STATE, records.states)
        for pages in records.pages:
            self._gate(layer, RecordKind.PAGE, pages)
        return LayerView(layer, self._layouts.geometry, table, self._sections[layer], writable=False)

    def acquire_write(self, layer: int, records: BatchRecords) -> LayerView:
        """For the rows' states and the pages that they write. Waits; raises StepDivergence for closed or FILLING."""
        table = records._tables.get("write")
        if table is None:
            table = records._tables["write"] = self._write_table(records)
        self._gate(layer, RecordKind.STATE, records.states)
        for pages, columns in zip(records.pages, records.written, strict=True):
            self._gate(layer, RecordKind.PAGE, pages[columns.start : columns.stop])
        return LayerView(layer, self._layouts.geometry, table, self._sections[layer], writable=True)

    def _read_table(self, records: BatchRecords) -> RecordTable:
        pages = set().union(*records.pages)
        self._known(RecordKind.STATE, records.states)
        self._known(RecordKind.PAGE, pages)
        check = self._mirror.check_readable
        for state in records.states:
            check(RecordKind.STATE, state)
        for page in pages:
            check(RecordKind.PAGE, page)
        width = max((len(row) for row in records.pages), default=0) or 1
        padded = [[*row, *([row[0] if row else 0] * (width - len(row)))] for row in records.pages]
        table = np.array(padded, dtype=np.int64).reshape(len(padded), width)
        return RecordTable(torch.tensor(records.states, dtype=torch.int64), torch.from_numpy(table))

    def _write_table(self, records: BatchRecords) -> RecordTable:
        self._known(RecordKind.STATE, records.states)
        for state in records.states:
            self._mirror.check_writable(RecordKind.STATE, state)
        width = max((columns.stop for columns in records.written), default=0)
        table = np.full((len(records.pages), max(width, 1)), _NOT_ACQUIRED, dtype=np.int64)
        for row, (pages, columns) in enumerate(zip(records.pages, records.written, strict=True)):
            self._known(RecordKind.PAGE, pages[columns.start : columns.stop])
            for column in columns:
                self._mirror.check_writable(RecordKind.PAGE, pages[column])
                table[row, column] = pages[column]
        return RecordTable(torch.tensor(records.states, dtype=torch.int64), torch.from_numpy(table))

    def _known(self, kind: RecordKind, records: Collection[int]) -> None:
        if records and not 0 <= min(records) <= max(records) < self._limits[kind]:
            raise IndexError(f"{kind.value} records {min(records)} to {max(records)} of {self._limits[kind]}")
