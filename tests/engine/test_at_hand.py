"""What leases are at: the oldest event that stays is what the watch must see, whatever else comes and goes."""

from __future__ import annotations

import asyncio

import pytest

from sluice_engine.leader.lease.at_hand import AtHand, Hand
from sluice_runtime.health.recorder import Row, unrecorded


class Told:
    """The numbers that a row was last told."""

    def __init__(self, leases: AtHand) -> None:
        self.pending_, self.progress_, self.doing_ = -1, -1, ""
        leases.tell(self)  # type: ignore[arg-type]

    def progress(self, value: int) -> None:
        self.progress_ = value

    def pending(self, amount: int) -> None:
        self.pending_ = amount

    def doing(self, text: str) -> None:
        self.doing_ = text


def test_nothing_at_hand_is_nothing_pending():
    leases = AtHand()
    hand = Hand(leases)
    hand.take("one")
    hand.put_down()
    hand.put_down()
    assert Told(leases).pending_ == 0
    assert Told(leases).doing_ == ""


def test_one_that_hangs_stands_while_others_come_and_go():
    leases = AtHand()
    stuck, other = Hand(leases), Hand(leases)
    stuck.take("Granted")
    before = Told(leases)
    for _ in range(10):
        other.take("Open")
        assert Told(leases).progress_ == before.progress_
        other.put_down()
    after = Told(leases)
    assert (after.progress_, after.pending_, after.doing_) == (before.progress_, 1, "Granted")
    stuck.put_down()
    assert Told(leases).progress_ > before.progress_


def test_others_that_move_are_progress():
    leases = AtHand()
    one, two = Hand(leases), Hand(leases)
    one.take("a")
    first = Told(leases).progress_
    two.take("b")
    one.put_down()
    second = Told(leases).progress_
    assert second > first
    two.put_down()
    assert Told(leases).progress_ > second


async def test_waiting_for_a_peer_is_nobodys_hang():
    leases = AtHand()
    hand, answer = Hand(leases), asyncio.get_running_loop().create_future()
    hand.take("Pulled")
    before = Told(leases).progress_
    waiting = asyncio.ensure_future(hand.for_peer(answer))
    await asyncio.sleep(0)
    assert Told(leases).pending_ == 0
    answer.set_result("taken")
    assert await waiting == "taken"
    assert (Told(leases).pending_, Told(leases).doing_) == (1, "Pulled")
    assert Told(leases).progress_ > before
    hand.put_down()
    assert Told(leases).pending_ == 0


async def test_a_wait_that_is_given_up_leaves_nothing_once_the_lease_is_over():
    leases = AtHand()
    hand, never = Hand(leases), asyncio.get_running_loop().create_future()

    async def lease() -> None:
        hand.take("Pulled")
        try:
            await hand.for_peer(never)
        finally:
            hand.put_down()

    task = asyncio.ensure_future(lease())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Told(leases).pending_ == 0


def test_a_row_takes_it():
    row: Row = unrecorded("leader.lease")
    AtHand().tell(row)
