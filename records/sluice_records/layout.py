"""`RecordLayout`: the bytes of one record. Allocation, budget, kernels, tiers, transfers, handshake, keys take it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from sluice_records.formats import CachePrecision, KvFormat, Plane, PlaneFormat, align_up, index_planes, kv_planes
from sluice_records.geometry import CacheGeometry, GeometryError, LayerKind
from sluice_records.trailer import TRAILER_BYTES

LAYOUT_VERSION = 1
SECTION_ALIGN = 256
# On a GPU the stride is a multiple of 64 KiB (facts/kernels.md); on a CPU sections' own alignment is enough.
GPU_STRIDE_ALIGN = 64 * 1024
CPU_STRIDE_ALIGN = SECTION_ALIGN


class RecordKind(StrEnum):
    PAGE = "page"
    STATE = "state"
    SNAPSHOT = "snapshot"


class SectionKind(StrEnum):
    """What a section holds. `*_BUFFER`: raw (kv, gate) rows of the compression window that is filling;
    `*_OVERLAP`: the first half of the last full window, which the next one pools too."""

    CSA_KV = "csa_kv"
    INDEX_KEYS = "index_keys"
    HCA_KV = "hca_kv"
    WINDOW_KV = "window_kv"
    CSA_BUFFER = "csa_buffer"
    CSA_OVERLAP = "csa_overlap"
    INDEX_BUFFER = "index_buffer"
    INDEX_OVERLAP = "index_overlap"
    HCA_BUFFER = "hca_buffer"


@dataclass(frozen=True, slots=True)
class Section:
    """`slots` rows of `row_bytes` bytes at `offset` of every record, seen as `dtype`."""

    kind: SectionKind
    layer: int
    plane: Plane
    slots: int
    row_bytes: int
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.row_bytes


@dataclass(frozen=True)
class RecordLayout:
    """Offsets and sizes in bytes. The trailer is the last `trailer_bytes` of `record_bytes`."""

    kind: RecordKind
    page_tokens: int
    sections: tuple[Section, ...]
    trailer_offset: int
    trailer_bytes: int
    stride: int
    index: dict[tuple[SectionKind, int, Plane], Section] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {(s.kind, s.layer, s.plane): s for s in self.sections})

    @property
    def record_bytes(self) -> int:
        return self.trailer_offset + self.trailer_bytes

    @cached_property
    def format_id(self) -> str:
        """32 hex digits over every field, byte order and layout version. Equal ids: interchangeable records."""
        state = hashlib.blake2b(digest_size=16)
        parts = (LAYOUT_VERSION, sys.byteorder, self.kind, self.page_tokens, self.trailer_offset, self.trailer_bytes)
        state.update(repr(parts).encode())
        for s in self.sections:
            state.update(repr((s.kind, s.layer, s.plane, s.slots, s.row_bytes, s.dtype, s.offset)).encode())
        return state.hexdigest()

    @cached_property
    def identity_suffix(self) -> bytes:
        """What every identity of a record of this layout covers beside its tokens."""
        return bytes.fromhex(self.format_id) + self.kind.value.encode()

    def section(self, kind: SectionKind, layer: int, plane: Plane = Plane.DATA) -> Section:
        """Raises KeyError when this record has no such section."""
        return self.index[kind, layer, plane]

    def of_layer(self, layer: int) -> tuple[Section, ...]:
        return tuple(s for s in self.sections if s.layer == layer)


@dataclass(frozen=True, slots=True)
class Perturbation:
    """An odd but valid layout for tests: code that restates a layout instead of taking it fails under it.

    Sections are shuffled by `seed`, gaps and the trailer grow, the stride gets slack.
    """

    seed: int
    gap: int = 3 * 64
    trailer_extra: int = 64
    stride_extra: int = 5 * 256


@dataclass(frozen=True, slots=True)
class Layouts:
    """The three layouts of one engine."""

    geometry: CacheGeometry
    precision: CachePrecision
    page_tokens: int
    page: RecordLayout
    state: RecordLayout
    snapshot: RecordLayout

    def __getitem__(self, kind: RecordKind) -> RecordLayout:
        if kind is RecordKind.PAGE:
            return self.page
        return self.state if kind is RecordKind.STATE else self.snapshot


def build_layouts(
    geometry: CacheGeometry,
    precision: CachePrecision,
    page_tokens: int,
    *,
    stride_align: int = CPU_STRIDE_ALIGN,
    perturbation: Perturbation | None = None,
) -> Layouts:
    """Raises GeometryError when `page_tokens` is no multiple of every rate, or rows have nothing to quantise."""
    if page_tokens <= 0 or page_tokens % geometry.page_multiple:
        raise GeometryError(
            f"page_tokens is {page_tokens}; it must be a positive multiple of {geometry.page_multiple},"
            f" the least common multiple of the compress rates {list(geometry.rates)}"
        )
    if precision.kv is KvFormat.FP8 and geometry.rope_dim == geometry.head_dim:
        raise GeometryError(f"rope_dim is all of head_dim {geometry.head_dim}: fp8 rows keep it in bf16; use kv bf16")
    wanted = {
        RecordKind.PAGE: list(_page_rows(geometry, precision, page_tokens)),
        RecordKind.STATE: list(_state_rows(geometry, precision)),
        RecordKind.SNAPSHOT: list(_snapshot_rows(geometry, precision)),
    }
    page, state, snapshot = (
        _place(kind, page_tokens, rows, stride_align, perturbation) for kind, rows in wanted.items()
    )
    return Layouts(geometry, precision, page_tokens, page, state, snapshot)


# -- which rows a record has ---------------------------------------------------------------------------------------

Rows = tuple[SectionKind, int, int, PlaneFormat]  # kind, layer, slots, format


def _page_rows(geometry: CacheGeometry, precision: CachePrecision, page_tokens: int) -> Iterator[Rows]:
    kv = kv_planes(precision.kv, geometry.head_dim, geometry.rope_dim)
    for layer, kind in enumerate(geometry.layers):
        if kind is LayerKind.CSA:
            slots = page_tokens // geometry.csa_rate
            yield from ((SectionKind.CSA_KV, layer, slots, plane) for plane in kv)
            for plane in index_planes(precision.index_keys, geometry.index_head_dim):
                yield SectionKind.INDEX_KEYS, layer, slots, plane
        elif kind is LayerKind.HCA:
            yield from ((SectionKind.HCA_KV, layer, page_tokens // geometry.hca_rate, plane) for plane in kv)


def _snapshot_rows(geometry: CacheGeometry, precision: CachePrecision) -> Iterator[Rows]:
    for layer, kind in enumerate(geometry.layers):
        for plane in kv_planes(precision.kv, geometry.head_dim, geometry.rope_dim):
            yield SectionKind.WINDOW_KV, layer, geometry.window, plane
        if kind is LayerKind.CSA:
            yield from _raw(SectionKind.CSA_OVERLAP, layer, geometry.csa_rate, geometry.head_dim)
            yield from _raw(SectionKind.INDEX_OVERLAP, layer, geometry.csa_rate, geometry.index_head_dim)


def _state_rows(geometry: CacheGeometry, precision: CachePrecision) -> Iterator[Rows]:
    yield from _snapshot_rows(geometry, precision)
    for layer, kind in enumerate(geometry.layers):
        if kind is LayerKind.CSA:
            # Both halves (this window's and the next one's) of every row.
            yield from _raw(SectionKind.CSA_BUFFER, layer, geometry.csa_rate, 2 * geometry.head_dim)
            yield from _raw(SectionKind.INDEX_BUFFER, layer, geometry.csa_rate, 2 * geometry.index_head_dim)
        elif kind is LayerKind.HCA:
            yield from _raw(SectionKind.HCA_BUFFER, layer, geometry.hca_rate, geometry.head_dim)


def _raw(kind: SectionKind, layer: int, slots: int, width: int) -> Iterator[Rows]:
    """Compressor rows are pooled by a softmax over gates, so both planes stay in fp32 whatever the cache precision."""
    for plane in (Plane.DATA, Plane.GATES):
        yield kind, layer, slots, PlaneFormat(plane, width * 4, "float32")


# -- where they lie ------------------------------------------------------------------------------------------------


def _place(
    kind: RecordKind, page_tokens: int, rows: list[Rows], stride_align: int, perturbation: Perturbation | None
) -> RecordLayout:
    gap, trailer_bytes, stride_extra, align = 0, TRAILER_BYTES, 0, SECTION_ALIGN
    if perturbation is not None:
        random.Random(f"{perturbation.seed}/{kind.value}").shuffle(rows)
        gap, align = perturbation.gap, 64
        trailer_bytes += perturbation.trailer_extra
        stride_extra = perturbation.stride_extra
    sections, offset = [], 0
    for section_kind, layer, slots, plane in rows:
        offset = align_up(offset + gap, align)
        sections.append(Section(section_kind, layer, plane.plane, slots, plane.row_bytes, plane.dtype, offset))
        offset += slots * plane.row_bytes
    trailer_offset = align_up(offset + gap, align)
    stride = align_up(trailer_offset + trailer_bytes + stride_extra, stride_align)
    return RecordLayout(kind, page_tokens, tuple(sections), trailer_offset, trailer_bytes, stride)
