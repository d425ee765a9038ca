"""Gated softmax pooling of raw rows into compressed entries, and the update of the state that carries it."""

from __future__ import annotations

from sluice_kernels.compress import reference
from sluice_kernels.compress.plan import CompressPlan, plan_compress
from sluice_kernels.compress.reference import Pooling
from sluice_kernels.view import LayerView, Tensor

__all__ = ["CSA_POOLING", "HCA_POOLING", "INDEX_POOLING", "CompressPlan", "Pooling", "compress", "plan_compress"]

CSA_POOLING = reference.CSA
INDEX_POOLING = reference.INDEX
HCA_POOLING = reference.HCA


def compress(view: LayerView, pooling: Pooling, plan: CompressPlan, kv: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Entries fp32 [windows closed, d], in the plan's order; `view` must be writable in the rows' states.

    `kv`, `gate` fp32 [tokens, width] are the batch's projections, `bias` [rate, width] of positions in a window;
    width is 2 * d with overlap, else d.
    """
    return reference.compress(view, pooling, plan, kv, gate, bias)
