"""Scores of compressed entries for each query, over the pages of its row."""

from __future__ import annotations

from sluice_kernels.index_logits import reference
from sluice_kernels.index_logits.reference import ENTRY_BLOCK
from sluice_kernels.view import LayerView, Tensor

__all__ = ["ENTRY_BLOCK", "index_logits"]


def index_logits(view: LayerView, queries: Tensor, weights: Tensor, blocks: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    """fp32 [n, ENTRY_BLOCK * len(blocks)]: sum_h weights[n, h] * relu(queries[n, h] . key_e).

    `queries` [n, heads, d]; `blocks` each [n, ENTRY_BLOCK]: entries to score, clamped to what the row has; `rows`
    [n, 1]. n is a multiple of the row block. Scores of entries that a query may not see are meaningless.
    """
    return reference.index_logits(view, queries, weights, blocks, rows)
