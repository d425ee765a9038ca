"""What can go wrong, or be rounded, in the caches of a conversation: edits of a transformers `DynamicCache`.

A page is 16 tokens: 4 index keys and 4 compressed entries in each CSA layer, 1 entry in the HCA layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import DynamicCache

PAGE_TOKENS, CSA_RATE = 16, 4
PAGE = PAGE_TOKENS // CSA_RATE
INDEX, ENTRIES = "indexer", "compressor"
Edit: TypeAlias = "Callable[[DynamicCache], None]"


def _rewrite(cache: DynamicCache, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every CSA layer's [B, T, width] table `name` (INDEX or ENTRIES)."""
    for layer in cache.layers:
        if INDEX in getattr(layer, "compressed_kv", {}) and layer.compressed_kv[name] is not None:
            layer.compressed_kv[name] = change(layer.compressed_kv[name])


def swap_pages(first: int, second: int, *names: str) -> Edit:
    """Exchange two pages in the named tables."""

    def change(rows: Tensor) -> Tensor:
        order = list(range(rows.shape[1]))
        a, b = slice(first * PAGE, (first + 1) * PAGE), slice(second * PAGE, (second + 1) * PAGE)
        order[a], order[b] = order[b], order[a]
        return rows[:, order]

    def edit(cache: DynamicCache) -> None:
        for name in names:
            _rewrite(cache, name, change)

    return edit


def zero_index(cache: DynamicCache) -> None:
    _rewrite(cache, INDEX, torch.zeros_like)


def shift_index(cache: DynamicCache) -> None:
    """Every index key one entry late, as after an off-by-one in a page table."""
    _rewrite(cache, INDEX, lambda rows: rows.roll(1, 1))


def forget_summaries(cache: DynamicCache) -> None:
    """Zero the HCA layer's entries."""
    for layer in cache.layers:
        if set(getattr(layer, "compressed_kv", {})) == {ENTRIES} and layer.compressed_kv[ENTRIES] is not None:
            layer.compressed_kv[ENTRIES] = torch.zeros_like(layer.compressed_kv[ENTRIES])


def forget_window(cache: DynamicCache) -> None:
    """Zero every layer's sliding-window keys."""
    for layer in cache.layers:
        layer.keys = layer.values = torch.zeros_like(layer.keys)


def fp8(rows: Tensor) -> Tensor:
    """e4m3 under one fp32 scale per row."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def fp4(rows: Tensor, block: int = 32) -> Tensor:
    """e2m1 under one power-of-two (ue8m0) scale per block."""
    blocks = rows.unflatten(-1, (-1, block))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 6)))
    size = (blocks / scale).abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (blocks.sign() * (torch.round(size / step) * step).clamp(max=6) * scale).flatten(-2)


def quantise_index(how: Callable[[Tensor], Tensor]) -> Edit:
    return lambda cache: _rewrite(cache, INDEX, how)


def halve(cache: DynamicCache) -> None:
    """Round every window key and compressed entry (CSA and HCA) to bf16."""
    for layer in cache.layers:
        layer.keys = layer.values = layer.keys.bfloat16().float()
        table = getattr(layer, "compressed_kv", {})
        if table.get(ENTRIES) is not None:
            table[ENTRIES] = table[ENTRIES].bfloat16().float()
