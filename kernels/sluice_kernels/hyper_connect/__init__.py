"""Manifold-constrained hyper-connections: N residual streams, mixed before and after every block."""

from __future__ import annotations

from sluice_kernels.hyper_connect import reference
from sluice_kernels.hyper_connect.reference import HyperWeights
from sluice_kernels.view import Tensor

__all__ = ["HyperWeights", "collapse", "expand", "head"]


def collapse(streams: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    """(block input [n, d], post [n, N], comb [n, N, N]) of streams fp32 [n, N, d]."""
    return reference.collapse(streams, weights)


def expand(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams'_k = post_k * output + sum_j comb[j, k] * streams_j."""
    return reference.expand(streams, output, post, comb)


def head(streams: Tensor, weights: HyperWeights) -> Tensor:
    """[n, d]: the final collapse; `weights` has N rows only."""
    return reference.head(streams, weights)
