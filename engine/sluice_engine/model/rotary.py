"""Rotary turns cos + i sin for positions, computed once per block of positions and remembered."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sluice_engine.model.config import Rope

# Tables grow by so many positions, so that the bits of a position's turn do not depend on the order of requests.
_GROWTH = 4096


def frequencies(rope: Rope, dims: int) -> Tensor:
    """fp32 [dims / 2] radians per position; YaRN blends from as trained (fast dims) to divided by `factor`."""
    powers = rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    plain = 1.0 / powers
    yarn = rope.yarn
    if yarn is None:
        return plain
    turns = [
        dims * math.log(yarn.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
        for beta in (yarn.beta_fast, yarn.beta_slow)
    ]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dims - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return (1.0 / (yarn.factor * powers)) * ramp + plain * (1 - ramp)


class RotaryTable:
    def __init__(self, rope: Rope, dims: int) -> None:
        self._frequencies = frequencies(rope, dims)
        self._turns = torch.empty(0, dims // 2, dtype=torch.complex64)

    def at(self, positions: Tensor) -> Tensor:
        """complex64 [n, dims / 2] for int64 positions [n]."""
        highest = int(positions.max()) if positions.numel() else 0
        while highest >= self._turns.shape[0]:
            first = self._turns.shape[0]
            angles = torch.arange(first, first + _GROWTH).float()[:, None] * self._frequencies
            self._turns = torch.cat([self._turns, torch.complex(angles.cos(), angles.sin())])
        return self._turns.index_select(0, positions)
