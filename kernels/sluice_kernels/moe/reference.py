from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sluice_kernels.row_linear import ROW_BLOCK, linear
from sluice_kernels.view import Tensor

# Up to so many experts, all of them run for all tokens: two products instead of a loop. See README.md.
DENSE_EXPERTS = 16


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The shared expert is the last of `experts + 1`. `bias` or `table` says how experts are chosen.

    `router` [experts, d]; `up` [(experts + 1) * 2 * width, d], gate rows then up rows of each expert;
    `down` [experts + 1, d, width]; `down_flat` [d, (experts + 1) * width] is the same, for the dense way.
    """

    router: Tensor
    bias: Tensor | None
    table: Tensor | None
    up: Tensor
    down: Tensor
    down_flat: Tensor | None
    experts: int
    chosen: int
    scaling: float
    limit: float


def moe(x: Tensor, tokens: Tensor, weights: MoeWeights) -> Tensor:
    chosen, share = route(x, tokens, weights)
    if weights.down_flat is not None:
        return _dense(x, chosen, share, weights)
    return _grouped(x, chosen, share, weights)


def route(x: Tensor, tokens: Tensor, weights: MoeWeights) -> tuple[Tensor, Tensor]:
    """(experts [n, k], their shares [n, k])."""
    scores = F.softplus(linear(x, weights.router)).sqrt_()
    if weights.table is not None:
        chosen = weights.table[tokens]
    else:
        # Numbers that are none choose some expert, too; their shares stay what they are, and so does the answer.
        chosen = (scores + weights.bias).nan_to_num(nan=0.0).topk(weights.chosen, dim=-1).indices
    share = scores.gather(1, chosen)
    return chosen, share.div_(share.sum(-1, keepdim=True).add_(1e-20)).mul_(weights.scaling)


def _dense(x: Tensor, chosen: Tensor, share: Tensor, weights: MoeWeights) -> Tensor:
    """An expert that was not chosen has share 0. The last product sums over experts, too."""
    count = weights.experts + 1
    spread = x.new_zeros(x.shape[0], count)
    spread[:, -1] = 1.0
    spread.scatter_add_(1, chosen, share)
    hidden = _swiglu(linear(x, weights.up).unflatten(1, (count, 2, -1)), weights.limit)
    return linear(hidden.mul_(spread.unsqueeze(-1)).flatten(1), weights.down_flat)


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[..., width] of [..., 2, width]."""
    gate, up = gate_up.unbind(-2)
    return F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def _grouped(x: Tensor, chosen: Tensor, share: Tensor, weights: MoeWeights) -> Tensor:
    """Tokens of one expert in row blocks, padded; a token's experts are summed in the order of `chosen`."""
    up = weights.up.unflatten(0, (weights.experts + 1, -1))
    n, k = chosen.shape
    out = x.new_zeros(n * k, weights.down.shape[1])
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=weights.experts).tolist()
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[begin : begin + count]
            out[places] = _expert(x[places // k], up[expert], weights.down[expert], weights.limit)
            begin += count
    routed = out.view(n, k, -1).mul_(share.unsqueeze(-1))
    total = _expert(x, up[-1], weights.down[-1], weights.limit)
    for slot in range(k):
        total += routed[:, slot]
    return total


def _expert(x: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -len(x) % ROW_BLOCK))
    hidden = _swiglu(linear(padded, up).unflatten(1, (2, -1)), limit)
    return linear(hidden, down)[: len(x)]
