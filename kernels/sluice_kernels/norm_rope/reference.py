from __future__ import annotations

import torch

from sluice_kernels.view import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return normed if weight is None else normed.mul_(weight)


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    pairs = turns.shape[-1]
    tail = torch.view_as_complex(x[..., x.shape[-1] - 2 * pairs :].unflatten(-1, (pairs, 2)))
    tail.mul_(turns.view(len(turns), *([1] * (x.dim() - 2)), pairs))
    return x
