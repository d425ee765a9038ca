"""Compressed entries equal a dense pooling of the whole sequence, however it was cut, and states carry just enough."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sluice_kernels.compress import CSA_POOLING, HCA_POOLING, INDEX_POOLING, compress, plan_compress
from sluice_records import Plane, SectionKind

SLIDING, CSA, HCA = range(3)
CASES = {
    "csa": (CSA_POOLING, CSA, 4, 32),
    "index": (INDEX_POOLING, CSA, 4, 16),
    "hca": (HCA_POOLING, HCA, 16, 32),
}


def dense(kv: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, rate: int, overlap: bool) -> torch.Tensor:
    """Straight from the definition, window by window, in float64."""
    kv, gate, bias = kv.double(), gate.double(), bias.double()
    d = kv.shape[1] // (2 if overlap else 1)
    entries = []
    for w in range(len(kv) // rate):
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for j in range(rate):
            t = w * rate + j
            own = slice(d, None) if overlap else slice(None)
            rows.append((kv[t, own], gate[t, own] + bias[j, own]))
            if overlap and w:
                rows.append((kv[t - rate, :d], gate[t - rate, :d] + bias[j, :d]))
        share = torch.stack([g for _, g in rows]).softmax(0)
        entries.append((share * torch.stack([k for k, _ in rows])).sum(0))
    return torch.stack(entries).float() if entries else torch.zeros(0, d)


@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_entries_equal_the_dense_pooling_for_any_cut(memory: Any, randn: Any, case: str, perturbed: bool) -> None:
    pooling, layer, rate, d = CASES[case]
    overlap = pooling.overlap is not None
    width = d * (2 if overlap else 1)
    bias = randn(rate, width, seed=9)
    for seed in range(6):
        rng = random.Random(seed)
        lengths = [rng.choice((0, 1, rate - 1, rate, 3 * rate + 1, 75)) for _ in range(3)]
        raw = [(randn(n, width, seed=10 + r), randn(n, width, seed=20 + r)) for r, n in enumerate(lengths)]
        view = memory(seed=seed, perturbed=perturbed).view(layer)
        found: list[dict[int, torch.Tensor]] = [{}, {}, {}]
        done = [0, 0, 0]
        while done != lengths:
            runs = []
            for row in rng.sample(range(3), 3):
                take = min(rng.choice((0, 1, 1, 2, rate, 2 * rate + 1, 40)), lengths[row] - done[row])
                if take:
                    runs.append((row, done[row], take))
                    done[row] += take
            if not runs:
                continue
            plan = plan_compress(rate, runs)
            kv, gate = (torch.cat([raw[row][p][s : s + n] for row, s, n in runs]) for p in (0, 1))
            entries = compress(view, pooling, plan, kv, gate, bias)
            for row, number, entry in zip(plan.rows.tolist(), plan.entries.tolist(), entries, strict=True):
                assert number not in found[row]
                found[row][number] = entry
            for row in range(3):
                check_state(view, pooling, rate, raw[row], bias, row, done[row])
        for row, (kv, gate) in enumerate(raw):
            wanted = dense(kv, gate, bias, rate, overlap)
            assert sorted(found[row]) == list(range(len(wanted)))
            for number, entry in found[row].items():
                torch.testing.assert_close(entry, wanted[number], rtol=2e-6, atol=2e-6)


def check_state(view: Any, pooling: Any, rate: int, raw: Any, bias: torch.Tensor, row: int, done: int) -> None:
    """Buffers: the open window's rows without bias, zeros beyond. Overlap: the last window's first half, with it."""
    slots = torch.arange(rate)
    rows = torch.full_like(slots, row)
    open_rows = done % rate
    for plane, source in ((Plane.DATA, raw[0]), (Plane.GATES, raw[1])):
        held = view.gather(pooling.buffer, plane, rows, slots)
        assert torch.equal(held[:open_rows], source[done - open_rows : done])
        assert held[open_rows:].eq(0).all()
        if pooling.overlap is None:
            continue
        half = source.shape[1] // 2
        kept = view.gather(pooling.overlap, plane, rows, slots)
        last = done // rate * rate
        wanted = source[last - rate : last, :half] if last else torch.zeros(rate, half)
        if plane is Plane.GATES and last:
            wanted = wanted + bias[:, :half]
        assert torch.equal(kept, wanted)


def test_other_records_are_untouched(memory: Any, randn: Any) -> None:
    m = memory()
    kv, gate = randn(40, 64), randn(40, 64, seed=1)
    runs = [(2, 3, 25), (0, 0, 15)]
    compress(m.view(CSA), CSA_POOLING, plan_compress(4, runs), kv, gate, randn(4, 64, seed=2))
    assert m.untouched()


def test_an_empty_plan_changes_nothing(memory: Any) -> None:
    m = memory()
    none = torch.zeros(0, 64)
    entries = compress(m.view(CSA), CSA_POOLING, plan_compress(4, []), none, none, torch.zeros(4, 64))
    assert entries.shape == (0, 32)
    assert all(torch.equal(m.pools[k], m.before[k]) for k in m.pools)


def test_the_window_of_a_batch_does_not_depend_on_its_neighbours(memory: Any, randn: Any) -> None:
    kv, gate, bias = randn(90, 64), randn(90, 64, seed=1), randn(4, 64, seed=2)
    alone = compress(memory().view(CSA), CSA_POOLING, plan_compress(4, [(1, 0, 33)]), kv[20:53], gate[20:53], bias)
    plan = plan_compress(4, [(0, 0, 20), (1, 0, 33), (2, 0, 37)])
    together = compress(memory(seed=4).view(CSA), CSA_POOLING, plan, kv, gate, bias)
    assert torch.equal(together[plan.rows == 1], alone)


def test_buffers_are_those_of_the_layer(memory: Any, randn: Any) -> None:
    m = memory()
    compress(m.view(HCA), HCA_POOLING, plan_compress(16, [(0, 0, 3)]), randn(3, 32), randn(3, 32), randn(16, 32))
    buffer = m.view(HCA).gather(SectionKind.HCA_BUFFER, Plane.DATA, torch.tensor([0, 0]), torch.tensor([0, 3]))
    assert buffer[0].ne(0).any()
    assert buffer[1].eq(0).all()
