"""Quantised weights back to float32 when they are loaded. Formats: `../shared/facts/deepseek.md` 2.13."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice_engine.model.errors import BadWeights

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_blocks(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """e4m3 [..., out, in] times its scale [..., out / rows, in / columns] of blocks; edges may be short."""
    rows, columns = block
    wanted = (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    if tuple(scale.shape) != wanted:
        raise BadWeights(f"scale of {name}: has shape {list(scale.shape)}, blocks of {list(block)} ask for {wanted}")
    spread = _scales(name, scale).repeat_interleave(rows, dim=-2)[..., : weight.shape[-2], :]
    return weight.float() * spread.repeat_interleave(columns, dim=-1)[..., : weight.shape[-1]]


def from_fp4(name: str, packed: Tensor, scale: Tensor) -> Tensor:
    """[..., out, in] of bytes [..., out, in / 2], low nibble the even column, a scale per in / scales columns."""
    columns = packed.shape[-1] * 2
    if scale.shape[:-1] != packed.shape[:-1] or scale.shape[-1] == 0 or columns % scale.shape[-1]:
        raise BadWeights(f"scale of {name}: shape {list(scale.shape)} does not divide {[*packed.shape[:-1], columns]}")
    codes = packed.view(torch.uint8)
    table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
    values = table[torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).int()]
    return values * _scales(name, scale).repeat_interleave(columns // scale.shape[-1], dim=-1)


def _scales(name: str, scale: Tensor) -> Tensor:
    """ue8m0 (as float8_e8m0fnu, or plain bytes) or floats, as float32."""
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if scale.dtype not in (torch.float8_e8m0fnu, torch.float32, torch.float16, torch.bfloat16):
        raise BadWeights(f"scale of {name}: is {scale.dtype}; scales are ue8m0, float32, float16 or bfloat16")
    return scale.float()
