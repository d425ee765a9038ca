"""Index keys into and out of page records, in whatever format the layout says."""

from __future__ import annotations

from sluice_kernels.index_store import reference
from sluice_kernels.view import LayerView, Tensor


def store(view: LayerView, rows: Tensor, entries: Tensor, keys: Tensor) -> None:
    """`keys` fp32 [n, index_head_dim] as entry entries[i] of row rows[i]."""
    reference.store(view, rows, entries, keys)


def load(view: LayerView, rows: Tensor, entries: Tensor) -> Tensor:
    """fp32 [..., index_head_dim]; `rows` and `entries` broadcast."""
    return reference.load(view, rows, entries)
