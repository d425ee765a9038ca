"""Index tensors of one batch, shared by all its layers. Everything about positions is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sluice_engine.model.config import ModelConfig
from sluice_kernels.compress import CompressPlan, plan_compress
from sluice_kernels.index_logits import ENTRY_BLOCK
from sluice_kernels.row_linear import ROW_BLOCK, padded_rows
from sluice_kernels.sparse_decode import Selection, WindowSlots
from sluice_kernels.sparse_prefill import Rings
from sluice_records import LayerKind, SectionKind

# Columns of a block of selected entries (less where index_topk is less), and of HCA entries.
SELECTION_BLOCK = 64
HCA_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one row, from position `start` on; runs are in the order of the batch's rows.

    `wanted`: which of the tokens' logits are asked for, ascending, counted within the run.
    """

    start: int
    tokens: Sequence[int]
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """ROW_BLOCK tokens of the batch, padding included. `visible`, `entries`: of CSA layers.

    `everything`: the selection where no query sees more than index_topk entries; else None and `entries` are scored.
    """

    tokens: slice
    rows: Tensor
    window: WindowSlots
    visible: Tensor
    entries: tuple[Tensor, ...]
    everything: Selection | None
    hca: Selection | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`count` tokens, padded to a multiple of ROW_BLOCK with token 0 at position 0 of row 0, of no further use.

    `rings`: the batch's rings as they are before it, for chunks; None when every run is one token.
    `put_*`: window slots to fill. `samples`: places of the tokens whose logits are wanted, in batch order.
    """

    count: int
    tokens: Tensor
    positions: Tensor
    blocks: tuple[QueryBlock, ...]
    rings: Rings | None
    put_rows: Tensor
    put_slots: Tensor
    put_tokens: Tensor
    csa: CompressPlan | None
    hca: CompressPlan | None
    samples: Tensor


def plan_batch(config: ModelConfig, runs: Sequence[Run]) -> BatchPlan:
    spans = [(row, run.start, len(run.tokens)) for row, run in enumerate(runs)]
    count = sum(length for _, _, length in spans)
    padded = padded_rows(count)
    tokens = np.zeros(padded, dtype=np.int64)
    tokens[:count] = np.concatenate([np.asarray(run.tokens, dtype=np.int64) for run in runs])
    place = _Places(config.window, spans, padded)
    kinds = set(config.layers)
    blocks = tuple(
        _query_block(config, kinds, place, slice(start, start + ROW_BLOCK)) for start in range(0, padded, ROW_BLOCK)
    )
    begins = np.cumsum([0] + [length for _, _, length in spans])[:-1].tolist()
    return BatchPlan(
        count=count,
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(place.positions),
        blocks=blocks,
        rings=place.rings(),
        put_rows=torch.from_numpy(place.rows[place.put]),
        put_slots=torch.from_numpy(place.positions[place.put] % config.window),
        put_tokens=torch.from_numpy(place.put),
        csa=plan_compress(config.csa_rate, spans) if LayerKind.CSA in kinds else None,
        hca=plan_compress(config.hca_rate, spans) if LayerKind.HCA in kinds else None,
        samples=torch.tensor(
            [b + n for b, run in zip(begins, runs, strict=True) for n in run.wanted], dtype=torch.int64
        ),
    )


class _Places:
    """Rows and positions of the tokens, and where each finds its window."""

    def __init__(self, window: int, spans: Sequence[tuple[int, int, int]], padded: int) -> None:
        self.window = window
        self.rows = np.zeros(padded, dtype=np.int64)
        self.positions = np.zeros(padded, dtype=np.int64)
        first = np.zeros(padded, dtype=np.int64)  # position of the run's first token
        origin = np.zeros(padded, dtype=np.int64)  # that token's place
        number = np.zeros(padded, dtype=np.int64)
        put, base = [], 0
        for n, (row, start, length) in enumerate(spans):
            end = base + length
            self.rows[base:end] = row
            self.positions[base:end] = np.arange(start, start + length)
            first[base:end], origin[base:end], number[base:end] = start, base, n
            put.append(np.arange(max(base, end - window), end))
            base = end
        self.count = base
        self.put = np.concatenate(put)
        self.chunks = any(length > 1 for _, _, length in spans)
        self._run_rows = np.array([row for row, _, _ in spans], dtype=np.int64)
        wanted = self.positions[:, None] + np.arange(1 - window, 1)
        self.mask = np.where(wanted < 0, -np.inf, 0.0).astype(np.float32)
        self.slots = wanted % window
        own = len(spans) * window + origin[:, None] + wanted - first[:, None]
        held = number[:, None] * window + self.slots
        self.sources = np.where(wanted >= first[:, None], own, held)
        self.sources[self.count :] = 0

    def rings(self) -> Rings | None:
        if not self.chunks:
            return None
        rows = torch.from_numpy(self._run_rows)[:, None]
        slots = torch.arange(self.window)[None].expand(len(rows), -1)
        return Rings(rows, slots)

    def windows(self, part: slice) -> WindowSlots:
        return WindowSlots(
            rows=torch.from_numpy(self.rows[part])[:, None],
            slots=torch.from_numpy(self.slots[part]),
            mask=torch.from_numpy(self.mask[part]).unsqueeze(1),
            sources=torch.from_numpy(self.sources[part]) if self.chunks else None,
        )


def _query_block(config: ModelConfig, kinds: set[LayerKind], place: _Places, part: slice) -> QueryBlock:
    window = place.windows(part)
    seen = place.positions[part] + 1
    real = np.arange(part.start, part.stop) < place.count
    visible = np.where(real, seen // config.csa_rate, 0)
    entries: tuple[Tensor, ...] = ()
    everything = hca = None
    if LayerKind.CSA in kinds:
        columns = selection_columns(config, int(visible.max()))
        if visible.max() <= config.index_topk:
            shown = _numbered(visible, columns)
            everything = Selection.build(SectionKind.CSA_KV, window.rows, shown, selection_block(config))
        else:
            entries = _scored(visible)
    if LayerKind.HCA in kinds:
        shown = np.where(real, seen // config.hca_rate, 0)
        columns = max(-(-int(shown.max()) // HCA_BLOCK), 1) * HCA_BLOCK
        hca = Selection.build(SectionKind.HCA_KV, window.rows, _numbered(shown, columns), HCA_BLOCK)
    return QueryBlock(part, window.rows, window, torch.from_numpy(visible), entries, everything, hca)


def selection_block(config: ModelConfig) -> int:
    return min(config.index_topk, SELECTION_BLOCK)


def selection_columns(config: ModelConfig, visible: int) -> int:
    """Columns that hold the selection of a query that sees `visible` entries: a multiple of the block."""
    block = selection_block(config)
    return max(-(-min(config.index_topk, visible) // block), 1) * block


def _numbered(visible: np.ndarray, columns: int) -> Tensor:  # type: ignore[type-arg]
    """[n, columns]: 0, 1, … as far as visible, then -1."""
    numbers = np.arange(columns)
    return torch.from_numpy(np.where(numbers < visible[:, None], numbers, -1))


def _scored(visible: np.ndarray) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
    last = np.maximum(visible - 1, 0)[:, None]
    starts = range(0, int(visible.max()), ENTRY_BLOCK)
    return tuple(torch.from_numpy(np.minimum(np.arange(s, s + ENTRY_BLOCK), last)) for s in starts)
