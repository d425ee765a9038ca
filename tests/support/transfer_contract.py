"""The contract of `Transfer` as checks over a rig. Every implementation passes every check."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest
from transfer_double import PAGE, STATE, item, page_items, same_records

from sluice_engine.pool import RecordPool
from sluice_engine.step import PullItem
from sluice_engine.transfer.contract import DONE, PENDING, Failure, Handle, Outcome, Transfer
from sluice_engine.transfer.errors import BadPeer, HandleMisuse, PeerLost
from sluice_engine.transfer.plan import Piece, PoolShape, plan_pieces
from sluice_protocol.source import SourceHello
from sluice_records import RecordKind

LIMIT_S = 15.0


class Rig(Protocol):
    """A source with filled records and a reader with empty ones, attached."""

    transfer: Transfer
    peer: SourceHello
    source: dict[RecordKind, RecordPool]
    reader: dict[RecordKind, RecordPool]

    def pump(self) -> None:
        """Let bytes move."""
        ...

    def hold(self) -> None:
        """From now on what is posted stays in flight."""
        ...

    def let_go(self) -> None: ...

    def kill_source(self) -> None: ...


def pieces_of(rig: Rig, items: tuple[PullItem, ...], lease_id: str = "lease") -> tuple[Piece, ...]:
    told = {shape.kind: shape for shape in map(PoolShape.told, rig.peer.pools)}
    ours = {kind: PoolShape.of(pool) for kind, pool in rig.reader.items()}
    split = rig.transfer.splits_records
    return plan_pieces(lease_id, rig.peer.incarnation, items, told, ours, split_records=split)


def wait(rig: Rig, handle: Handle) -> Outcome:
    limit = time.monotonic() + LIMIT_S
    while (outcome := rig.transfer.poll(handle)) is PENDING:
        assert time.monotonic() < limit, "still in flight"
        rig.pump()
    return outcome


def move(rig: Rig, items: tuple[PullItem, ...]) -> None:
    for piece in pieces_of(rig, items):
        handle = rig.transfer.post(piece)
        assert wait(rig, handle) is DONE
        rig.transfer.release(handle)


def records_arrive_and_nothing_else_changes(rig: Rig) -> None:
    items = (*page_items(rig.source, [(0, 5), (1, 6), (2, 7), (30, 0), (9, 20)]), item(rig.source, STATE, 3, 1))
    before = {kind: pool.buffer.copy() for kind, pool in rig.reader.items()}
    move(rig, items)
    assert same_records(rig.source, rig.reader, items)
    written = {(it.kind, it.destination) for it in items}
    for kind, pool in rig.reader.items():
        stride = pool.layout.stride
        for record in range(pool.num_records):
            if (kind, record) not in written:
                span = slice(record * stride, (record + 1) * stride)
                assert np.array_equal(pool.buffer[span], before[kind][span]), (kind, record)


def an_end_is_an_end(rig: Rig) -> None:
    (it,) = page_items(rig.source, [(4, 4)])
    (piece,) = pieces_of(rig, (it,))
    handle = rig.transfer.post(piece)
    assert wait(rig, handle) is DONE
    landed = rig.reader[PAGE].record(4).copy()
    original = rig.source[PAGE].record(4).copy()
    rig.source[PAGE].record(4)[:] ^= 0xFF
    for _ in range(20):
        rig.pump()
        assert rig.transfer.poll(handle) is DONE
    assert np.array_equal(rig.reader[PAGE].record(4), landed)
    rig.source[PAGE].record(4)[:] = original
    rig.transfer.release(handle)


def only_terminal_handles_are_released(rig: Rig) -> None:
    rig.hold()
    (piece,) = pieces_of(rig, page_items(rig.source, [(8, 8)]))
    handle = rig.transfer.post(piece)
    assert rig.transfer.poll(handle) is PENDING
    with pytest.raises(HandleMisuse):
        rig.transfer.release(handle)
    rig.let_go()
    assert wait(rig, handle) is DONE
    rig.transfer.release(handle)
    with pytest.raises(HandleMisuse):
        rig.transfer.release(handle)
    with pytest.raises(HandleMisuse):
        rig.transfer.poll(handle)


def leases_move_beside_each_other(rig: Rig) -> None:
    items = [page_items(rig.source, [(n, n), (n + 10, n + 20)]) for n in (10, 12, 14)]
    handles = [
        rig.transfer.post(piece) for n, its in enumerate(items) for piece in pieces_of(rig, its, lease_id=f"l{n}")
    ]
    for handle in reversed(handles):
        assert wait(rig, handle) is DONE
        rig.transfer.release(handle)
    assert all(same_records(rig.source, rig.reader, its) for its in items)


def nothing_is_posted_to_strangers(rig: Rig) -> None:
    (piece,) = pieces_of(rig, page_items(rig.source, [(0, 0)]))
    with pytest.raises(PeerLost):
        rig.transfer.post(replace(piece, peer="nobody.1"))


def the_same_hello_twice_is_once(rig: Rig) -> None:
    rig.transfer.attach(rig.peer)
    move(rig, page_items(rig.source, [(3, 3)]))


def a_name_is_good_for_one_incarnation(rig: Rig) -> None:
    with pytest.raises((BadPeer, PeerLost)):
        rig.transfer.attach(replace(rig.peer, incarnation="source.2"))
    move(rig, page_items(rig.source, [(3, 3)]))


def what_is_in_flight_outlives_a_detach(rig: Rig) -> None:
    rig.hold()
    its = page_items(rig.source, [(8, 9)])
    (piece,) = pieces_of(rig, its)
    handle = rig.transfer.post(piece)
    rig.transfer.detach(rig.peer.incarnation)
    with pytest.raises(PeerLost):
        rig.transfer.post(replace(piece, lease_id="another"))
    assert rig.transfer.poll(handle) is PENDING
    rig.let_go()
    assert wait(rig, handle) is DONE
    assert same_records(rig.source, rig.reader, its)
    rig.transfer.release(handle)


def a_dead_source_is_a_failure_and_then_a_stranger(rig: Rig) -> None:
    move(rig, page_items(rig.source, [(3, 3)]))
    rig.hold()
    (piece,) = pieces_of(rig, page_items(rig.source, [(8, 8)]))
    handle = rig.transfer.post(piece)
    rig.kill_source()
    outcome = wait(rig, handle)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "PeerLost", outcome
    rig.transfer.release(handle)
    assert rig.transfer.name != "nixl" or _is_stranger(rig, piece)


def _is_stranger(rig: Rig, piece: Piece) -> bool:
    with pytest.raises(PeerLost):
        rig.transfer.post(piece)
    return True


def a_ping_comes_to_its_end_and_changes_no_record(rig: Rig) -> None:
    before = {kind: pool.buffer.copy() for kind, pool in rig.reader.items()}
    for _ in range(3):
        handle = rig.transfer.ping(rig.peer.incarnation)
        if handle is not None:  # records come on the lease's own stream: there is no lane to try
            assert wait(rig, handle) is DONE
            rig.transfer.release(handle)
    assert all(np.array_equal(pool.buffer, before[kind]) for kind, pool in rig.reader.items())
    with pytest.raises(PeerLost):
        rig.transfer.ping("nobody")


# The last three leave the rig without a source that can be read.
CHECKS: dict[str, Callable[[Rig], None]] = {
    check.__name__: check
    for check in (
        records_arrive_and_nothing_else_changes,
        an_end_is_an_end,
        a_ping_comes_to_its_end_and_changes_no_record,
        only_terminal_handles_are_released,
        leases_move_beside_each_other,
        nothing_is_posted_to_strangers,
        the_same_hello_twice_is_once,
        a_name_is_good_for_one_incarnation,
        what_is_in_flight_outlives_a_detach,
        a_dead_source_is_a_failure_and_then_a_stranger,
    )
}
