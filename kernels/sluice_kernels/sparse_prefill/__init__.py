"""The same attention for chunks of queries, whose own KV is not all in the ring."""

from __future__ import annotations

from sluice_kernels.sparse_decode.online import Rings, Selection, WindowSlots
from sluice_kernels.sparse_prefill import reference
from sluice_kernels.view import LayerView, Tensor

__all__ = ["Rings", "Selection", "WindowSlots", "sparse_prefill", "window_keys"]


def window_keys(view: LayerView, rings: Rings, chunk: Tensor) -> Tensor:
    """[rows * window + tokens, d]: the rings as they are before the batch, then its own KV `chunk` [tokens, d].

    Call it before the batch's KV is stored. `chunk` has gone through the record's precision (`kv_store.round_trip`).
    """
    return reference.window_keys(view, rings, chunk)


def sparse_prefill(
    view: LayerView,
    queries: Tensor,
    keys: Tensor,
    sources: Tensor,
    mask: Tensor,
    selection: Selection | None,
    sinks: Tensor,
) -> Tensor:
    """fp32 [n, heads, d] as `sparse_decode`, with the same bits; the window's keys are `keys[sources]`."""
    return reference.sparse_prefill(view, queries, keys, sources, mask, selection, sinks)
