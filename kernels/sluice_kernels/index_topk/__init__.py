"""Exact selection of the best-scored visible entries."""

from __future__ import annotations

from sluice_kernels.index_topk import reference
from sluice_kernels.view import Tensor


def index_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """int64 [n, min(k, entries)]: entries e < visible[n] with the k best scores [n, entries], ascending, then -1.

    Of equal scores (-0 equals 0) the lower entry is better; NaN is worst. With at most k visible ones, all of them.
    """
    return reference.index_topk(scores, visible, k)
