"""Poisoned record memory, shuffled tables, and views over them, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sluice_kernels.view import LayerView, RecordTable, SectionView
from sluice_records import (
    CacheGeometry,
    CachePrecision,
    LayerKind,
    Layouts,
    Perturbation,
    RecordKind,
    build_layouts,
)

torch.set_num_threads(1)
LAYERS = (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA)
SLIDING, CSA, HCA = range(3)
ROWS, PAGES = 3, 6


class Memory:
    """Records of NaN bytes; those of `ROWS` rows, at shuffled places, are zeroed, as when their lives begin."""

    def __init__(self, precision: str = "fp32", seed: int = 0, perturbed: bool = False, **geometry: Any) -> None:
        dims: dict[str, Any] = {
            "head_dim": 32,
            "rope_dim": 8,
            "index_head_dim": 16,
            "window": 8,
            "csa_rate": 4,
            "hca_rate": 16,
        }
        self.geometry = CacheGeometry(layers=LAYERS, **{**dims, **geometry})
        per = self.geometry.page_multiple
        self.layouts: Layouts = build_layouts(
            self.geometry,
            CachePrecision.parse(precision),
            per * 2 if per == 16 else per,
            perturbation=Perturbation(seed) if perturbed else None,
        )
        g = torch.Generator().manual_seed(seed)
        total = {RecordKind.STATE: 3 * ROWS, RecordKind.PAGE: 3 * ROWS * PAGES}
        self.pools = {
            kind: torch.full((count * self.layouts[kind].stride,), 0xFF, dtype=torch.uint8)
            for kind, count in total.items()
        }
        self.states = torch.randperm(total[RecordKind.STATE], generator=g)[:ROWS]
        self.pages = torch.randperm(total[RecordKind.PAGE], generator=g)[: ROWS * PAGES].view(ROWS, PAGES)
        for kind, records in ((RecordKind.STATE, self.states), (RecordKind.PAGE, self.pages.flatten())):
            for record in records.tolist():
                self.record(kind, record)[:] = 0
        self.before = {kind: pool.clone() for kind, pool in self.pools.items()}

    def record(self, kind: RecordKind, record: int) -> torch.Tensor:
        layout = self.layouts[kind]
        return self.pools[kind][record * layout.stride : record * layout.stride + layout.record_bytes]

    def view(self, layer: int, writable: bool = True) -> LayerView:
        sections = {
            (s.kind, s.plane): SectionView.over(self.pools[kind], self.layouts[kind], s)
            for kind in (RecordKind.STATE, RecordKind.PAGE)
            for s in self.layouts[kind].of_layer(layer)
        }
        return LayerView(layer, self.geometry, RecordTable(self.states, self.pages), sections, writable)

    def untouched(self) -> bool:
        """Whether all memory outside the rows' own records is as it was."""
        for kind, own in ((RecordKind.STATE, self.states), (RecordKind.PAGE, self.pages.flatten())):
            stride = self.layouts[kind].stride
            now, then = self.pools[kind].view(-1, stride), self.before[kind].view(-1, stride)
            others = torch.ones(len(now), dtype=torch.bool)
            others[own] = False
            size = self.layouts[kind].trailer_offset
            if not torch.equal(now[others], then[others]) or not torch.equal(now[:, size:], then[:, size:]):
                return False
        return True


@pytest.fixture
def memory() -> Callable[..., Memory]:
    return Memory


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(name="randn")
def randn_fixture() -> Callable[..., torch.Tensor]:
    return randn


@pytest.fixture
def ids() -> Callable[[Sequence[Any]], torch.Tensor]:
    return lambda values: torch.tensor(values, dtype=torch.int64)
