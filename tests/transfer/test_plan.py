"""Plans: every byte of every record once, never a byte outside."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_double import PAGE, STATE

from sluice_engine.step import PullItem
from sluice_engine.transfer.errors import PlanRejected
from sluice_engine.transfer.plan import MAX_RUNS, PIECE_BYTES, Piece, PoolShape, Run, plan_pieces
from sluice_records import RecordKind


def shape(kind: RecordKind = PAGE, stride: int = 16, record_bytes: int = 13, num_records: int = 60) -> PoolShape:
    return PoolShape(kind, f"format of {kind.value}", stride, record_bytes, num_records)


def pull(source: int, destination: int, kind: RecordKind = PAGE) -> PullItem:
    return PullItem(kind, source, 1, destination, b"i" * 16, 0, 8)


def planned(items: list[PullItem], piece_bytes: int, pool: PoolShape, *, split: bool = True) -> tuple[Piece, ...]:
    shapes = {PAGE: pool, STATE: replace(pool, kind=STATE)}
    return plan_pieces("l", "p", items, shapes, shapes, piece_bytes=piece_bytes, split_records=split)


ITEMS = st.lists(
    st.tuples(st.sampled_from([PAGE, STATE]), st.integers(0, 59), st.integers(0, 59)),
    max_size=40,
    unique_by=lambda t: (t[0], t[2]),
).map(lambda pairs: [pull(source, destination, kind) for kind, source, destination in pairs])
RUNS_OF_NEIGHBOURS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(1, 9)), max_size=5).map(
    lambda runs: list({d: pull(s + i, d) for s, at, n in runs for i in range(n) for d in [at * 10 + i]}.values())
)


@given(
    items=ITEMS | RUNS_OF_NEIGHBOURS,
    piece_bytes=st.integers(1, 100),
    record_bytes=st.integers(1, 16),
    split=st.booleans(),
)
def test_every_byte_of_every_record_moves_once_and_none_outside(
    items: list[PullItem], piece_bytes: int, record_bytes: int, split: bool
) -> None:
    pool = shape(record_bytes=record_bytes)
    pieces = planned(items, piece_bytes, pool, split=split)
    moved: Counter[tuple[RecordKind, int, int]] = Counter()
    for piece in pieces:
        for run in piece.runs:
            moved.update((run.kind, run.source + i, run.destination + i) for i in range(run.nbytes))
    wanted = {(it.kind, it.source * 16 + i, it.destination * 16 + i) for it in items for i in range(pool.record_bytes)}
    assert all(moved[byte] == 1 for byte in wanted)
    # What moves beside is the slack between two records of one run, and nothing else.
    slack = {
        (it.kind, it.source * 16 + i, it.destination * 16 + i) for it in items for i in range(pool.record_bytes, 16)
    }
    assert all(byte in slack and count == 1 for byte, count in moved.items() if byte not in wanted)
    pairs = {(it.kind, it.source, it.destination) for it in items}
    for kind, source, destination in moved.keys() - wanted:
        assert (kind, source // 16 + 1, destination // 16 + 1) in pairs


@given(items=ITEMS | RUNS_OF_NEIGHBOURS, piece_bytes=st.integers(1, 100), split=st.booleans())
def test_pieces_are_small_and_name_exactly_what_they_touch_and_complete(
    items: list[PullItem], piece_bytes: int, split: bool
) -> None:
    pool = shape()
    pieces = planned(items, piece_bytes, pool, split=split)
    assert Counter(it for piece in pieces for it in piece.completes) == Counter(items)
    missing = Counter(dict.fromkeys(items, pool.record_bytes))
    for piece in pieces:
        assert piece.nbytes <= (piece_bytes if split else max(piece_bytes, pool.record_bytes))
        assert set(piece.completes) <= set(piece.touches)
        landing = {(run.kind, run.destination + i) for run in piece.runs for i in range(run.nbytes)}
        for it in items:
            mine = sum((it.kind, it.destination * 16 + i) in landing for i in range(pool.record_bytes))
            missing[it] -= mine
            assert bool(mine) == (it in piece.touches)
        assert all((missing[it] == 0) == (it in piece.completes) for it in piece.touches)


def test_neighbours_on_both_sides_are_one_descriptor() -> None:
    (piece,) = planned([pull(3, 7), pull(4, 8), pull(5, 9)], PIECE_BYTES, shape())
    assert piece.runs == (Run(PAGE, 3 * 16, 7 * 16, 2 * 16 + 13),)


@pytest.mark.parametrize("second", [(4, 9), (5, 8)])
def test_neighbours_on_one_side_only_are_two(second: tuple[int, int]) -> None:
    (piece,) = planned([pull(3, 7), pull(*second)], PIECE_BYTES, shape())
    assert len(piece.runs) == 2


def test_order_of_granting_does_not_matter() -> None:
    items = [pull(n, n + 10) for n in range(20)]
    assert planned(items, 64, shape()) == planned(items[::-1], 64, shape())


def test_a_record_larger_than_a_piece_spans_pieces() -> None:
    pieces = planned([pull(1, 2)], 5, shape())
    assert [run for piece in pieces for run in piece.runs] == [
        Run(PAGE, 16, 32, 5),
        Run(PAGE, 21, 37, 5),
        Run(PAGE, 26, 42, 3),
    ]
    assert [len(piece.completes) for piece in pieces] == [0, 0, 1]


def test_runs_of_a_piece_are_bounded() -> None:
    pool = shape(num_records=4 * MAX_RUNS)
    pieces = planned([pull(2 * n, 2 * n) for n in range(2 * MAX_RUNS)], PIECE_BYTES, pool)
    assert [len(piece.runs) for piece in pieces] == [MAX_RUNS, MAX_RUNS]


@pytest.mark.parametrize(
    ("cause", "items", "source"),
    [
        ("RecordOutOfRange", [pull(60, 0)], shape()),
        ("RecordOutOfRange", [pull(0, 60)], shape(num_records=100)),
        ("RecordOutOfRange", [pull(-1, 0)], shape()),
        ("DuplicateDestination", [pull(0, 1), pull(1, 1)], shape()),
        ("FormatMismatch", [pull(0, 0)], replace(shape(), format_id="another")),
        ("SizeMismatch", [pull(0, 0)], shape(stride=32)),
        ("SizeMismatch", [pull(0, 0)], shape(record_bytes=12)),
        ("PoolMissing", [pull(0, 0, STATE)], shape()),
    ],
)
def test_what_must_not_be_posted_is_rejected_with_a_cause(cause: str, items: list[PullItem], source: PoolShape) -> None:
    with pytest.raises(PlanRejected) as caught:
        plan_pieces("l", "p", items, {PAGE: source}, {PAGE: shape()})
    assert caught.value.cause == cause
