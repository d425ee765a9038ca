"""Routing, clipped SwiGLU experts, the shared expert, and their weighted sum."""

from __future__ import annotations

from sluice_kernels.moe import reference
from sluice_kernels.moe.reference import DENSE_EXPERTS, MoeWeights
from sluice_kernels.view import Tensor

__all__ = ["DENSE_EXPERTS", "MoeWeights", "moe"]


def moe(x: Tensor, tokens: Tensor, weights: MoeWeights) -> Tensor:
    """fp32 [n, d] of x fp32 [n, d], n a multiple of the row block; `tokens` [n] are the ids, for hash routing."""
    return reference.moe(x, tokens, weights)
