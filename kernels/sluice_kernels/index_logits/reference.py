from __future__ import annotations

import torch

from sluice_kernels.index_store import load
from sluice_kernels.view import LayerView, Tensor

# Products of a fixed shape, so that a score does not depend on how many entries another row has.
ENTRY_BLOCK = 64


def index_logits(view: LayerView, queries: Tensor, weights: Tensor, blocks: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    heads = weights.unsqueeze(1)
    scores = []
    for entries in blocks:
        keys = load(view, rows, entries)
        dots = torch.bmm(queries, keys.transpose(1, 2)).relu_()
        scores.append(torch.bmm(heads, dots).squeeze(1))
    return scores[0] if len(scores) == 1 else torch.cat(scores, dim=1)
