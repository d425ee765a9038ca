"""Norms, rotations, hyper-connections, experts, linears and digests, against their formulas in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_kernels.hyper_connect import HyperWeights, collapse, expand, head
from sluice_kernels.moe import MoeWeights, moe
from sluice_kernels.norm_rope import norm_rope, rms_norm, rotate_
from sluice_kernels.record_digest import record_digest
from sluice_kernels.row_linear import grouped_linear, linear, padded_rows
from sluice_records import record_digest as numpy_digest


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def test_padding_is_the_next_block() -> None:
    assert [padded_rows(n) for n in (0, 1, 31, 32, 33, 64)] == [32, 32, 32, 32, 64, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 3), (64, 54), (96, 130)])
def test_linear_gives_a_row_the_same_bits_anywhere(randn: Any, dtype: Any, inner: int, outer: int) -> None:
    x, weight = randn(96, inner), randn(outer, inner, seed=1).to(dtype)
    found = linear(x, weight)
    close(found, x.to(dtype).double() @ weight.double().T, 1e-5 if dtype is torch.float32 else 0.05)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order], weight), found[order])
    for n in (0, 40, 95):
        alone = torch.zeros(32, inner)
        alone[random.Random(n).randrange(32)] = x[n]
        assert torch.equal(linear(alone, weight)[alone.ne(0).any(1)][0], found[n])


def test_grouped_linear_is_block_diagonal(randn: Any) -> None:
    x, weight = randn(64, 3, 10), randn(3, 5, 10, seed=1)
    wanted = torch.stack([x[:, g].double() @ weight[g].double().T for g in range(3)], dim=1).flatten(1)
    found = grouped_linear(x, weight)
    close(found, wanted)
    assert torch.equal(grouped_linear(x[32:], weight), found[32:])


@pytest.mark.parametrize("shape", [(32, 7), (5, 4, 16), (0, 8), (1, 2)])
def test_rms_norm(randn: Any, shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape), randn(shape[-1], seed=1)
    plain = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    close(rms_norm(x, None, 1e-3), plain)
    close(rms_norm(x, weight, 1e-3), plain * weight)


@pytest.mark.parametrize(("shape", "pairs"), [((6, 8), 2), ((6, 8), 4), ((6, 3, 12), 3), ((0, 8), 2)])
def test_rotation_turns_trailing_pairs_and_back(randn: Any, shape: tuple[int, ...], pairs: int) -> None:
    x, angles = randn(*shape), randn(shape[0], pairs, seed=1) * 9
    turns = torch.polar(torch.ones_like(angles), angles)
    wanted = x.double().clone()
    for n in range(shape[0]):
        for p in range(pairs):
            a = shape[-1] - 2 * pairs + 2 * p
            c, s = angles[n, p].double().cos(), angles[n, p].double().sin()
            first, second = x[n, ..., a].double(), x[n, ..., a + 1].double()
            wanted[n, ..., a], wanted[n, ..., a + 1] = first * c - second * s, second * c + first * s
    found = rotate_(x.clone(), turns)
    close(found, wanted)
    close(rotate_(found.clone(), turns.conj().resolve_conj()), x)
    assert torch.equal(norm_rope(x, None, 1e-6, turns), rotate_(rms_norm(x, None, 1e-6), turns))


def mix_by_hand(x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iters: int) -> Any:
    """One token: streams [N, d]. Straight from facts/deepseek.md 2.7."""
    n, eps = len(x), 1e-6
    flat = x.double().flatten()
    z = fn.double() @ (flat / (flat.square().mean() + 1e-5).sqrt())
    pre = torch.sigmoid(z[:n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[n : 2 * n] * scale[1] + base[n : 2 * n])
    c = (z[2 * n :] * scale[2] + base[2 * n :]).view(n, n).softmax(1) + eps
    c = c / (c.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(1, keepdim=True) + eps)
        c = c / (c.sum(0, keepdim=True) + eps)
    return pre, post, c


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_connections(randn: Any, streams: int, iters: int) -> None:
    rows = (2 + streams) * streams
    fn, scale, base = randn(rows, streams * 6) * 0.5, randn(3, seed=1), randn(rows, seed=2)
    weights = HyperWeights.build(fn, scale, base, streams=streams, iterations=iters, eps=1e-6, rms_eps=1e-5)
    x, y = randn(64, streams, 6, seed=3), randn(64, 6, seed=4)
    inputs, post, comb = collapse(x, weights)
    after = expand(x, y, post, comb)
    for n in (0, 33, 63):
        pre, wanted_post, c = mix_by_hand(x[n], fn, scale, base, iters)
        close(inputs[n], (pre[:, None] * x[n].double()).sum(0))
        close(post[n], wanted_post)
        close(comb[n], c)
        close(after[n], wanted_post[:, None] * y[n].double() + c.T @ x[n].double())
    final = HyperWeights.build(
        fn[:streams], scale[:1], base[:streams], streams=streams, iterations=1, eps=1e-6, rms_eps=1e-5
    )
    pre, _, _ = mix_by_hand(x[5], fn, scale, base, 1)
    close(head(x, final)[5], (pre[:, None] * x[5].double()).sum(0))
    assert torch.equal(collapse(x[32:], weights)[2], comb[32:])


def moe_weights(randn: Any, experts: int, dense: bool, hashed: bool) -> MoeWeights:
    up, down = randn(experts + 1, 2 * 5, 12, seed=1), randn(experts + 1, 12, 5, seed=2)
    g = torch.Generator().manual_seed(3)
    table = torch.stack([torch.randperm(experts, generator=g)[:3] for _ in range(20)])
    return MoeWeights(
        router=randn(experts, 12, seed=4),
        bias=None if hashed else randn(experts, seed=5) * 0.3,
        table=table if hashed else None,
        up=up.flatten(0, 1),
        down=down,
        down_flat=down.permute(1, 0, 2).flatten(1).contiguous() if dense else None,
        experts=experts,
        chosen=3,
        scaling=1.7,
        limit=2.0,
    )


def moe_by_hand(x: torch.Tensor, token: int, w: MoeWeights) -> torch.Tensor:
    x = x.double()
    up = w.up.double().view(w.experts + 1, 2, 5, 12)

    def expert(e: int) -> torch.Tensor:
        gate, lift = up[e, 0] @ x, up[e, 1] @ x
        return w.down[e].double() @ (torch.nn.functional.silu(gate.clamp(max=2.0)) * lift.clamp(-2.0, 2.0))

    scores = torch.nn.functional.softplus(w.router.double() @ x).sqrt()
    chosen = w.table[token] if w.table is not None else (scores + w.bias.double()).topk(3).indices
    share = scores[chosen] / scores[chosen].sum() * 1.7
    return expert(w.experts) + sum(s * expert(int(e)) for s, e in zip(share, chosen))


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("experts", [3, 8, 40])
def test_moe(randn: Any, experts: int, dense: bool, hashed: bool) -> None:
    weights = moe_weights(randn, experts, dense, hashed)
    x, tokens = randn(64, 12) * 2, torch.arange(64) % 20
    found = moe(x, tokens, weights)
    for n in (0, 17, 63):
        close(found[n], moe_by_hand(x[n], int(tokens[n]), weights), 1e-4)
    assert torch.equal(moe(x[32:], tokens[32:], weights), found[32:])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(moe(x[order], tokens[order], weights), found[order])


@given(st.binary(min_size=0, max_size=400), st.binary(min_size=16, max_size=16))
@settings(max_examples=60, deadline=None)
def test_digest_equals_its_definition(data: bytes, identity: bytes) -> None:
    data = data[: len(data) // 4 * 4]
    tensor = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    assert record_digest(tensor, identity) == numpy_digest(data, identity)


def test_digest_equals_its_definition_for_a_large_record() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    assert record_digest(torch.from_numpy(data), bytes(range(16))) == numpy_digest(data, bytes(range(16)))
