"""Random histories: whatever sources do, every lease ends, the books add up, and nothing lands where it was promised
that nothing lands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puller_double import PullerRig
from transfer_double import PAGE, same_records

from sluice_engine.step import PullItem
from sluice_engine.transfer.memory import Fault
from sluice_engine.transfer.messages import PullFailed, PullsTerminal, RecordsDone, StrandedEnded
from sluice_engine.transfer.plan import Piece
from sluice_records import PoolPlan

pytestmark = pytest.mark.slow

RECORDS = 120
LEASES = 6


@dataclass
class History:
    """The leader's side: it hands a record out again only when it was told that nothing can land in it."""

    rig: PullerRig
    free: list[int] = field(default_factory=lambda: list(range(RECORDS)))
    items: dict[str, list[PullItem]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    quiet: set[int] = field(default_factory=set)
    seen: int = 0
    checked: int = 0
    serial: int = 0

    def open(self, count: int) -> None:
        lease_id = f"l{self.serial}"
        self.serial += 1
        self.add(lease_id, count)

    def add(self, lease_id: str, count: int) -> None:
        taken = [self.free.pop(0) for _ in range(min(count, len(self.free)))]
        self.quiet.difference_update(taken)
        items = [self.rig.item((7 * d + self.serial) % RECORDS, d) for d in taken]
        self.items.setdefault(lease_id, []).extend(items)
        self.rig.puller.add(lease_id, "source.1", items, self.rig.now)

    def living(self) -> list[str]:
        return [lease_id for lease_id in self.items if lease_id not in self.ended]

    def tick(self, seconds: float) -> None:
        self.rig.tick(1, seconds)
        self.check_landed()
        for event in self.rig.events[self.seen :]:
            self.take(event)
        self.seen = len(self.rig.events)

    def take(self, event: object) -> None:
        match event:
            case RecordsDone(lease_id, num_records):
                if num_records == len(self.items[lease_id]):
                    assert same_records(self.rig.source, self.rig.reader, self.items[lease_id])
                    self.over(lease_id, "done", set())
                    self.rig.puller.forget(lease_id, self.rig.now)
            case PullsTerminal(lease_id, stranded):
                assert lease_id not in self.ended
                self.over(lease_id, "terminal", {record for _, record in stranded})
                self.rig.puller.forget(lease_id, self.rig.now)
            case StrandedEnded(_, records):
                self.give_back([record for _, record in records])
            case PullFailed(lease_id):
                assert lease_id not in self.ended

    def over(self, lease_id: str, how: str, stranded: set[int]) -> None:
        self.ended[lease_id] = how
        self.give_back([it.destination for it in self.items[lease_id] if it.destination not in stranded])

    def give_back(self, records: list[int]) -> None:
        self.quiet.update(records)
        self.free += records

    def check_landed(self) -> None:
        landed = self.rig.transfer.landed
        for piece in landed[self.checked :]:
            for it in piece.touches:
                assert it.destination not in self.quiet, f"{piece.lease_id} wrote page {it.destination}"
        self.checked = len(landed)


STEPS = st.one_of(
    st.tuples(st.just("open"), st.integers(1, 8)),
    st.tuples(st.just("add"), st.integers(0, LEASES)),
    st.tuples(st.just("stop"), st.integers(0, LEASES)),
    st.tuples(st.just("let_go"), st.integers(0, 20)),
    st.tuples(st.just("tick"), st.integers(1, 6)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


def faults_from(choices: list[Fault]) -> Iterator[Fault]:
    yield from choices
    while True:
        yield Fault.NONE


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=50),
    faults=st.lists(
        st.sampled_from([Fault.NONE, Fault.NONE, Fault.HOLD, Fault.DROP, Fault.FAIL, Fault.CORRUPT]), max_size=60
    ),
    one_record=st.booleans(),
)
def test_promises_hold_in_every_history(steps: list[tuple[str, int]], faults: list[Fault], one_record: bool) -> None:
    rig = PullerRig(plan=PoolPlan(RECORDS, 1, 1), one_record=one_record)
    history, source = History(rig), faults_from(faults)

    def fault(piece: Piece) -> Fault:
        return next(source)

    rig.fault(fault)
    for verb, number in steps:
        living = history.living()
        match verb:
            case "open" if len(living) < LEASES:
                history.open(number)
            case "add" if number < len(living):
                history.add(living[number], 3)
            case "stop" if number < len(living):
                rig.puller.stop(living[number], rig.now)
            case "let_go" if number < len(rig.transfer.held()):
                rig.transfer.let_go(rig.transfer.held()[number])
            case "tick":
                for _ in range(number):
                    history.tick(0.0)
            case "wait":
                history.tick(number / 10)
    finish(history)


def finish(history: History) -> None:
    """Every lease ends by itself, without one more word from a source."""
    rig = history.rig
    for _ in range(300):
        history.tick(0.2)
        for lease_id in history.living():
            if not any(it for it in history.items[lease_id]):
                rig.puller.stop(lease_id, rig.now)
    assert not history.living()
    for handle in rig.transfer.held():
        rig.transfer.let_go(handle)
    for _ in range(20):
        history.tick(0.2)
    counters = rig.puller.counters
    dropped = sum(posted.fault is Fault.DROP for posted in rig.transfer._posted.values())
    assert rig.puller.num_in_flight == dropped == len(rig.transfer._posted)
    assert counters["pieces_posted"] == counters["pieces_done"] + counters["pieces_failed"] + dropped
    assert len(rig.puller.stranded) + len(history.free) == RECORDS
    assert {record for kind, record in rig.puller.stranded if kind is PAGE}.isdisjoint(history.free)
    assert rig.puller.num_leases == 0
