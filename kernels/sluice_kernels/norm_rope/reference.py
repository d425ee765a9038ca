from __future__ import annotations

import torch

from sluice_kernels.view import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x * inverse_rms(x, eps)
    return normed if weight is None else normed.mul_(weight)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the last dimension, kept; a mean of squares takes thrice as long."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    pairs = turns.shape[-1]
    tail = torch.view_as_complex(x[..., x.shape[-1] - 2 * pairs :].unflatten(-1, (pairs, 2)))
    tail.mul_(turns if x.dim() == 2 else turns.view(-1, *([1] * (x.dim() - 2)), pairs))
    return x
