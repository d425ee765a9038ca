"""Power-of-two block scales (ue8m0: one byte, exponent + 127) of quantised rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sluice_kernels.view import Tensor

_BIAS = 127
_LEAST = -126  # of normal floats


def block_exponents(values: Tensor, block: int, largest: float) -> Tensor:
    """int32 [..., blocks]: least e with max|block| <= largest * 2^e, exactly; of an all-zero block the least of all.

    `values` fp32 [..., n]; the last block may be short.
    """
    short = -values.shape[-1] % block
    blocks = F.pad(values, (0, short)).unflatten(-1, (-1, block))
    # x / largest <= 2^e: frexp gives mantissa in [0.5, 1), so the exponent is one too high only for powers of two.
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1) / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(mantissa == 0, _LEAST, exponent.clamp(_LEAST, _BIAS)).int()


def exponent_bytes(exponents: Tensor) -> Tensor:
    return (exponents + _BIAS).to(torch.uint8)


def exponents_of(scales: Tensor) -> Tensor:
    return scales.int() - _BIAS


def spread(exponents: Tensor, block: int, width: int) -> Tensor:
    """fp32 [..., width]: 2^exponent for every value of its block."""
    powers = (exponents + _BIAS << 23).view(torch.float32)
    return powers.repeat_interleave(block, dim=-1)[..., :width]
