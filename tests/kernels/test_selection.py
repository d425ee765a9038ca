"""Index scores and the selection from them, against plain formulations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_kernels import index_store
from sluice_kernels.index_logits import ENTRY_BLOCK, index_logits
from sluice_kernels.index_topk import index_topk

CSA = 1
HEADS, DIM, COUNT = 5, 16, 48


def filled(memory: Any, randn: Any, precision: str, seed: int = 0, perturbed: bool = False) -> tuple[Any, torch.Tensor]:
    m = memory(f"fp32/{precision}", seed=seed, perturbed=perturbed)
    view = m.view(CSA)
    keys = randn(3, COUNT, DIM, seed=3)
    rows = torch.arange(3).repeat_interleave(COUNT)
    entries = torch.arange(COUNT).repeat(3)
    index_store.store(view, rows, entries, keys.flatten(0, 1))
    return view, index_store.load(view, torch.arange(3)[:, None], torch.arange(COUNT)[None])


def scores_of(view: Any, randn: Any, rows: list[int], visible: list[int], columns: int = 1) -> Any:
    n = len(rows)
    queries, weights = randn(n, HEADS, DIM, seed=5), randn(n, HEADS, seed=6)
    last = torch.tensor(visible)[:, None].sub(1).clamp(min=0)
    blocks = tuple(
        torch.minimum(torch.arange(b * ENTRY_BLOCK, (b + 1) * ENTRY_BLOCK)[None], last) for b in range(columns)
    )
    return queries, weights, index_logits(view, queries, weights, blocks, torch.tensor(rows)[:, None])


@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "fp4"])
def test_scores_equal_the_dense_formula(memory: Any, randn: Any, precision: str, perturbed: bool) -> None:
    view, keys = filled(memory, randn, precision, perturbed=perturbed)
    rng = random.Random(1)
    rows = [rng.randrange(3) for _ in range(32)]
    visible = [rng.randrange(COUNT + 1) for _ in range(32)]
    queries, weights, scores = scores_of(view, randn, rows, visible)
    for n, (row, seen) in enumerate(zip(rows, visible)):
        wanted = (weights[n].double()[:, None] * (queries[n].double() @ keys[row, :seen].double().T).relu()).sum(0)
        torch.testing.assert_close(scores[n, :seen], wanted.float(), rtol=1e-5, atol=1e-5)
    assert scores.isfinite().all()  # what may not be seen is some entry of the row's own, never poison


def test_quantised_keys_select_nearly_the_same(memory: Any, randn: Any) -> None:
    visible = [COUNT] * 32
    chosen = {}
    for precision in ("fp32", "bf16", "fp8", "fp4"):
        view, _ = filled(memory, randn, precision)
        _, _, scores = scores_of(view, randn, [n % 3 for n in range(32)], visible)
        chosen[precision] = [set(row) for row in index_topk(scores, torch.tensor(visible), 12).tolist()]
    overlap = {p: sum(len(a & b) for a, b in zip(chosen["fp32"], c)) / (32 * 12) for p, c in chosen.items()}
    assert overlap["bf16"] >= 0.99
    assert overlap["fp8"] >= 0.9
    assert overlap["fp4"] >= 0.7


def test_scores_do_not_depend_on_company(memory: Any, randn: Any) -> None:
    view, _ = filled(memory, randn, "fp32")
    few = scores_of(view, randn, [1] * 32, [7] * 32)[2]
    many = scores_of(view, randn, [1] + [2] * 31, [7] + [48] * 31, columns=2)[2]
    assert torch.equal(few[0, :7], many[0, :7])


def by_hand(scores: list[float], visible: int, k: int) -> list[int]:
    order = sorted(range(visible), key=lambda e: (-scores[e], e))[:k]
    return sorted(order)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_topk_is_exact_with_ties_to_the_lower_entry(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, 45))
    value = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 3.0, 1e30, -1e30, float("-inf"), 1e-42, -1e-42])
    scores = data.draw(st.lists(st.lists(value, min_size=count, max_size=count), min_size=1, max_size=5))
    visible = data.draw(st.lists(st.integers(0, count), min_size=len(scores), max_size=len(scores)))
    found = index_topk(torch.tensor(scores), torch.tensor(visible), k)
    assert found.shape == (len(scores), min(k, count))
    for row, line in enumerate(found.tolist()):
        wanted = by_hand(scores[row], visible[row], k)
        assert line == wanted + [-1] * (min(k, count) - len(wanted))


def test_nan_is_never_better_than_a_number() -> None:
    scores = torch.tensor([[float("nan"), 1.0, float("nan"), -5.0]])
    assert index_topk(scores, torch.tensor([4]), 2).tolist() == [[1, 3]]
