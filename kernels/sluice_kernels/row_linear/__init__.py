"""Linear maps whose bits for a row depend on that row only."""

from __future__ import annotations

from sluice_kernels.row_linear import reference
from sluice_kernels.row_linear.reference import ROW_BLOCK
from sluice_kernels.view import Tensor

__all__ = ["ROW_BLOCK", "grouped_linear", "linear", "padded_rows"]


def padded_rows(rows: int) -> int:
    """The least multiple of ROW_BLOCK (at least one) that holds `rows`."""
    return max(-(-rows // ROW_BLOCK), 1) * ROW_BLOCK


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [n, out] = x [n, in] @ weight [out, in]^T, n a multiple of ROW_BLOCK. Computed in the weight's dtype."""
    return reference.linear(x, weight)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [n, groups * out]: group g of x [n, groups, in] through weight [groups, out, in]."""
    return reference.grouped_linear(x, weight)
