"""Rows come back from records as they went in, as far as their format carries, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_kernels import index_store, kv_store
from sluice_kernels.index_store.reference import E2M1, decode_fp4, encode_fp4
from sluice_kernels.kv_store.reference import decode_fp8, encode_fp8
from sluice_records import Plane, SectionKind

SLIDING, CSA, HCA = range(3)
PLACES = {SectionKind.WINDOW_KV: SLIDING, SectionKind.CSA_KV: CSA, SectionKind.HCA_KV: HCA}
# Largest relative error of a value: half a step of the mantissa; fp8 also keeps the rope dims in bf16.
ERRORS = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4}


@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("kind", PLACES)
def test_kv_comes_back(memory: Any, randn: Any, ids: Any, kind: SectionKind, precision: str, perturbed: bool) -> None:
    m = memory(precision, perturbed=perturbed)
    view = m.view(PLACES[kind])
    slots = {SectionKind.WINDOW_KV: 8, SectionKind.CSA_KV: 48, SectionKind.HCA_KV: 12}[kind]  # over all six pages
    rows = ids([r for r in range(3) for _ in range(slots)])
    where = ids(list(range(slots)) * 3)
    values = randn(len(rows), 32) * torch.logspace(-3, 3, len(rows))[:, None]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    kv_store.store(view, kind, rows[order], where[order], values[order])
    found = kv_store.load(view, kind, rows, where)
    assert found.dtype is torch.float32
    largest = values.abs().amax(-1, keepdim=True) if precision == "fp8" else values.abs()
    assert ((found - values).abs() <= ERRORS[precision] * largest).all()
    assert torch.equal(found, kv_store.round_trip(view, kind, values))
    assert torch.equal(kv_store.round_trip(view, kind, found), found)
    rope = (found - values)[:, -8:].abs()
    assert (rope <= min(ERRORS[precision], 2.0**-8) * values[:, -8:].abs()).all()
    two_dims = kv_store.load(view, kind, ids([2, 0])[:, None], ids([[5, 1], [0, 7]]))
    assert torch.equal(two_dims[0, 1], found[2 * slots + 1])
    assert m.untouched()


@pytest.mark.parametrize("dim", [2, 16, 30, 32, 64, 96])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "fp4"])
def test_index_keys_come_back(memory: Any, randn: Any, ids: Any, precision: str, dim: int) -> None:
    m = memory(f"fp32/{precision}", index_head_dim=dim)
    view = m.view(CSA)
    rows, entries = ids([0] * 30 + [2] * 30), ids(list(range(30)) + list(range(17, 47)))
    keys = randn(60, dim) * torch.logspace(-2, 2, 60)[:, None]
    index_store.store(view, rows, entries, keys)
    found = index_store.load(view, rows, entries)
    errors = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4, "fp4": 0.25}[precision]
    assert ((found - keys).abs() <= errors * keys.abs().amax(-1, keepdim=True) + 1e-12).all()
    cosine = torch.nn.functional.cosine_similarity(found, keys)
    assert cosine.min() > {"fp32": 0.99999, "bf16": 0.9999, "fp8": 0.995, "fp4": 0.9}[precision]
    assert m.untouched()


def test_nothing_to_store_is_nothing(memory: Any, ids: Any) -> None:
    m = memory("fp8/fp4")
    none = ids([])
    kv_store.store(m.view(CSA), SectionKind.CSA_KV, none, none, torch.zeros(0, 32))
    index_store.store(m.view(CSA), none, none, torch.zeros(0, 16))
    assert kv_store.load(m.view(CSA), SectionKind.CSA_KV, none, none).shape == (0, 32)
    assert all(torch.equal(m.pools[k], m.before[k]) for k in m.pools)


def test_zeros_stay_zeros_in_every_format(memory: Any, ids: Any) -> None:
    for precision in ("fp8/fp8", "fp8/fp4"):
        m = memory(precision)
        view, rows, entries = m.view(CSA), ids([0]), ids([3])
        assert index_store.load(view, rows, entries).eq(0).all()  # never written
        kv_store.store(view, SectionKind.CSA_KV, rows, entries, torch.zeros(1, 32))
        index_store.store(view, rows, entries, torch.zeros(1, 16))
        assert kv_store.load(view, SectionKind.CSA_KV, rows, entries).eq(0).all()
        assert index_store.load(view, rows, entries).eq(0).all()


def test_a_view_acquired_for_reading_cannot_be_written(memory: Any, ids: Any) -> None:
    view = memory().view(CSA, writable=False)
    with pytest.raises(PermissionError, match="acquired for reading"):
        kv_store.store(view, SectionKind.CSA_KV, ids([0]), ids([0]), torch.zeros(1, 32))


def test_pages_beyond_the_table_are_an_error_not_another_record(memory: Any, ids: Any) -> None:
    view = memory().view(CSA)
    with pytest.raises(IndexError):
        kv_store.load(view, SectionKind.CSA_KV, ids([0]), ids([48]))


@given(st.lists(st.floats(-448, 448, width=32), min_size=4, max_size=150))
@settings(max_examples=60, deadline=None)
def test_fp8_blocks_use_the_least_scale_that_does_not_clip(values: list[float]) -> None:
    x = torch.tensor([values])
    data, scales = encode_fp8(torch.cat([x, torch.zeros(1, 4)], dim=1), x.shape[1])
    for block, exponent in zip(x[0].split(64), scales[0].int() - 127):
        largest = block.abs().max().double()
        assert largest <= 448 * 2.0 ** exponent.double()
        assert exponent == -126 or largest > 448 * 2.0 ** (exponent.double() - 1)
    again = decode_fp8(data, scales, x.shape[1])
    assert torch.equal(decode_fp8(*encode_fp8(again, x.shape[1]), x.shape[1]), again)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=80).filter(lambda v: len(v) % 2 == 0))
@settings(max_examples=60, deadline=None)
def test_fp4_takes_the_nearest_code(values: list[float]) -> None:
    x = torch.tensor([values])
    data, scales = encode_fp4(x)
    found = decode_fp4(data, scales)
    grid = torch.tensor([*E2M1, *(-v for v in E2M1)])
    powers = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)[:, : x.shape[1]]
    best = ((x / powers)[..., None] - grid).abs().amin(-1)
    assert torch.equal((x / powers - found / powers).abs(), best)


def test_fp4_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]])
    data, scales = encode_fp4(x)
    assert scales.tolist() == [[127]]
    assert decode_fp4(data, scales).tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]]
    assert data.view(torch.uint8)[0, 0].item() == (0 | 2 << 4)  # low nibble first


def test_planes_lie_apart(memory: Any, ids: Any, randn: Any) -> None:
    """All keys of a page, then all scales: read by hand at the layout's offsets."""
    m = memory("fp32/fp8")
    keys = randn(8, 16)
    index_store.store(m.view(CSA), ids([1] * 8), ids(range(8)), keys)
    page = m.record(m.layouts.page.kind, int(m.pages[1, 0]))
    data = m.layouts.page.section(SectionKind.INDEX_KEYS, CSA)
    scales = m.layouts.page.section(SectionKind.INDEX_KEYS, CSA, Plane.SCALES)
    values = page[data.offset : data.offset + data.nbytes].clone().view(torch.float8_e4m3fn).float().view(8, 16)
    by_hand = values * page[scales.offset : scales.offset + scales.nbytes].clone().view(torch.float32)[:, None]
    assert (by_hand - keys).abs().max() < 0.07 * keys.abs().max()
