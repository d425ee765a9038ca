"""Rows of KV into and out of records, in whatever format the layout says."""

from __future__ import annotations

from sluice_kernels.kv_store import reference
from sluice_kernels.view import LayerView, Tensor
from sluice_records import SectionKind


def store(view: LayerView, kind: SectionKind, rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """`values` [n, head_dim] at (rows[i], slots[i]); a slot is an entry for kinds that lie in pages."""
    reference.store(view, kind, rows, slots, values)


def load(view: LayerView, kind: SectionKind, rows: Tensor, slots: Tensor) -> Tensor:
    """fp32 [..., head_dim]; `rows` and `slots` broadcast."""
    return reference.load(view, kind, rows, slots)


def round_trip(view: LayerView, kind: SectionKind, values: Tensor) -> Tensor:
    """What `load` would return after `store`, without storing."""
    return reference.round_trip(view, kind, values)
