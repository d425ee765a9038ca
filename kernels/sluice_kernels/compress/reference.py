from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice_kernels.compress.plan import CompressPlan
from sluice_kernels.view import LayerView, Tensor
from sluice_records import Plane, SectionKind


@dataclass(frozen=True, slots=True)
class Pooling:
    """The sections that carry one compressor between steps; without `overlap` windows stand alone."""

    buffer: SectionKind
    overlap: SectionKind | None


CSA = Pooling(SectionKind.CSA_BUFFER, SectionKind.CSA_OVERLAP)
INDEX = Pooling(SectionKind.INDEX_BUFFER, SectionKind.INDEX_OVERLAP)
HCA = Pooling(SectionKind.HCA_BUFFER, None)


def compress(view: LayerView, pooling: Pooling, plan: CompressPlan, kv: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    width = kv.shape[1] // (1 if pooling.overlap is None else 2)
    entries = kv.new_empty(0, width)
    if plan.closes:
        windows_kv = _windows(view, pooling.buffer, Plane.DATA, plan, kv)
        windows_gate = _windows(view, pooling.buffer, Plane.GATES, plan, gate).add_(bias)
        if pooling.overlap is not None:
            windows_kv, windows_gate = _overlap(view, pooling.overlap, plan, windows_kv, windows_gate)
        entries = (windows_gate.softmax(1) * windows_kv).sum(1)
    _carry_on(view, pooling.buffer, Plane.DATA, plan, kv)
    _carry_on(view, pooling.buffer, Plane.GATES, plan, gate)
    return entries


def _windows(view: LayerView, buffer: SectionKind, plane: Plane, plan: CompressPlan, raw: Tensor) -> Tensor:
    """[windows, rate, width] raw rows of the windows that close, a copy."""
    if plan.carry.numel():
        slots = torch.arange(plan.rate)
        held = view.gather(buffer, plane, plan.carry[:, None], slots[None])
        raw = torch.cat([raw, held.flatten(0, 1)])
    return raw.index_select(0, plan.sources.flatten()).view(*plan.sources.shape, -1)


def _overlap(
    view: LayerView, overlap: SectionKind, plan: CompressPlan, kv: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    """[windows, 2 * rate, d]: the predecessor's first half of every row, then this window's second half."""
    d = kv.shape[2] // 2
    slots = torch.arange(plan.rate)[None]
    result = []
    for plane, rows, void in ((Plane.DATA, kv, 0.0), (Plane.GATES, gate, float("-inf"))):
        before = torch.empty_like(rows[:, :, :d])
        before[1:] = rows[:-1, :, :d]
        before[plan.first] = view.gather(overlap, plane, plan.first_rows[:, None], slots)
        before[plan.opening] = void
        view.scatter(overlap, plane, *_spread(plan.last_rows, plan.rate), rows[plan.last, :, :d].flatten(0, 1))
        result.append(torch.cat([before, rows[:, :, d:]], dim=1))
    return result[0], result[1]


def _carry_on(view: LayerView, buffer: SectionKind, plane: Plane, plan: CompressPlan, raw: Tensor) -> None:
    if cleared := plan.zero_rows.numel():
        view.scatter(buffer, plane, plan.zero_rows, plan.zero_slots, raw.new_zeros(cleared, raw.shape[1]))
    if plan.put_rows.numel():
        view.scatter(buffer, plane, plan.put_rows, plan.put_slots, raw.index_select(0, plan.put_tokens))


def _spread(rows: Tensor, rate: int) -> tuple[Tensor, Tensor]:
    return rows.repeat_interleave(rate), torch.arange(rate).repeat(len(rows))
