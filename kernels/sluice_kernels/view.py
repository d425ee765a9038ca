"""`LayerView`: the sections of one layer together with the table of the records that a batch's rows own.

Pools build views (`sluice_engine.model.views`), behind the gates. Operations address memory as (row, slot) for a row's
state and (row, entry) for its pages; entry e is the e-th compressed entry of the sequence. Only a view knows
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sluice_records import CacheGeometry, Plane, RecordLayout, Section, SectionKind

__all__ = ["PAGE_KINDS", "LayerView", "RecordTable", "SectionView", "Tensor"]

PAGE_KINDS = frozenset({SectionKind.CSA_KV, SectionKind.INDEX_KEYS, SectionKind.HCA_KV})


@dataclass(frozen=True, slots=True)
class SectionView:
    """One section of every record of a pool.

    Memory is seen from the section's start on, in `units` [n, u] of u elements: the largest run that divides row,
    offset and stride, so that any row of any record is `per_row` consecutive units. `dtype` is what rows are read and
    written as; torch copies no rows of 8-bit floats, so units of those are bytes.
    """

    units: Tensor
    dtype: torch.dtype
    per_record: int
    per_row: int
    slots: int

    @staticmethod
    def over(memory: Tensor, layout: RecordLayout, section: Section) -> SectionView:
        """`memory`: uint8, all records of a pool of this layout."""
        dtype = getattr(torch, section.dtype)
        unit = _gcd(section.row_bytes, section.offset, layout.stride)
        typed = memory if dtype.itemsize == 1 else memory.view(dtype)
        elements = unit // dtype.itemsize
        if unit % dtype.itemsize:
            raise ValueError(f"{section} is not aligned to its dtype in a stride of {layout.stride}")
        units = typed.view(-1, elements)[section.offset // unit :]
        return SectionView(units, dtype, layout.stride // unit, section.row_bytes // unit, section.slots)

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.per_row * int(self.units.shape[1])

    def index(self, records: Tensor, slots: Tensor) -> Tensor:
        """Numbers of the first units of rows, any shape; with a last dimension of units where a row has several."""
        first = records * self.per_record + slots * self.per_row
        if self.per_row == 1:
            return first
        return first.unsqueeze(-1) + torch.arange(self.per_row, device=first.device)

    def gather(self, index: Tensor) -> Tensor:
        """Rows at `index` [...]: [..., elements of a row], a copy."""
        shape = index.shape if self.per_row == 1 else index.shape[:-1]
        found = self.units.index_select(0, index.reshape(-1))
        return found.view(*shape, self.row).view(self.dtype)

    def scatter(self, index: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, elements] at `index` [n]; rows of one call are distinct."""
        units = rows.view(self.units.dtype).reshape(-1, self.units.shape[1])
        self.units.index_copy_(0, index.reshape(-1), units)


def _gcd(*values: int) -> int:
    result = 0
    for value in values:
        while value:
            result, value = value, result % value
    return result


@dataclass(frozen=True, slots=True)
class RecordTable:
    """Records of a batch's rows: `states` [rows], `pages` [rows, n] in order of position.

    Columns beyond a row's own pages repeat one of its own, so that a masked read stays within the row's records.
    """

    states: Tensor
    pages: Tensor
    _found: dict[tuple[int, int, int, int, int, bool], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def locate(self, section: SectionView, rows: Tensor, slots: Tensor, *, in_pages: bool) -> Tensor:
        """Index into `section` of (row, slot) pairs; remembered, for all layers of a batch ask the same."""
        key = (id(rows), id(slots), section.per_record, section.per_row, section.slots, in_pages)
        known = self._found.get(key)
        if known is not None:
            return known[2]
        if in_pages:
            page = torch.div(slots, section.slots, rounding_mode="floor")
            records, slot = self.pages[rows, page], slots - page * section.slots
        else:
            records, slot = self.states[rows], slots
        index = section.index(records, slot)
        self._found[key] = (rows, slots, index)
        return index


@dataclass(frozen=True, slots=True)
class LayerView:
    """What a batch may touch of one layer: its sections, for the records of `table` only."""

    layer: int
    geometry: CacheGeometry
    table: RecordTable
    sections: Mapping[tuple[SectionKind, Plane], SectionView]
    writable: bool

    def gather(self, kind: SectionKind, plane: Plane, rows: Tensor, slots: Tensor) -> Tensor:
        """`rows` and `slots` (entries, for sections of pages) broadcast; [..., elements of a row], a copy."""
        section = self.sections[kind, plane]
        return section.gather(self.table.locate(section, rows, slots, in_pages=kind in PAGE_KINDS))

    def scatter(self, kind: SectionKind, plane: Plane, rows: Tensor, slots: Tensor, values: Tensor) -> None:
        if not self.writable:
            raise PermissionError(f"{kind.value} of layer {self.layer} was acquired for reading")
        section = self.sections[kind, plane]
        section.scatter(self.table.locate(section, rows, slots, in_pages=kind in PAGE_KINDS), values)
