from __future__ import annotations

from itertools import pairwise

import torch

from sluice_kernels.scales import block_exponents, exponent_bytes, exponents_of, spread
from sluice_kernels.view import LayerView, Tensor
from sluice_records import Plane, SectionKind
from sluice_records.formats import FP4_SCALE_BLOCK

KEYS = SectionKind.INDEX_KEYS
E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(E2M1))


def store(view: LayerView, rows: Tensor, entries: Tensor, keys: Tensor) -> None:
    for plane, encoded in encode(view, keys).items():
        view.scatter(KEYS, plane, rows, entries, encoded)


def load(view: LayerView, rows: Tensor, entries: Tensor) -> Tensor:
    data = view.gather(KEYS, Plane.DATA, rows, entries)
    match data.dtype:
        case torch.float32:
            return data
        case torch.bfloat16:
            return data.float()
        case torch.float8_e4m3fn:
            return data.float() * view.gather(KEYS, Plane.SCALES, rows, entries)
        case _:
            return decode_fp4(data, view.gather(KEYS, Plane.SCALES, rows, entries))


def encode(view: LayerView, keys: Tensor) -> dict[Plane, Tensor]:
    match dtype := view.sections[KEYS, Plane.DATA].dtype:
        case torch.float32 | torch.bfloat16:
            return {Plane.DATA: keys.to(dtype)}
        case torch.float8_e4m3fn:
            scale = keys.float().abs().amax(-1, keepdim=True) / E4M3_MAX
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            return {Plane.DATA: (keys.float() / scale).to(dtype), Plane.SCALES: scale}
        case _:
            data, scales = encode_fp4(keys.float())
            return {Plane.DATA: data, Plane.SCALES: scales}


def encode_fp4(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(two e2m1 codes a byte, low nibble first; ue8m0 per block). Nearest value, ties to the even code."""
    exponents = block_exponents(keys, FP4_SCALE_BLOCK, E2M1[-1])
    scaled = keys / spread(exponents, FP4_SCALE_BLOCK, keys.shape[-1])
    middles = torch.tensor(_MIDDLES)
    # bucketize counts middles below the value; a tie above an odd code must count its middle too.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponent_bytes(exponents)


def decode_fp4(data: Tensor, scales: Tensor) -> Tensor:
    codes = torch.stack([data & 0xF, data >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1))[codes.int()]
    return values * spread(exponents_of(scales), FP4_SCALE_BLOCK, values.shape[-1])
