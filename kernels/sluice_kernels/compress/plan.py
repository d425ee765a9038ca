"""Which windows a batch closes, and where their raw rows are: shared by all layers of one rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sluice_kernels.view import Tensor


@dataclass(frozen=True, slots=True)
class CompressPlan:
    """Index tensors over a batch's runs (row, start, length), each run's tokens being consecutive in the batch.

    A window's raw rows come from `tokens + buffers`: the batch's tokens, then `rate` rows of each run in `carry`, whose
    open window holds rows of earlier steps. `rows`/`entries`: the windows that close, run by run in ascending order.
    """

    rate: int
    rows: Tensor
    entries: Tensor
    starts: Tensor
    sources: Tensor
    carry: Tensor
    first: Tensor
    first_rows: Tensor
    opening: Tensor
    last: Tensor
    last_rows: Tensor
    put_rows: Tensor
    put_slots: Tensor
    put_tokens: Tensor
    zero_rows: Tensor
    zero_slots: Tensor

    @property
    def closes(self) -> bool:
        return bool(self.rows.numel())


def plan_compress(rate: int, runs: Sequence[tuple[int, int, int]]) -> CompressPlan:
    """`runs`: (row, start position, length >= 1) in the order of the batch's tokens; a row occurs once.

    first: numbers of the windows whose predecessor closed in an earlier step (its half lies in the overlap section);
    opening: those that have no predecessor. last: the last window that each run closes. put, zero: buffer slots to fill
    with tokens of the batch, and to clear because their window closed: a state's bytes depend on its tokens only.
    """
    tokens = sum(length for _, _, length in runs)
    rows: list[int] = []
    entries: list[int] = []
    sources: list[list[int]] = []
    carry: list[int] = []
    first: list[int] = []
    last: list[tuple[int, int]] = []
    put: list[tuple[int, int, int]] = []
    zero: list[tuple[int, int]] = []
    base = 0
    for row, start, length in runs:
        end, opened = start + length, start // rate * rate
        closed = range(start // rate, end // rate)
        held = tokens + rate * len(carry) - opened
        if closed:
            if opened < start:
                carry.append(row)
            first.append(len(rows))
            for window in closed:
                places = range(window * rate, (window + 1) * rate)
                sources.append([base + p - start if p >= start else held + p for p in places])
                rows.append(row)
                entries.append(window)
            last.append((len(rows) - 1, row))
            zero.extend((row, slot) for slot in range(end % rate, rate))
        put.extend((row, p % rate, base + p - start) for p in range(max(start, end // rate * rate), end))
        base += length
    opening = [n for n in first if entries[n] == 0]
    return CompressPlan(
        rate=rate,
        rows=_ids(rows),
        entries=_ids(entries),
        starts=_ids([e * rate for e in entries]),
        sources=_ids(sources).view(-1, rate),
        carry=_ids(carry),
        first=_ids(first),
        first_rows=_ids([rows[n] for n in first]),
        opening=_ids(opening),
        last=_ids([n for n, _ in last]),
        last_rows=_ids([row for _, row in last]),
        put_rows=_ids([r for r, _, _ in put]),
        put_slots=_ids([s for _, s, _ in put]),
        put_tokens=_ids([t for _, _, t in put]),
        zero_rows=_ids([r for r, _ in zero]),
        zero_slots=_ids([s for _, s in zero]),
    )


def _ids(values: Sequence[object]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
