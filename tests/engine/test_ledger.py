"""The books' own check: whatever is wrong in them is found, whatever the order in which it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice_engine.errors import LedgerError
from sluice_engine.leader.scheduling.ledger import CACHE, Holder, HolderKind, Ledger, RecordState, Seal
from sluice_engine.step import RecordRef
from sluice_records import PoolPlan, RecordKind

OWNER = Holder(HolderKind.SEQUENCE, 7)
Told = list[tuple[Holder, RecordRef]]


def books() -> tuple[Ledger, Told]:
    """Page 0 is held by a sequence and the cache, page 1 by the cache, page 2 is being filled, the rest is free."""
    ledger = Ledger(PoolPlan(8, 2, 2))
    shared, cached, filling = (ledger.reserve(RecordKind.PAGE, holder) for holder in (OWNER, CACHE, OWNER))
    ledger.hold(shared, CACHE)
    ledger.begin_fill(filling, Seal(bytes(16), 4))
    return ledger, [(CACHE, cached), (CACHE, shared), (OWNER, filling), (OWNER, shared)]


def test_books_that_add_up_are_left_alone() -> None:
    ledger, told = books()
    ledger.check_integrity(told)
    ledger.check_integrity(reversed(told))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda told: told[:-1], "on the books only .*SEQUENCE.*told only {}"),
        (lambda told: told[1:], "on the books only .*record=1.*told only {}"),
        (lambda told: [*told, told[0]], "on the books only {}.*told only .*record=1"),
        (lambda told: [*told, (CACHE, RecordRef(RecordKind.PAGE, 5, 0))], "told only .*record=5"),
        (lambda told: [(CACHE, RecordRef(RecordKind.PAGE, 1, 9)), *told[1:]], "generation=1.*told only .*generation=9"),
        (lambda told: [(OWNER, told[0][1]), *told[1:]], "on the books only .*CACHE.*told only .*SEQUENCE"),
    ],
    ids=["not told", "nothing told of a record", "told twice", "of a free record", "of another life", "another holder"],
)
def test_a_reference_that_is_not_on_the_books_or_not_told_is_named(change: Callable[[Told], Told], named: str) -> None:
    ledger, told = books()
    with pytest.raises(LedgerError, match=named):
        ledger.check_integrity(change(told))


def lose_holders(ledger: Ledger) -> None:
    ledger._entries[RecordKind.PAGE][1].holders = []


def hold_a_free_one(ledger: Ledger) -> None:
    ledger._entries[RecordKind.PAGE][6].holders = [OWNER]


def forget_a_free_one(ledger: Ledger) -> None:
    ledger._free[RecordKind.PAGE].remove(6)


def list_twice(ledger: Ledger) -> None:
    ledger._free[RecordKind.PAGE].append(6)


def list_a_live_one(ledger: Ledger) -> None:
    ledger._free[RecordKind.PAGE].append(1)


def fill_behind_the_counter(ledger: Ledger) -> None:
    ledger._entries[RecordKind.PAGE][1].state = RecordState.FILLING


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lose_holders, "page record 1 is LIVE and has no holder"),
        (hold_a_free_one, "page record 6 is FREE and held"),
        (forget_a_free_one, "page record 6 is FREE and free-listed: False"),
        (list_twice, "page: a record is in the free list twice"),
        (list_a_live_one, "page record 1 is LIVE and free-listed: True"),
        (fill_behind_the_counter, "page: states .* do not add up"),
    ],
)
def test_a_state_that_does_not_add_up_is_named(damage: Callable[[Ledger], None], named: str) -> None:
    ledger, told = books()
    damage(ledger)
    with pytest.raises(LedgerError, match=named):
        ledger.check_integrity(told)
