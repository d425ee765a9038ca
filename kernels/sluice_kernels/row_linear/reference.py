from __future__ import annotations

import torch

from sluice_kernels.view import Tensor

# A matrix product of another number of rows may sum in another order; of this many, always, it does not. Elementwise
# loops over a multiple of 32 floats have no scalar tail either, whose exp differs from the vector one in its last bit.
ROW_BLOCK = 32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype is not weight.dtype:
        return linear_of(x.to(weight.dtype), weight).float()
    return linear_of(x, weight)


def linear_of(x: Tensor, weight: Tensor) -> Tensor:
    """In the dtype of both."""
    rows, weight = x.shape[0], weight.t()
    if rows == ROW_BLOCK:
        return torch.mm(x, weight)
    out = x.new_empty(rows, weight.shape[1])
    for start in range(0, rows, ROW_BLOCK):
        torch.mm(x[start : start + ROW_BLOCK], weight, out=out[start : start + ROW_BLOCK])
    return out


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    columns = weight.transpose(1, 2)
    blocks = [
        torch.bmm(x[start : start + ROW_BLOCK].to(weight.dtype).transpose(0, 1), columns).transpose(0, 1)
        for start in range(0, x.shape[0], ROW_BLOCK)
    ]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).flatten(1).float()
