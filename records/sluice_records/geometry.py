"""What the layout of a cache needs to know of a model, and nothing else of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """Values as in the published `layer_types`."""

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


class GeometryError(ValueError):
    """A dimension that no record can be built for; names the field."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Dimensions in elements, rates in tokens per compressed entry.

    `rope_dim` is the trailing part of `head_dim` that carries the rotary embedding. Rates of layer kinds that do not
    occur are ignored.
    """

    layers: tuple[LayerKind, ...]
    head_dim: int
    rope_dim: int
    index_head_dim: int
    window: int
    csa_rate: int
    hca_rate: int

    def __post_init__(self) -> None:
        for name in ("head_dim", "rope_dim", "index_head_dim", "window", "csa_rate", "hca_rate"):
            if getattr(self, name) <= 0:
                raise GeometryError(f"{name} is {getattr(self, name)}; it must be positive")
        if not self.layers:
            raise GeometryError("layers is empty")
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise GeometryError(f"rope_dim {self.rope_dim} must be even and at most head_dim {self.head_dim}")
        if self.index_head_dim % 2:
            raise GeometryError(f"index_head_dim {self.index_head_dim} must be even")

    @property
    def rates(self) -> tuple[int, ...]:
        """Compress rates that occur, ascending."""
        by_kind = {LayerKind.CSA: self.csa_rate, LayerKind.HCA: self.hca_rate}
        return tuple(sorted({by_kind[kind] for kind in self.layers if kind in by_kind}))

    @property
    def page_multiple(self) -> int:
        """A page must cover a multiple of so many tokens: every rate closes at a page boundary."""
        return math.lcm(*self.rates) if self.rates else 1
