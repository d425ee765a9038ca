from __future__ import annotations

import torch

from sluice_kernels.view import Tensor

_NEVER = torch.iinfo(torch.int64).min


def index_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    count = scores.shape[1]
    entries = torch.arange(count)
    # One integer orders both: the score's bits made monotonic, then the lower entry first. Distinct, so exact.
    bits = (scores.nan_to_num(nan=float("-inf")) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) + (count - entries)
    keys = keys.masked_fill_(entries >= visible[:, None], _NEVER)
    best, chosen = keys.topk(min(k, count), dim=1)
    chosen = chosen.masked_fill_(best == _NEVER, count).sort(dim=1).values
    return chosen.masked_fill_(chosen == count, -1)
