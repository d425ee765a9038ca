"""No pointer without its gate: torch views over record pools, handed out for the records of one batch at a time.

The pools' memory as tensors is private to `PoolViews`. A view carries the table of its own records, so sections
of one acquisition cannot be paired with records of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from sluice_engine.model.page_table import BatchRecords, Records
from sluice_engine.pool import RecordPool
from sluice_kernels.view import LayerView, RecordTable, SectionView
from sluice_records import Layouts, Plane, RecordKind, SectionKind

Gate = Callable[[int, RecordKind, Records], None]
# No record has this number: a write through a table that was not acquired for it fails instead of landing somewhere.
_NOT_ACQUIRED = -(1 << 40)


class Mirror(Protocol):
    """What a rank knows of its records' states (`sluice_engine.rank.mirror`). `records` int64, of any shape.
    Both raise StepDivergence."""

    def check_all_readable(self, kind: RecordKind, records: Records) -> None: ...

    def check_all_writable(self, kind: RecordKind, records: Records) -> None: ...


def no_wait(layer: int, kind: RecordKind, records: Records) -> None:
    """The gate where nothing fills records behind the steps' back. Load tickets wait here."""


class PoolViews:
    """Built once per rank. `gate` is called before a read or write of (layer, kind, records); it returns when they are
    there."""

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

    def acquire(self, records: BatchRecords) -> Callable[[int], tuple[LayerView, LayerView]]:
        """Views to read and to write (the rows' states, and the pages that the batch writes) by layer; each waits at
        the gate. Raises StepDivergence for records that may not be read, or written: closed ones and those that are
        being filled."""
        states, pages = records.states, records.pages
        rows, columns = _written_places(records)
        written = pages[rows, columns]
        self._check(states, pages, written)
        writes = np.full(pages.shape, _NOT_ACQUIRED)
        writes[rows, columns] = written
        own = torch.from_numpy(states)
        to_read, to_write = RecordTable(own, torch.from_numpy(pages)), RecordTable(own, torch.from_numpy(writes))

        def of_layer(layer: int) -> tuple[LayerView, LayerView]:
            self._gate(layer, RecordKind.STATE, states)
            self._gate(layer, RecordKind.PAGE, pages)
            geometry, sections = self._layouts.geometry, self._sections[layer]
            return (
                LayerView(layer, geometry, to_read, sections, writable=False),
                LayerView(layer, geometry, to_write, sections, writable=True),
            )

        return of_layer

    def _check(self, states: Records, pages: Records, written: Records) -> None:
        """Raises IndexError for what is no record of ours, StepDivergence for what may not be touched."""
        self._known(RecordKind.STATE, states)
        self._known(RecordKind.PAGE, pages)
        self._mirror.check_all_writable(RecordKind.STATE, states)
        self._mirror.check_all_readable(RecordKind.PAGE, pages)
        self._mirror.check_all_writable(RecordKind.PAGE, written)

    def _known(self, kind: RecordKind, records: Records) -> None:
        if records.size and not 0 <= records.min() <= records.max() < self._limits[kind]:
            low, high = records.min(), records.max()
            raise IndexError(f"{kind.value} records {low} to {high} of {self._limits[kind]}")


def _written_places(records: BatchRecords) -> tuple[Records, Records]:
    """(row, column) int64 [n] each, of every page that the batch writes."""
    counts = records.end - records.first
    rows = np.repeat(np.arange(len(counts)), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    return rows, records.first[rows] + np.arange(len(rows)) - begins
