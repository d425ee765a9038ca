"""One layout: sections lie apart and aligned, budgets are what is allocated, ids tell every difference."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.pool import create_memory, map_pools, pool_spans
from sluice_records import (
    TRAILER_BYTES,
    BudgetError,
    CacheGeometry,
    CachePrecision,
    GeometryError,
    LayerKind,
    Layouts,
    Perturbation,
    Plane,
    PoolPlan,
    RecordKind,
    RecordLayout,
    SectionKind,
    build_layouts,
    plan_pools,
    sequence_cost,
)

FLASH = CacheGeometry(
    layers=(LayerKind.SLIDING, LayerKind.SLIDING, *([LayerKind.CSA, LayerKind.HCA] * 20), LayerKind.CSA),
    head_dim=512,
    rope_dim=64,
    index_head_dim=128,
    window=128,
    csa_rate=4,
    hca_rate=128,
)
PRO = dataclasses.replace(
    FLASH, layers=(LayerKind.HCA, LayerKind.HCA, *([LayerKind.CSA, LayerKind.HCA] * 29), LayerKind.CSA)
)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_sections_lie_apart_aligned_and_inside(any_layouts: Any, data: st.DataObject) -> None:
    layouts: Layouts = data.draw(any_layouts)
    for kind in RecordKind:
        layout = layouts[kind]
        end = 0
        for section in sorted(layout.sections, key=lambda s: s.offset):
            assert section.offset >= end
            assert section.offset % 64 == 0
            assert section.slots > 0
            assert section.row_bytes > 0
            end = section.offset + section.nbytes
        assert end <= layout.trailer_offset
        assert layout.trailer_offset % 4 == 0  # the digest's lanes
        assert layout.trailer_bytes >= TRAILER_BYTES
        assert layout.record_bytes <= layout.stride
        keys = [(s.kind, s.layer, s.plane) for s in layout.sections]
        assert len(set(keys)) == len(keys)
        assert all(layout.section(*key).offset == s.offset for key, s in zip(keys, layout.sections, strict=True))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_the_budget_says_is_what_is_allocated(any_layouts: Any, data: st.DataObject) -> None:
    layouts: Layouts = data.draw(any_layouts)
    states, snapshots, pages = (data.draw(st.integers(0, 3)) for _ in range(3))
    fixed = PoolPlan(0, states, snapshots).nbytes(layouts)
    slack = data.draw(st.integers(0, layouts.page.stride - 1))
    memory = fixed + pages * layouts.page.stride + slack
    if pages == 0:
        with pytest.raises(BudgetError, match=str(fixed + layouts.page.stride)):
            plan_pools(layouts, memory, states=states, snapshots=snapshots)
        return
    plan = plan_pools(layouts, memory, states=states, snapshots=snapshots)
    assert plan == PoolPlan(pages, states, snapshots)
    pools = map_pools(create_memory(layouts, plan, "budget"), layouts, plan)
    allocated = sum(pool.buffer.nbytes for pool in pools.values())
    assert allocated == plan.nbytes(layouts)
    assert memory - layouts.page.stride < allocated <= memory
    assert sum(span.nbytes for span in pool_spans(layouts, plan)) == allocated
    for kind, pool in pools.items():
        for record in range(pool.num_records):
            assert pool.record(record).nbytes == layouts[kind].record_bytes


@given(st.data(), st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_a_sequence_costs_whole_records(any_layouts: Any, data: st.DataObject, tokens: int) -> None:
    layouts: Layouts = data.draw(any_layouts)
    cost = sequence_cost(layouts, tokens)
    assert cost.pages * layouts.page_tokens >= tokens > (cost.pages - 1) * layouts.page_tokens
    assert cost.total == PoolPlan(cost.pages, 1, 1).nbytes(layouts)


def changed(layout: RecordLayout) -> list[RecordLayout]:
    """`layout` with one field of it, or of one of its sections, changed."""
    results = [
        dataclasses.replace(layout, kind=RecordKind.STATE if layout.kind is RecordKind.PAGE else RecordKind.PAGE),
        dataclasses.replace(layout, page_tokens=layout.page_tokens + 1),
        dataclasses.replace(layout, trailer_offset=layout.trailer_offset + 64),
        dataclasses.replace(layout, trailer_bytes=layout.trailer_bytes + 64),
    ]
    for n, section in enumerate(layout.sections):
        other_plane = Plane.SCALES if section.plane is Plane.DATA else Plane.DATA
        for change in (
            {"kind": SectionKind.HCA_BUFFER if section.kind is not SectionKind.HCA_BUFFER else SectionKind.CSA_KV},
            {"layer": section.layer + 1},
            {"plane": other_plane},
            {"slots": section.slots + 1},
            {"row_bytes": section.row_bytes + 1},
            {"dtype": "int8"},
            {"offset": section.offset + 64},
        ):
            sections = list(layout.sections)
            sections[n] = dataclasses.replace(section, **change)  # type: ignore[arg-type]
            results.append(dataclasses.replace(layout, sections=tuple(sections)))
    return results


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_ids_differ_for_any_changed_field(any_layouts: Any, data: st.DataObject) -> None:
    layout = data.draw(any_layouts)[data.draw(st.sampled_from(list(RecordKind)))]
    ids = [layout.format_id, *(other.format_id for other in changed(layout))]
    assert len(set(ids)) == len(ids)
    assert dataclasses.replace(layout).format_id == layout.format_id


def test_equal_sizes_are_not_equal_ids() -> None:
    """bf16 rows and fp32 rows of half the dimension have the same bytes, and so have shuffled sections."""
    one = CacheGeometry((LayerKind.HCA,), 64, 8, 16, 8, 4, 16)
    half = dataclasses.replace(one, head_dim=32)
    wide = build_layouts(one, CachePrecision.parse("bf16"), 16).page
    narrow = build_layouts(half, CachePrecision.parse("fp32"), 16).page
    assert wide.record_bytes == narrow.record_bytes
    assert wide.format_id != narrow.format_id
    two = dataclasses.replace(one, layers=(LayerKind.CSA, LayerKind.CSA))
    shuffled = [build_layouts(two, CachePrecision.parse("fp8"), 16, perturbation=Perturbation(s)).page for s in (1, 4)]
    assert shuffled[0].record_bytes == shuffled[1].record_bytes
    assert shuffled[0].format_id != shuffled[1].format_id
    kinds = build_layouts(one, CachePrecision.parse("bf16"), 16)
    assert len({kinds[k].format_id for k in RecordKind}) == 3


def test_the_stride_is_no_part_of_the_format() -> None:
    """Records travel without the stride's slack: pools of other strides exchange them."""
    small, large = (
        build_layouts(FLASH, CachePrecision.parse("bf16"), 256, stride_align=align).page for align in (256, 65536)
    )
    assert small.stride != large.stride
    assert small.format_id == large.format_id


@pytest.mark.parametrize(
    ("geometry", "precision", "per_token"),
    [
        (FLASH, "bf16", 6880.0),
        (FLASH, "fp8", 3850.25),
        (FLASH, "fp8/fp4", 3514.25),
        (PRO, "bf16", 9848.0),
        (PRO, "fp8", 5511.4375),
        (PRO, "fp8/fp4", 5031.4375),
    ],
)
def test_published_bytes_per_token(geometry: CacheGeometry, precision: str, per_token: float) -> None:
    page = build_layouts(geometry, CachePrecision.parse(precision), 256).page
    assert sum(s.nbytes for s in page.sections) / 256 == per_token
    assert page.record_bytes <= per_token * 256 * 1.02


@pytest.mark.parametrize(
    ("precision", "row", "page"),
    [("fp32", 512, 32768), ("bf16", 256, 16384), ("fp8", 132, 8448), ("fp4", 68, 4352)],
)
def test_published_index_rows(precision: str, row: int, page: int) -> None:
    layout = build_layouts(FLASH, CachePrecision.parse(f"bf16/{precision}"), 256).page
    sections = [s for s in layout.of_layer(2) if s.kind is SectionKind.INDEX_KEYS]
    assert sum(s.row_bytes for s in sections) == row
    assert sum(s.nbytes for s in sections) == page
    assert sections == sorted(sections, key=lambda s: s.offset)  # keys first, then scales


def test_published_window_state_and_snapshot() -> None:
    for precision, window, snapshot_mib in (("bf16", 131072, 5.8), ("fp8", 74752, 3.5)):
        layouts = build_layouts(FLASH, CachePrecision.parse(precision), 256)
        held = [s for s in layouts.state.of_layer(0) if s.kind is SectionKind.WINDOW_KV]
        assert sum(s.nbytes for s in held) == window
        assert layouts.snapshot.record_bytes / 2**20 == pytest.approx(snapshot_mib, abs=0.05)
        assert {(s.kind, s.layer, s.plane) for s in layouts.snapshot.sections} < {
            (s.kind, s.layer, s.plane) for s in layouts.state.sections
        }
    bf16 = build_layouts(FLASH, CachePrecision.parse("bf16"), 256)
    assert bf16.state.record_bytes / 2**20 == pytest.approx(17, abs=0.5)
    assert bf16.page.record_bytes / 2**20 == pytest.approx(1.7, abs=0.05)
    hca = [s for s in bf16.state.sections if s.kind is SectionKind.HCA_BUFFER]
    assert sum(s.nbytes for s in hca) == 20 * 524288


@pytest.mark.parametrize("tokens", [0, -16, 8, 24, 130])
def test_pages_that_cut_a_window_are_refused(tokens: int) -> None:
    geometry = CacheGeometry((LayerKind.CSA, LayerKind.HCA), 32, 8, 16, 8, 4, 16)
    with pytest.raises(GeometryError, match=r"page_tokens.*\[4, 16\]"):
        build_layouts(geometry, CachePrecision(), tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_dim", 0), ("rope_dim", 7), ("rope_dim", 64), ("index_head_dim", 15), ("window", -1), ("layers", ())],
)
def test_geometry_that_no_record_holds_is_named(field: str, value: object) -> None:
    base = CacheGeometry((LayerKind.CSA,), 32, 8, 16, 8, 4, 16)
    with pytest.raises(GeometryError, match=field):
        dataclasses.replace(base, **{field: value})  # type: ignore[arg-type]


def test_fp8_rows_without_anything_to_quantise_are_refused() -> None:
    geometry = CacheGeometry((LayerKind.CSA,), 32, 32, 16, 8, 4, 16)
    with pytest.raises(GeometryError, match="use kv bf16"):
        build_layouts(geometry, CachePrecision.parse("fp8"), 16)
    build_layouts(geometry, CachePrecision.parse("bf16/fp8"), 16)


def test_precisions_parse_and_print() -> None:
    for kv, index in combinations(["fp32", "bf16", "fp8"], 2):
        assert str(CachePrecision.parse(f"{kv}/{index}")) == f"{kv}/{index}"
    assert str(CachePrecision.parse("fp8/fp4")) == "fp8/fp4"
    assert CachePrecision.parse("bf16") == CachePrecision.parse("bf16/bf16")
    for text in ("fp4", "int8", "", "fp8/fp4/x", "/fp8"):
        with pytest.raises(ValueError, match="index keys"):
            CachePrecision.parse(text)
