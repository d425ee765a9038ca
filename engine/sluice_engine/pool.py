"""`RecordPool`: an array of records of one layout in shared memory, as bytes. Torch views are built above it.

The memory is a memfd, mapped by the rank that computes in it and by the transport sidecar that moves it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice_records import (
    TRAILER_BYTES,
    Layouts,
    PoolPlan,
    RecordKind,
    RecordLayout,
    Trailer,
    TrailerError,
    record_digest,
    record_digests,
    set_generation,
)

# Records up to this size are digested together, so many at once as are LOT_BYTES in all.
SMALL_BYTES, LOT_BYTES = 16 << 10, 256 << 10
Pools = Mapping[RecordKind, "RecordPool"]


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """Where a pool lies in the engine's one memory area."""

    kind: RecordKind
    offset: int
    nbytes: int


def pool_spans(layouts: Layouts, plan: PoolPlan) -> tuple[PoolSpan, ...]:
    """Pools follow each other, each at a multiple of the system's page size."""
    spans, offset = [], 0
    for kind in RecordKind:
        nbytes = plan[kind] * layouts[kind].stride
        spans.append(PoolSpan(kind, offset, nbytes))
        offset += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return tuple(spans)


def create_memory(layouts: Layouts, plan: PoolPlan, name: str) -> int:
    """File descriptor of zeroed shared memory that holds all pools. The caller owns it."""
    last = pool_spans(layouts, plan)[-1]
    fd = os.memfd_create(f"sluice-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(last.offset + last.nbytes, mmap.PAGESIZE))
    return fd


class RecordPool:
    """Byte-level access by record number; knows offsets only from its layout."""

    def __init__(self, layout: RecordLayout, num_records: int, buffer: NDArray[np.uint8]) -> None:
        """`buffer`: uint8 [num_records * layout.stride], borrowed."""
        if buffer.shape != (num_records * layout.stride,):
            raise ValueError(
                f"pool of {num_records} records wants {num_records * layout.stride} bytes, not {buffer.shape}"
            )
        self.layout = layout
        self.num_records = num_records
        self.buffer = buffer
        self._records: NDArray[np.uint8] = buffer.reshape(num_records, layout.stride)[:, : layout.record_bytes]
        # Small things are read and written through it: numpy's ways are long ones for so few bytes.
        self._memory = buffer.data
        self._twins: dict[str, list[tuple[int, int, int]]] = {}

    def record(self, record: int) -> NDArray[np.uint8]:
        """The record's bytes, trailer included, without the stride's slack. A view."""
        self._start(record)
        view: NDArray[np.uint8] = self._records[record]
        return view

    def memory(self, record: int) -> memoryview:
        """The same bytes as a memoryview: faster for a few of them."""
        start = self._start(record)
        return self._memory[start : start + self.layout.record_bytes]

    def _start(self, record: int) -> int:
        """Its first byte. A negative number would be taken for one from the end."""
        if not 0 <= record < self.num_records:
            raise IndexError(f"{self.layout.kind.value} record {record} of {self.num_records}")
        return record * self.layout.stride

    def zero(self, record: int) -> None:
        """What a life begins with, so that equal content means equal bytes."""
        self._start(record)
        self._records[record] = 0

    def digest(self, record: int, identity: bytes) -> int:
        return record_digest(self.record(record)[: self.layout.trailer_offset], identity)

    def digests(self, records: Sequence[int], identities: Sequence[bytes]) -> list[int]:
        """`digest` of each."""
        size = self.layout.trailer_offset
        if size > SMALL_BYTES:
            return [self.digest(record, identity) for record, identity in zip(records, identities, strict=True)]
        digests: list[int] = []
        lot, memory = max(1, LOT_BYTES // max(1, size)), self._memory
        for at in range(0, len(records), lot):
            payloads = [memory[start : start + size] for start in map(self._start, records[at : at + lot])]
            digests += record_digests(payloads, identities[at : at + lot])
        return digests

    def _trailer_at(self, record: int) -> int:
        return self._start(record) + self.layout.trailer_offset

    def write_trailer(self, record: int, trailer: Trailer) -> None:
        """What a layout's trailer has beyond its fields stays as it is."""
        start = self._trailer_at(record)
        self._memory[start : start + TRAILER_BYTES] = trailer.pack()

    def claim(self, record: int, generation: int) -> None:
        """Its trailer names a new life; all else in it stays. Raises TrailerError where there is none of ours."""
        set_generation(self._memory, self._trailer_at(record), generation)

    def trailer(self, record: int) -> Trailer:
        """Raises TrailerError when the record has none of ours."""
        start = self._trailer_at(record)
        return Trailer.unpack(self._memory[start : start + TRAILER_BYTES])

    def has_trailer(self, record: int, trailer: Trailer) -> bool:
        """Exactly this one; what a layout's trailer has beyond its fields does not count."""
        start = self._trailer_at(record)
        return trailer.is_in(self._memory[start : start + TRAILER_BYTES])

    def difference(self, record: int, wanted: Trailer) -> tuple[str, str] | None:
        """(name of the mismatch, how) of the first field in which its trailer differs from `wanted`; None: in none."""
        if self.has_trailer(record, wanted):
            return None
        try:
            found = self.trailer(record)
        except TrailerError as error:
            return "TrailerMismatch", str(error)
        fields = (
            ("FormatMismatch", found.format_id, wanted.format_id),
            ("GenerationMismatch", found.generation, wanted.generation),
            ("IdentityMismatch", found.identity.hex(), wanted.identity.hex()),
            ("ValidTokensMismatch", found.valid_tokens, wanted.valid_tokens),
            ("DigestMismatch", f"{found.digest:#018x}", f"{wanted.digest:#018x}"),
        )
        name, told, expected = next(field for field in fields if field[1] != field[2])
        return name, f"its trailer says {told}, expected is {expected}"

    def copy_sections(self, record: int, to: RecordPool, to_record: int) -> None:
        """Copy every section that both layouts have (state <-> snapshot: window and overlaps)."""
        twins = self._twins.get(to.layout.format_id)
        if twins is None:
            twins = self._twins[to.layout.format_id] = twin_runs(self.layout, to.layout)
        source, destination = self._start(record), to._start(to_record)
        for ours, theirs, nbytes in twins:
            at = destination + theirs
            to._memory[at : at + nbytes] = self._memory[source + ours : source + ours + nbytes]


def twin_runs(layout: RecordLayout, other: RecordLayout) -> list[tuple[int, int, int]]:
    """(offset here, offset there, bytes) of every section that both have; what adjoins on both sides is one run."""
    runs: list[tuple[int, int, int]] = []
    for key, section in sorted(layout.index.items(), key=lambda entry: entry[1].offset):
        twin = other.index.get(key)
        if twin is None:
            continue
        ours, theirs, nbytes = runs[-1] if runs else (0, 0, 0)
        if (ours + nbytes, theirs + nbytes) == (section.offset, twin.offset) and nbytes:
            runs[-1] = ours, theirs, nbytes + section.nbytes
        else:
            runs.append((section.offset, twin.offset, section.nbytes))
    return runs


def map_pools(fd: int, layouts: Layouts, plan: PoolPlan, *, writable: bool = True) -> dict[RecordKind, RecordPool]:
    """Map the memory of `create_memory`. The mapping lives as long as a pool does."""
    size = os.fstat(fd).st_size
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    whole = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, access), dtype=np.uint8)
    return {
        span.kind: RecordPool(layouts[span.kind], plan[span.kind], whole[span.offset : span.offset + span.nbytes])
        for span in pool_spans(layouts, plan)
    }
