"""Attention of one query per row over its window, its selected compressed entries and a sink."""

from __future__ import annotations

from sluice_kernels.sparse_decode import reference
from sluice_kernels.sparse_decode.online import Selection, WindowSlots
from sluice_kernels.view import LayerView, Tensor

__all__ = ["Selection", "WindowSlots", "sparse_decode"]


def sparse_decode(
    view: LayerView, queries: Tensor, window: WindowSlots, selection: Selection | None, sinks: Tensor
) -> Tensor:
    """fp32 [n, heads, d]: keys are values; `queries` [n, heads, d] are scaled already; n is a multiple of 32.

    The batch's own KV must be stored already. `sinks` [heads] are logits whose value is zero.
    """
    return reference.sparse_decode(view, queries, window, selection, sinks)
