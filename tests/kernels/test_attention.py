"""Sparse attention equals a dense softmax over the keys that are visible, and a prefill has the bits of a decode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sluice_kernels import kv_store
from sluice_kernels.sparse_decode import Selection, WindowSlots, sparse_decode
from sluice_kernels.sparse_prefill import Rings, sparse_prefill, window_keys
from sluice_records import SectionKind

SLIDING, CSA, HCA = range(3)
HEADS, DIM, WINDOW = 4, 32, 8
ENTRIES = 40


def dense(query: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    q, k = query.double(), keys.double()
    weights = torch.cat([q @ k.T, sinks.double()[:, None]], dim=1).softmax(1)[:, :-1]
    return (weights @ k).float()


def window_of(positions: list[int], rows: list[int]) -> WindowSlots:
    wanted = torch.tensor(positions)[:, None] + torch.arange(1 - WINDOW, 1)
    mask = torch.zeros(wanted.shape).masked_fill_(wanted < 0, float("-inf")).unsqueeze(1)
    return WindowSlots(torch.tensor(rows)[:, None], wanted % WINDOW, mask)


def filled(memory: Any, randn: Any, precision: str, positions: list[int], **options: Any) -> tuple[Any, Any, Any]:
    """A memory whose rows hold their last window before and at `positions[row]`, and all entries."""
    m = memory(precision, **options)
    view = m.view(CSA)
    history = randn(3, max(positions) + 1, DIM, seed=1)
    for row, position in enumerate(positions):
        held = range(max(0, position - WINDOW + 1), position + 1)
        if held:
            places = torch.tensor(list(held))
            kv_store.store(
                view, SectionKind.WINDOW_KV, torch.full_like(places, row), places % WINDOW, history[row, places]
            )
    compressed = randn(3 * ENTRIES, DIM, seed=2)
    rows, entries = torch.arange(3).repeat_interleave(ENTRIES), torch.arange(ENTRIES).repeat(3)
    kv_store.store(view, SectionKind.CSA_KV, rows, entries, compressed)
    back = kv_store.load(view, SectionKind.CSA_KV, torch.arange(3)[:, None], torch.arange(ENTRIES)[None])
    past = kv_store.round_trip(view, SectionKind.WINDOW_KV, history.flatten(0, 1)).view_as(history)
    return view, past, back


@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_decode_equals_a_dense_softmax(memory: Any, randn: Any, precision: str, perturbed: bool) -> None:
    positions = [0, 5, 29]
    view, past, back = filled(memory, randn, precision, positions, perturbed=perturbed)
    rng = random.Random(2)
    rows = [n % 3 for n in range(32)]
    at = [positions[r] for r in rows]
    chosen = [sorted(rng.sample(range(ENTRIES), rng.choice((0, 1, 7, 8, 20)))) for _ in rows]
    entries = torch.tensor([c + [-1] * (24 - len(c)) for c in chosen])
    selection = Selection.build(SectionKind.CSA_KV, torch.tensor(rows)[:, None], entries, 8)
    queries, sinks = randn(32, HEADS, DIM, seed=7), randn(HEADS, seed=8)
    found = sparse_decode(view, queries, window_of(at, rows), selection, sinks)
    for n, row in enumerate(rows):
        keys = torch.cat([past[row, max(0, at[n] - WINDOW + 1) : at[n] + 1], back[row, chosen[n]]])
        torch.testing.assert_close(found[n], dense(queries[n], keys, sinks), rtol=1e-5, atol=1e-5)


def test_sliding_layers_have_no_selection(memory: Any, randn: Any) -> None:
    view, past, _ = filled(memory, randn, "fp32", [3, 9, 20])
    queries, sinks = randn(32, HEADS, DIM), randn(HEADS, seed=8)
    rows = [n % 3 for n in range(32)]
    at = [(3, 9, 20)[r] for r in rows]
    found = sparse_decode(view, queries, window_of(at, rows), None, sinks)
    wanted = dense(queries[1], past[1, 2:10], sinks)
    torch.testing.assert_close(found[1], wanted, rtol=1e-5, atol=1e-5)


def test_blocks_that_a_row_does_not_need_change_no_bit(memory: Any, randn: Any) -> None:
    view, _, _ = filled(memory, randn, "fp32", [9, 9, 9])
    rows, at = [0] * 32, [9] * 32
    queries, sinks = randn(32, HEADS, DIM), randn(HEADS, seed=8)
    own = torch.full((32, 24), -1)
    own[:, :3] = torch.tensor([2, 5, 11])
    crowd = own.clone()
    crowd[1:] = torch.arange(24)
    index = torch.tensor(rows)[:, None]
    outputs = [
        sparse_decode(view, queries, window_of(at, rows), Selection.build(SectionKind.CSA_KV, index, e, 8), sinks)
        for e in (own, crowd)
    ]
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][1], outputs[1][1])


def test_a_huge_sink_takes_everything_and_a_tiny_one_nothing(memory: Any, randn: Any) -> None:
    view, past, _ = filled(memory, randn, "fp32", [9, 9, 9])
    queries = randn(32, HEADS, DIM)
    window = window_of([9] * 32, [0] * 32)
    assert sparse_decode(view, queries, window, None, torch.full((HEADS,), 1e4)).abs().max() == 0
    found = sparse_decode(view, queries, window, None, torch.full((HEADS,), -1e4))
    keys = past[0, 2:10]
    torch.testing.assert_close(found[0], (queries[0] @ keys.T).softmax(1) @ keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("start", [0, 3, 8, 13])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30])
def test_a_chunk_has_the_bits_of_single_steps(memory: Any, randn: Any, precision: str, start: int, length: int) -> None:
    """Also where the chunk is longer than the window, whose ring would no longer hold its first keys."""
    queries, sinks = randn(32, HEADS, DIM, seed=7), randn(HEADS, seed=8)
    view, _past, _ = (
        filled(memory, randn, precision, [start - 1, 4, 4]) if start else filled(memory, randn, precision, [0, 4, 4])
    )
    history = randn(3, 50, DIM, seed=1)[0] if start == 0 else randn(3, max(start, 5), DIM, seed=1)[0]
    chunk = torch.cat([history, randn(60, DIM, seed=4)])[start : start + length]
    stored = kv_store.round_trip(view, SectionKind.WINDOW_KV, chunk)
    rings = Rings(torch.tensor([[0]]), torch.arange(WINDOW)[None])
    keys = window_keys(view, rings, stored)
    wanted = torch.arange(start, start + 32)[:, None] + torch.arange(1 - WINDOW, 1)
    own = WINDOW + wanted - start
    sources = torch.where(wanted >= start, own, wanted % WINDOW)
    sources[length:] = 0
    mask = torch.zeros(wanted.shape).masked_fill_(wanted < 0, float("-inf")).unsqueeze(1)
    mask[length:] = 0
    found = sparse_prefill(view, queries, keys, sources, mask, None, sinks)
    for n in range(length):
        place = torch.tensor([start + n])
        kv_store.store(view, SectionKind.WINDOW_KV, torch.tensor([0]), place % WINDOW, chunk[n : n + 1])
        single = sparse_decode(view, queries, window_of([start + n] * 32, [0] * 32), None, sinks)
        assert torch.equal(single[n], found[n]), n
