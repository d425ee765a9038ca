"""Which records belong to the rows of a rank: one table, patched as rows begin, grow and end. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRecords:
    """Records of a batch's rows, a row of each array per row of the batch.

    `states` int64 [rows]; `pages` int64 [rows, width], width >= 1, in order of position: columns beyond a row's own
    pages repeat its first one, so that a masked read stays within the row's own records. `first`, `end` int64 [rows]:
    the page columns that the batch writes.
    """

    states: Records
    pages: Records
    first: Records
    end: Records


class PageTable:
    """`_pages` int64 [rows, pages], in rows and columns padded as `BatchRecords.pages`. Both dimensions grow."""

    def __init__(self, rows: int = 8, pages: int = 64) -> None:
        self._pages = np.zeros((rows, pages), dtype=np.int64)
        self._states = np.zeros(rows, dtype=np.int64)
        self._counts = np.zeros(rows, dtype=np.int64)

    def bind(self, row: int, state: int, pages: Sequence[int]) -> None:
        self._make_room(row, 0)
        self._states[row], self._counts[row] = state, 0
        self.append(row, pages)

    def append(self, row: int, pages: Sequence[int]) -> None:
        if not pages:
            return
        count = int(self._counts[row])
        self._make_room(row, count + len(pages))
        if not count:
            self._pages[row] = pages[0]
        self._pages[row, count : count + len(pages)] = pages
        self._counts[row] = count + len(pages)

    def free(self, row: int) -> None:
        self._counts[row] = 0

    def num_pages(self, row: int) -> int:
        return int(self._counts[row])

    def take(self, rows: Sequence[int], first: Sequence[int], end: Sequence[int]) -> BatchRecords:
        """Of these rows, each of which has a page; `first`, `end`: the page columns that each writes. A copy."""
        index = np.array(rows, dtype=np.int64)
        width = max(int(self._counts[index].max(initial=0)), 1)
        return BatchRecords(
            self._states[index],
            self._pages[:, :width].take(index, axis=0),
            np.array(first, dtype=np.int64),
            np.array(end, dtype=np.int64),
        )

    def _make_room(self, row: int, pages: int) -> None:
        rows, columns = self._pages.shape
        if row < rows and pages <= columns:
            return
        more_rows, more_columns = _doubled(rows, row + 1) - rows, _doubled(columns, pages) - columns
        self._pages = np.pad(np.pad(self._pages, ((0, 0), (0, more_columns))), ((0, more_rows), (0, 0)))
        self._pages[:, columns:] = self._pages[:, :1]
        self._states, self._counts = np.pad(self._states, (0, more_rows)), np.pad(self._counts, (0, more_rows))


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size
