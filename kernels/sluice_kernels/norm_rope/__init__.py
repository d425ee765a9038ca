"""RMS norm, and rotation of the trailing dimensions."""

from __future__ import annotations

from sluice_kernels.norm_rope import reference
from sluice_kernels.view import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Of fp32 x, over the last dimension; without weight the plain norm."""
    return reference.rms_norm(x, weight, eps)


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate, in place, the last 2 * k values of x [n, ..., d] as k adjacent pairs by complex `turns` [n, k]."""
    return reference.rotate_(x, turns)


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, turns: Tensor) -> Tensor:
    """`rotate_(rms_norm(x, weight, eps), turns)`."""
    return reference.rotate_(reference.rms_norm(x, weight, eps), turns)
