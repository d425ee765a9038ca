from __future__ import annotations

import torch

from sluice_kernels.scales import block_exponents, exponent_bytes, exponents_of, spread
from sluice_kernels.view import LayerView, Tensor
from sluice_records import Plane, SectionKind
from sluice_records.formats import KV_SCALE_BLOCK

E4M3_MAX = 448.0


def store(view: LayerView, kind: SectionKind, rows: Tensor, slots: Tensor, values: Tensor) -> None:
    for plane, encoded in encode(view, kind, values).items():
        view.scatter(kind, plane, rows, slots, encoded)


def load(view: LayerView, kind: SectionKind, rows: Tensor, slots: Tensor) -> Tensor:
    data = view.gather(kind, Plane.DATA, rows, slots)
    if data.dtype is torch.float32:
        return data
    if data.dtype is torch.bfloat16:
        return data.float()
    return decode_fp8(data, view.gather(kind, Plane.SCALES, rows, slots), _nope(view))


def round_trip(view: LayerView, kind: SectionKind, values: Tensor) -> Tensor:
    planes = encode(view, kind, values)
    data = planes[Plane.DATA]
    return decode_fp8(data, planes[Plane.SCALES], _nope(view)) if data.dtype is torch.uint8 else data.float()


def _nope(view: LayerView) -> int:
    return view.geometry.head_dim - view.geometry.rope_dim


def encode(view: LayerView, kind: SectionKind, values: Tensor) -> dict[Plane, Tensor]:
    """Planes of `values` [n, head_dim] in the format of this section."""
    section = view.sections[kind, Plane.DATA]
    if section.dtype is not torch.uint8:
        return {Plane.DATA: values.to(section.dtype)}
    data, exponents = encode_fp8(values.float(), _nope(view))
    scales = view.sections[kind, Plane.SCALES]
    padded = torch.zeros(len(values), scales.row, dtype=torch.uint8)
    padded[:, : exponents.shape[1]] = exponents
    return {Plane.DATA: data, Plane.SCALES: padded}


def encode_fp8(values: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """(bytes [n, nope + 2 * rope], ue8m0 [n, blocks]): e4m3 with a power-of-two scale per block, then bf16."""
    exponents = block_exponents(values[:, :nope], KV_SCALE_BLOCK, E4M3_MAX)
    quantised = (values[:, :nope] / spread(exponents, KV_SCALE_BLOCK, nope)).to(torch.float8_e4m3fn)
    rope = values[:, nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([quantised.view(torch.uint8), rope], dim=1), exponent_bytes(exponents)


def decode_fp8(data: Tensor, scales: Tensor, nope: int) -> Tensor:
    """fp32 [..., head_dim] of bytes [..., nope + 2 * rope] and ue8m0 scales, padding of the scale plane included."""
    exponents = exponents_of(scales[..., : -(-nope // KV_SCALE_BLOCK)])
    values = data[..., :nope].view(torch.float8_e4m3fn).float()
    # A copy, for its alignment: what is contiguous already may begin at an odd byte.
    rope = data[..., nope:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    return torch.cat([values * spread(exponents, KV_SCALE_BLOCK, nope), rope], dim=-1)
