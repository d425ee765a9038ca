"""A reader says that a record is not what was granted: the source verifies its own, and one of the two is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from leader_double import HeldRank, PromptRank, make_leader, turns

from sluice_engine.leader.leader import Leader
from sluice_engine.leader.lease.suspicion import MOST_RECORDS, WINDOW_S, PeerBudget
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Refused, Role
from sluice_protocol.lease import LeaseEvent
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import Granted, GrantedRecord, Mismatch, Open, RecordName, WantPrefill
from sluice_records import RecordKind

PROMPT = tuple(range(1, 71))


@dataclass
class Port:
    """One lease at its source, as the lease thread would have it."""

    posted: list[tuple[LeaseEvent, object]] = field(default_factory=list)

    def post(self, event: LeaseEvent, message: object) -> None:
        self.posted.append((event, message))

    @property
    def granted(self) -> list[GrantedRecord]:
        return [record for _, message in self.posted if isinstance(message, Granted) for record in message.records]

    @property
    def refusals(self) -> list[Refused]:
        return [message for _, message in self.posted if isinstance(message, Refused)]

    @property
    def is_complete(self) -> bool:
        return any(event is LeaseEvent.COMPLETE for event, _ in self.posted)


def start(tmp_path: Path, rank: type[HeldRank] = PromptRank) -> tuple[Leader, HeldRank]:
    leader = make_leader(tmp_path, Role.PREFILL, memory_bytes=400_000, max_running=4)
    leader.ranks.append(rank(leader))
    return leader, leader.ranks[0]  # type: ignore[return-value]


def open_lease(leader: Leader, peer: str = "10.0.0.7", prompt: tuple[int, ...] = PROMPT) -> Port:
    port = Port()
    want = WantPrefill(prompt, (), Sampling(max_tokens=9), "r")
    leader.rooms.open_source(Open("lease", "i.1", Fingerprint(()), want, 0, 60_000), port, peer)
    return port


async def complete(leader: Leader, peer: str = "10.0.0.7") -> Port:
    port = open_lease(leader, peer)
    for _ in range(200):
        await turns()
        if port.is_complete:
            return port
    raise AssertionError(port.posted)


def end(leader: Leader, port: Port, mismatch: Mismatch | None = None) -> None:
    """As the lease thread ends it: the last word first, then the end."""
    if mismatch is not None:
        leader.rooms.on_mismatch(port, mismatch)
    leader.rooms.lease_ended(port)


async def settled(leader: Leader) -> None:
    await leader.emptied()
    await turns()
    leader.state.check_integrity()


async def test_a_record_that_is_bad_at_its_source_is_quarantined_and_the_next_lease_gets_a_new_one(
    tmp_path: Path,
) -> None:
    leader, rank = start(tmp_path)
    port = await complete(leader)
    bad = next(record for record in port.granted if record.kind == "page" and record.index == 1)
    rank.pools[RecordKind.PAGE].memory(bad.record)[3] ^= 1
    end(leader, port, Mismatch((bad.name,)))
    await settled(leader)
    assert leader.counters["records_corrupt"] == 1
    assert leader.counters["lane_mismatches"] == 0
    assert leader.state.ledger.count(RecordKind.PAGE).quarantined == 1
    again = await complete(leader)
    assert bad.record not in [record.record for record in again.granted if record.kind == "page"]
    assert not again.refusals
    assert [(r.kind, r.index, r.identity, r.digest) for r in again.granted] == [
        (r.kind, r.index, r.identity, r.digest) for r in port.granted
    ]
    end(leader, again)
    await settled(leader)


async def test_a_record_that_is_good_at_its_source_names_the_lane_to_that_peer(tmp_path: Path) -> None:
    leader, _ = start(tmp_path)
    port = await complete(leader)
    end(leader, port, Mismatch((port.granted[0].name, port.granted[-1].name)))
    await settled(leader)
    assert leader.counters["records_corrupt"] == 0
    assert leader.counters["lane_mismatches"] == 2
    assert leader.rooms.suspicion.lanes == {"10.0.0.7": 2}
    assert leader.state.ledger.count(RecordKind.PAGE).quarantined == 0
    assert not leader.rooms.suspicion


async def test_a_reader_can_only_cast_suspicion_on_what_its_own_lease_holds(tmp_path: Path) -> None:
    leader, _ = start(tmp_path)
    port = await complete(leader)
    mine = port.granted[0]
    foreign = (
        RecordName("page", mine.record, mine.generation + 1),
        RecordName("page", 23, 1),
        RecordName("page", 10**6, 1),
        RecordName("nonsense", 0, 1),
    )
    end(leader, port, Mismatch(foreign))
    await settled(leader)
    assert leader.counters["lane_mismatches"] == leader.counters["records_corrupt"] == 0
    assert not leader.rooms.suspicion


async def test_a_grant_of_a_suspect_record_waits_until_it_is_verified(tmp_path: Path) -> None:
    """The second lease's grant was planned before the first one's reader complained, and its step is not done yet."""
    leader, rank = start(tmp_path, HeldRank)
    first = open_lease(leader)
    await turns()
    while not first.is_complete:
        await rank.report()
    second = open_lease(leader, "10.0.0.8")
    await turns()
    assert not second.granted
    shared = next(record for record in first.granted if record.kind == "page")
    rank.pools[RecordKind.PAGE].memory(shared.record)[7] ^= 4
    leader.rooms.on_mismatch(first, Mismatch((shared.name,)))
    await turns()
    while rank.held:
        await rank.report()
        assert shared.name not in [record.name for record in second.granted]
    # Its first token was out before anybody knew, so it cannot be tried again.
    assert [refusal.reason for refusal in second.refusals] == ["TokensSuspect"]
    for port in (first, second):
        leader.rooms.lease_ended(port)
    await turns()
    while rank.held:
        await rank.report()
    await settled(leader)


async def test_grants_of_a_record_that_was_suspected_wrongly_go_out_in_their_order(tmp_path: Path) -> None:
    leader, rank = start(tmp_path, HeldRank)
    first = open_lease(leader)
    await turns()
    while not first.is_complete:
        await rank.report()
    second = open_lease(leader, "10.0.0.8")
    await turns()
    leader.rooms.on_mismatch(first, Mismatch(tuple(record.name for record in first.granted)))
    while not second.is_complete:
        await rank.report()
    order = [event for event, _ in second.posted if event in (LeaseEvent.GRANTED, LeaseEvent.COMPLETE)]
    assert order == sorted(order, key=lambda event: event is LeaseEvent.COMPLETE)
    assert len(second.granted) == len(first.granted)
    for port in (first, second):
        leader.rooms.lease_ended(port)
    await turns()
    while rank.held:
        await rank.report()
    await settled(leader)


async def test_a_lease_whose_prefix_is_bad_is_refused_by_name_and_as_suspect_once_it_has_said_a_token(
    tmp_path: Path,
) -> None:
    leader, rank = start(tmp_path)
    port = await complete(leader)
    bad = port.granted[0]
    rank.pools[RecordKind.PAGE].memory(bad.record)[3] ^= 1
    meeting = open_lease(leader, "10.0.0.8")
    for _ in range(50):
        await turns()
    assert [refusal.reason for refusal in meeting.refusals] == ["RecordCorrupt"]
    assert [refusal.reason for refusal in port.refusals] == ["TokensSuspect"]
    assert not meeting.granted
    for each in (port, meeting):
        leader.rooms.lease_ended(each)
    await settled(leader)


@pytest.mark.parametrize("records", [1, 64, MOST_RECORDS])
def test_a_peer_may_ask_for_so_many_checks_and_others_are_not_held_to_it(records: int) -> None:
    budget = PeerBudget()
    admitted = sum(budget.admits("a", records, 1.0) for _ in range(2 * MOST_RECORDS))
    assert admitted == MOST_RECORDS
    assert budget.admits("b", records, 1.0) == records
    assert budget.admits("b", 2 * MOST_RECORDS, 1.0) == MOST_RECORDS - records
    assert budget.admits("a", records, 1.0 + WINDOW_S / 2) == 0
    assert budget.admits("a", records, 1.1 + WINDOW_S) == records
