from __future__ import annotations

import torch

from sluice_kernels.kv_store import load
from sluice_kernels.sparse_decode.online import Rings, Selection, attend
from sluice_kernels.sparse_decode.reference import with_selection
from sluice_kernels.view import LayerView, Tensor
from sluice_records import SectionKind


def window_keys(view: LayerView, rings: Rings, chunk: Tensor) -> Tensor:
    held = load(view, SectionKind.WINDOW_KV, rings.rows, rings.slots)
    return torch.cat([held.flatten(0, 1), chunk])


def sparse_prefill(
    view: LayerView,
    queries: Tensor,
    keys: Tensor,
    sources: Tensor,
    mask: Tensor,
    selection: Selection | None,
    sinks: Tensor,
) -> Tensor:
    near = keys.index_select(0, sources.flatten()).view(*sources.shape, -1)
    return attend(queries, with_selection(view, near, mask, selection), sinks)
