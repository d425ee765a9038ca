"""Hyper-connections: against a plain Sinkhorn-Knopp, and the same bits wherever in a block a row lies."""

from __future__ import annotations

import pytest
import torch

from sluice_kernels.hyper_connect import HyperWeights
from sluice_kernels.hyper_connect.reference import collapse, expand, head

ROWS, WIDTH, ITERATIONS, EPS = 32, 64, 5, 1e-6


def weights_of(streams: int, generator: torch.Generator) -> HyperWeights:
    rows = (2 + streams) * streams
    return HyperWeights.build(
        torch.randn(rows, streams * WIDTH, generator=generator) * 0.2,
        torch.randn(3, generator=generator),
        torch.randn(rows, generator=generator),
        streams=streams,
        iterations=ITERATIONS,
        eps=EPS,
        rms_eps=1e-6,
    )


def parts(x: torch.Tensor, output: torch.Tensor, weights: HyperWeights) -> dict[str, torch.Tensor]:
    pre, post, comb = collapse(x, weights)
    return {"pre": pre, "post": post, "comb": comb, "expanded": expand(x, output, post, comb)}


@pytest.mark.parametrize("streams", range(1, 9))
def test_bits_of_a_row_do_not_depend_on_its_place(streams: int) -> None:
    generator = torch.Generator().manual_seed(streams)
    weights = weights_of(streams, generator)
    x = torch.randn(ROWS, streams, WIDTH, generator=generator)
    output = torch.randn(ROWS, WIDTH, generator=generator)
    there = parts(x, output, weights)
    for shift in range(1, ROWS):
        here = parts(x.roll(shift, 0), output.roll(shift, 0), weights)
        for name, value in there.items():
            assert torch.equal(here[name], value.roll(shift, 0)), (name, shift)


@pytest.mark.parametrize("streams", range(1, 9))
def test_the_combination_is_balanced_as_sinkhorn_and_knopp_say(streams: int) -> None:
    generator = torch.Generator().manual_seed(streams)
    weights = weights_of(streams, generator)
    x = torch.randn(ROWS, streams, WIDTH, generator=generator)
    flat = x.flatten(1).double()
    mix = flat @ weights.fn.double().T / (flat.square().mean(1, keepdim=True) + weights.rms_eps).sqrt()
    mix = mix * weights.scale.double() + weights.base.double()
    comb = torch.softmax(mix[:, 2 * streams :].view(ROWS, streams, streams), dim=-1) + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    assert (collapse(x, weights)[2] - comb).abs().max().item() < 1e-5


def test_the_head_is_a_sum_of_gated_streams() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = HyperWeights.build(
        torch.randn(3, 3 * WIDTH, generator=generator) * 0.2,
        torch.randn(1, generator=generator),
        torch.randn(3, generator=generator),
        streams=3,
        iterations=1,
        eps=EPS,
        rms_eps=1e-6,
    )
    x = torch.randn(ROWS, 3, WIDTH, generator=generator)
    flat = x.flatten(1).double()
    mix = flat @ weights.fn.double().T / (flat.square().mean(1, keepdim=True) + weights.rms_eps).sqrt()
    gates = torch.sigmoid(mix * weights.scale.double() + weights.base.double()) + EPS
    assert (head(x, weights) - (gates.unsqueeze(-1) * x).sum(1)).abs().max().item() < 1e-4
