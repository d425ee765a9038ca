from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from sluice_kernels.norm_rope.reference import inverse_rms
from sluice_kernels.row_linear import ROW_BLOCK, linear
from sluice_kernels.view import Tensor

CELLS = 16


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """fp32. `fn` [(2 + N) * N, N * d], `scale` spread over its rows, `base`; `rms_eps` is the norm's, `eps` the mix's.

    `ones_rows`, `ones_columns` [cells, cells] sum rows and columns of a flattened N x N matrix, spread over its cells.
    `cells` is N * N, and zeros up to a multiple of CELLS: a product of odd width has bits that depend on where in the
    block a row lies.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    iterations: int
    eps: float
    rms_eps: float
    ones_rows: Tensor
    ones_columns: Tensor
    floor: Tensor

    @staticmethod
    def build(
        fn: Tensor, scale: Tensor, base: Tensor, *, streams: int, iterations: int, eps: float, rms_eps: float
    ) -> HyperWeights:
        sizes = torch.tensor([streams, streams, streams * streams])[: len(scale)]
        ones, eye = torch.ones(streams, streams), torch.eye(streams)
        spare = -streams * streams % CELLS
        return HyperWeights(
            fn=fn.float(),
            scale=scale.float().repeat_interleave(sizes),
            base=base.float(),
            iterations=iterations,
            eps=eps,
            rms_eps=rms_eps,
            ones_rows=pad(torch.kron(eye, ones), (0, spare, 0, spare)),
            ones_columns=pad(torch.kron(ones, eye), (0, spare, 0, spare)),
            floor=torch.full((streams * streams + spare,), eps),
        )


def collapse(streams: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, _ = streams.shape
    mix = _mix(streams, weights)
    gates = torch.sigmoid(mix[:, : 2 * n])
    pre, post = gates[:, :n] + weights.eps, gates[:, n:] * 2
    comb = torch.softmax(mix[:, 2 * n :].unflatten(1, (n, n)), dim=-1).view(rows, n * n).add_(weights.eps)
    if spare := len(weights.floor) - n * n:
        comb = pad(comb, (0, spare))
    _balance_(comb, weights)
    return _weighted(pre, streams), post, comb[:, : n * n].unflatten(1, (n, n))


def _balance_(comb: Tensor, weights: HyperWeights) -> None:
    """Sinkhorn-Knopp, truncated, ending on columns. A sum with its floor, spread over the cells, is one product.

    `comb` [n, cells] is a multiple of ROW_BLOCK rows; the product takes them block by block as every linear does.
    """
    for start in range(0, comb.shape[0], ROW_BLOCK):
        block = comb[start : start + ROW_BLOCK]
        total = torch.addmm(weights.floor, block, weights.ones_columns)
        block.div_(total)
        for _ in range(weights.iterations - 1):
            block.div_(torch.addmm(weights.floor, block, weights.ones_rows, out=total))
            block.div_(torch.addmm(weights.floor, block, weights.ones_columns, out=total))


def expand(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.bmm(comb.transpose(1, 2), streams).addcmul_(post.unsqueeze(-1), output.unsqueeze(1))


def head(streams: Tensor, weights: HyperWeights) -> Tensor:
    pre = torch.sigmoid(_mix(streams, weights)).add_(weights.eps)
    return _weighted(pre, streams)


def _weighted(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(1)


def _mix(streams: Tensor, weights: HyperWeights) -> Tensor:
    """[n, rows of fn]: the norm has no weight, so it is applied after the product."""
    flat = streams.flatten(1)
    scale = inverse_rms(flat, weights.rms_eps)
    return torch.addcmul(weights.base, linear(flat, weights.fn).mul_(scale), weights.scale)
