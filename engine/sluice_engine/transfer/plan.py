"""From granted records to pieces. Pure: shapes and items in, byte ranges out.

A *run* is one descriptor: records that are adjacent on both sides move as one range, so the slack between the strides
inside a run moves too (it belongs to records of the run); after the last record of a run only its `record_bytes` move,
never a byte of the slack behind it. A *piece* is a list of runs of at most `piece_bytes` that is posted as one
transfer. Pieces end at record ends; only a record that is larger than a whole piece is cut (where the transport can).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sluice_engine.pool import RecordPool
from sluice_engine.step import PullItem
from sluice_engine.transfer.errors import PlanRejected
from sluice_protocol.source import PoolInfo
from sluice_records import RecordKind, RecordLayout

PIECE_BYTES = 4 * 1024 * 1024
# Bounds the time that one post takes when records are tiny.
MAX_RUNS = 512


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What a plan needs to know of a pool, on either side. Sizes in bytes."""

    kind: RecordKind
    format_id: str
    stride: int
    record_bytes: int
    num_records: int

    @staticmethod
    def of(pool: RecordPool) -> PoolShape:
        layout = pool.layout
        return PoolShape(layout.kind, layout.format_id, layout.stride, layout.record_bytes, pool.num_records)

    @staticmethod
    def told(info: PoolInfo) -> PoolShape:
        """Raises ValueError for a kind that does not exist."""
        return PoolShape(RecordKind(info.kind), info.format_id, info.stride, info.record_bytes, info.num_records)


def pool_info(layout: RecordLayout, num_records: int, base: int = 0) -> PoolInfo:
    """What a source tells of a pool. `base`: its address in the process that owns the agent; 0 where there is none."""
    return PoolInfo(layout.kind.value, layout.format_id, base, layout.stride, layout.record_bytes, num_records)


Shapes = Mapping[RecordKind, PoolShape]


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` from byte `source` of the source's pool of `kind` to byte `destination` of ours."""

    kind: RecordKind
    source: int
    destination: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer. `touches`: every record of which it moves a byte; `completes`: those whose last byte it moves."""

    lease_id: str
    peer: str
    runs: tuple[Run, ...]
    touches: tuple[PullItem, ...]
    completes: tuple[PullItem, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


def plan_pieces(
    lease_id: str,
    peer: str,
    items: Sequence[PullItem],
    sources: Shapes,
    destinations: Shapes,
    *,
    piece_bytes: int = PIECE_BYTES,
    split_records: bool = True,
) -> tuple[Piece, ...]:
    """Pieces that together move every byte of every item's record exactly once. Raises PlanRejected."""
    check_items(items, sources, destinations)
    cutter = _Cutter(lease_id, peer, piece_bytes, split_records)
    before: PullItem | None = None
    for item in sorted(items, key=lambda item: (item.kind.value, item.source)):
        cutter.place(item, destinations[item.kind], adjacent=before is not None and _follows(before, item))
        before = item
    cutter.flush()
    return tuple(cutter.pieces)


def check_items(items: Iterable[PullItem], sources: Shapes, destinations: Shapes) -> None:
    """Raises PlanRejected with the first thing that is wrong."""
    limits: dict[RecordKind, tuple[int, int]] = {}
    seen: set[tuple[RecordKind, int]] = set()
    for item in items:
        kind = item.kind
        if kind not in limits:
            limits[kind] = _limits(kind, sources.get(kind), destinations.get(kind))
        theirs, ours = limits[kind]
        if not (0 <= item.source < theirs and 0 <= item.destination < ours):
            side, record, count = "source", item.source, theirs
            if 0 <= record < count:
                side, record, count = "destination", item.destination, ours
            raise PlanRejected("RecordOutOfRange", f"{side} {kind.value} record {record} of {count}")
        if (kind, item.destination) in seen:
            raise PlanRejected("DuplicateDestination", f"{kind.value} record {item.destination} twice")
        seen.add((kind, item.destination))


def _limits(kind: RecordKind, source: PoolShape | None, ours: PoolShape | None) -> tuple[int, int]:
    """How many records there are on each side. Raises PlanRejected where they cannot be exchanged."""
    if source is None or ours is None:
        where = "source" if source is None else "destination"
        raise PlanRejected("PoolMissing", f"the {where} has no pool of {kind.value} records")
    _check_shapes(source, ours)
    return source.num_records, ours.num_records


def _check_shapes(source: PoolShape, ours: PoolShape) -> None:
    if source.format_id != ours.format_id:
        detail = f"{ours.kind.value}: source has {source.format_id}, we have {ours.format_id}"
        raise PlanRejected("FormatMismatch", detail)
    if (source.stride, source.record_bytes) != (ours.stride, ours.record_bytes):
        raise PlanRejected(
            "SizeMismatch",
            f"{ours.kind.value}: source has stride {source.stride} and {source.record_bytes} bytes a record,"
            f" we have {ours.stride} and {ours.record_bytes}",
        )


def _follows(before: PullItem, item: PullItem) -> bool:
    return before.kind is item.kind and before.source + 1 == item.source and before.destination + 1 == item.destination


@dataclass(slots=True)
class _Cutter:
    lease_id: str
    peer: str
    piece_bytes: int
    split_records: bool
    pieces: list[Piece] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    touches: list[PullItem] = field(default_factory=list)
    completes: list[PullItem] = field(default_factory=list)
    size: int = 0

    def place(self, item: PullItem, shape: PoolShape, *, adjacent: bool) -> None:
        # A run goes on only where its last byte is the end of the record before, in the piece that is being filled.
        slack = shape.stride - shape.record_bytes if adjacent and self.runs else 0
        joins = adjacent and bool(self.runs)
        if self.runs and (self.size + slack + shape.record_bytes > self.piece_bytes or len(self.runs) >= MAX_RUNS):
            self.flush()
            slack, joins = 0, False
        start = 0
        if self.split_records:
            while shape.record_bytes - start > self.piece_bytes:
                self._new_run(item, shape, start, self.piece_bytes)
                self.touches.append(item)
                self.flush()
                start += self.piece_bytes
        if joins:
            last = self.runs[-1]
            grown = last.nbytes + slack + shape.record_bytes
            self.runs[-1] = Run(last.kind, last.source, last.destination, grown)
            self.size += slack + shape.record_bytes
        else:
            self._new_run(item, shape, start, shape.record_bytes - start)
        self.touches.append(item)
        self.completes.append(item)

    def flush(self) -> None:
        if self.runs:
            piece = Piece(self.lease_id, self.peer, tuple(self.runs), tuple(self.touches), tuple(self.completes))
            self.pieces.append(piece)
        self.runs, self.touches, self.completes, self.size = [], [], [], 0

    def _new_run(self, item: PullItem, shape: PoolShape, start: int, nbytes: int) -> None:
        self.runs.append(
            Run(item.kind, item.source * shape.stride + start, item.destination * shape.stride + start, nbytes)
        )
        self.size += nbytes
