"""Softmax over blocks of keys, one after another. A block without a visible key changes no bit of a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sluice_kernels.kv_store import load
from sluice_kernels.view import LayerView, Tensor
from sluice_records import SectionKind

NEG = float("-inf")


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """Where the last `window` tokens of each query are, oldest first.

    `rows` [n, 1], `slots` [n, window] in the ring; `mask` [n, 1, window] is 0, or -inf where no such token exists.
    `sources`, for batches with chunks: [n, window] into what `window_keys` makes; then `slots` is not used.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor
    sources: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rings:
    """All window slots of a batch's rows: `rows` [r, 1], `slots` [r, window]."""

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class SelectionBlock:
    """`entries` [n, block], clamped to ones of the row; `mask` [n, 1, block]; `void` [n, block, 1]: not selected."""

    entries: Tensor
    mask: Tensor
    void: Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries that queries attend, in blocks of a fixed number of columns; at least one block."""

    kind: SectionKind
    rows: Tensor
    blocks: tuple[SelectionBlock, ...]

    @staticmethod
    def build(kind: SectionKind, rows: Tensor, entries: Tensor, block: int) -> Selection:
        """`entries` [n, columns] with -1 for none, columns a multiple of `block`; `rows` [n, 1].

        Blocks without a selected entry are left out: they would change nothing.
        """
        blocks: list[SelectionBlock] = []
        for start in range(0, entries.shape[1], block):
            part = entries[:, start : start + block]
            void = part < 0
            if blocks and bool(void.all()):
                continue
            mask = torch.zeros(part.shape).masked_fill_(void, NEG).unsqueeze(1)
            blocks.append(SelectionBlock(part.clamp(min=0), mask, void.unsqueeze(-1)))
        return Selection(kind, rows, tuple(blocks))

    def keys(self, view: LayerView, number: int) -> tuple[Tensor, Tensor]:
        """(keys [n, block, d], mask). What was not selected reads as zero, whatever lies there."""
        block = self.blocks[number]
        keys = load(view, self.kind, self.rows, block.entries)
        return keys.masked_fill_(block.void, 0.0), block.mask


def attend(queries: Tensor, blocks: Iterator[tuple[Tensor, Tensor]], sinks: Tensor) -> Tensor:
    """`blocks` yields (keys [n, s, d], mask [n, 1, s]); shapes of one position must not depend on the batch."""
    keys, mask = next(blocks)
    logits = torch.bmm(queries, keys.transpose(1, 2)).add_(mask)
    sink = sinks.view(1, -1, 1)
    best = torch.maximum(logits.amax(-1, keepdim=True), sink)
    weights = logits.sub_(best).exp_()
    total = weights.sum(-1, keepdim=True).add_((sink - best).exp_())
    gathered = torch.bmm(weights, keys)
    for keys, mask in blocks:
        logits = torch.bmm(queries, keys.transpose(1, 2)).add_(mask)
        higher = torch.maximum(best, logits.amax(-1, keepdim=True))
        fade = best.sub_(higher).exp_()
        weights = logits.sub_(higher).exp_()
        total = total.mul_(fade).add_(weights.sum(-1, keepdim=True))
        gathered = gathered.mul_(fade).add_(torch.bmm(weights, keys))
        best = higher
    return gathered.div_(total)
