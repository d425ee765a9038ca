from __future__ import annotations

import pytest
from hypothesis import strategies as st

from sluice_records import (
    CacheGeometry,
    CachePrecision,
    IndexFormat,
    KvFormat,
    LayerKind,
    Layouts,
    Perturbation,
    build_layouts,
)


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    head = draw(st.sampled_from([2, 16, 32, 36, 64, 512]))
    csa = draw(st.sampled_from([1, 2, 4, 8]))
    return CacheGeometry(
        layers=tuple(draw(st.lists(st.sampled_from(list(LayerKind)), min_size=1, max_size=6))),
        head_dim=head,
        rope_dim=draw(st.integers(1, head // 2)) * 2,
        index_head_dim=draw(st.sampled_from([2, 16, 30, 32, 128])),
        window=draw(st.integers(1, 40)),
        csa_rate=csa,
        hca_rate=draw(st.sampled_from([1, 3, 16, 128])),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layouts:
    geometry = draw(geometries())
    kv = [f for f in KvFormat if f is not KvFormat.FP8 or geometry.rope_dim < geometry.head_dim]
    return build_layouts(
        geometry,
        CachePrecision(draw(st.sampled_from(kv)), draw(st.sampled_from(list(IndexFormat)))),
        geometry.page_multiple * draw(st.integers(1, 4)),
        stride_align=draw(st.sampled_from([256, 64 * 1024])),
        perturbation=draw(st.none() | st.integers(0, 99).map(Perturbation)),
    )


@pytest.fixture(scope="session")
def any_layouts() -> st.SearchStrategy[Layouts]:
    return layouts()
