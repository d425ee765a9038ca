"""What a transport sidecar is told at its start, as one value through one file descriptor."""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

from sluice_engine.transfer.pull import PullerSettings
from sluice_engine.transfer.verify import VerifyPolicy
from sluice_records import CacheGeometry, CachePrecision, Layouts, PoolPlan, RecordKind, RecordLayout, Section


class SidecarRole(StrEnum):
    """SOURCE pulls nothing and has no writable mapping; READER serves no records and has no metadata; BOTH is both."""

    SOURCE = "source"
    READER = "reader"
    BOTH = "both"


class LayoutSpec(msgspec.Struct, frozen=True):
    """A `RecordLayout` by its fields; the format id is made again from them on the other side."""

    kind: RecordKind
    page_tokens: int
    sections: tuple[Section, ...]
    trailer_offset: int
    trailer_bytes: int
    stride: int

    @staticmethod
    def of(layout: RecordLayout) -> LayoutSpec:
        return LayoutSpec(
            layout.kind,
            layout.page_tokens,
            layout.sections,
            layout.trailer_offset,
            layout.trailer_bytes,
            layout.stride,
        )

    def layout(self) -> RecordLayout:
        return RecordLayout(
            self.kind, self.page_tokens, self.sections, self.trailer_offset, self.trailer_bytes, self.stride
        )


class MemorySpec(msgspec.Struct, frozen=True):
    """The layouts and sizes of the pools in a memory of `create_memory`."""

    geometry: CacheGeometry
    precision: CachePrecision
    page_tokens: int
    page: LayoutSpec
    state: LayoutSpec
    snapshot: LayoutSpec
    plan: PoolPlan

    @staticmethod
    def of(layouts: Layouts, plan: PoolPlan) -> MemorySpec:
        page, state, snapshot = (LayoutSpec.of(layouts[kind]) for kind in RecordKind)
        return MemorySpec(layouts.geometry, layouts.precision, layouts.page_tokens, page, state, snapshot, plan)

    def layouts(self) -> Layouts:
        page, state, snapshot = self.page.layout(), self.state.layout(), self.snapshot.layout()
        return Layouts(self.geometry, self.precision, self.page_tokens, page, state, snapshot)


class SidecarSpec(msgspec.Struct, frozen=True):
    """`incarnation`: leader start id and sidecar start counter, never the same twice. `key`: of the run, 32 bytes.

    `one_host`: every peer is on this machine. `tcp_port_range`: as UCX takes it, "30000-30100"; empty: any.
    """

    memory: MemorySpec
    incarnation: str
    key: bytes
    role: SidecarRole = SidecarRole.BOTH
    verify: VerifyPolicy = VerifyPolicy()
    puller: PullerSettings = PullerSettings()
    one_host: bool = False
    tcp_port_range: str = ""


def encode_spec(spec: SidecarSpec) -> bytes:
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> SidecarSpec:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=SidecarSpec)


def write_spec(spec: SidecarSpec) -> int:
    """A file descriptor to hand to the sidecar as --spec-fd. The caller owns it."""
    fd = os.memfd_create("sluice-sidecar-spec", os.MFD_CLOEXEC)
    os.write(fd, encode_spec(spec))
    return fd


def read_spec(fd: int) -> SidecarSpec:
    """From the start of the file, wherever its offset is: several sidecars may share one."""
    return decode_spec(os.pread(fd, os.fstat(fd).st_size, 0))
