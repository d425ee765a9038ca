from __future__ import annotations

from collections.abc import Iterator

import torch

from sluice_kernels.kv_store import load
from sluice_kernels.sparse_decode.online import Selection, WindowSlots, attend
from sluice_kernels.view import LayerView, Tensor
from sluice_records import SectionKind


def sparse_decode(
    view: LayerView, queries: Tensor, window: WindowSlots, selection: Selection | None, sinks: Tensor
) -> Tensor:
    keys = load(view, SectionKind.WINDOW_KV, window.rows, window.slots)
    return attend(queries, with_selection(view, keys, window.mask, selection), sinks)


def with_selection(
    view: LayerView, keys: Tensor, mask: Tensor, selection: Selection | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The window together with the first block of the selection, then the other blocks."""
    if selection is None:
        yield keys, mask
        return
    selected, visible = selection.keys(view, 0)
    yield torch.cat([keys, selected], dim=1), torch.cat([mask, visible], dim=2)
    for number in range(1, len(selection.blocks)):
        yield selection.keys(view, number)
