"""A reader says that a record is not what was granted: the source verifies its own, and one of the two is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from leader_double import HeldRank, PromptRank, make_leader, turns
from lease_double import HELLO, SourceEnd

from sluice_engine.leader.handoff.suspicion import MOST_RECORDS, WINDOW_S, PeerBudget
from sluice_engine.leader.leader import Leader
from sluice_protocol.generate import Role
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import Complete, Granted, Mismatch, Open, RecordName, WantPrefill
from sluice_records import RecordKind

PROMPT = tuple(range(1, 71))


def start(tmp_path: Path, rank: type[HeldRank] = PromptRank) -> tuple[Leader, HeldRank]:
    leader = make_leader(tmp_path, Role.PREFILL, memory_bytes=400_000, max_running=4)
    leader.ranks.append(rank(leader))
    return leader, leader.ranks[0]  # type: ignore[return-value]


def open_lease(leader: Leader, peer: str = "10.0.0.7", prompt: tuple[int, ...] = PROMPT) -> SourceEnd:
    port = SourceEnd(peer)
    want = WantPrefill(prompt, (), Sampling(max_tokens=9), "r")
    leader.sources.hear(port, (Open("lease", "i.1", HELLO.fingerprint, want, 0, 60_000),))
    return port


async def complete(leader: Leader, peer: str = "10.0.0.7") -> SourceEnd:
    port = open_lease(leader, peer)
    for _ in range(200):
        await turns()
        if port.is_complete:
            return port
    raise AssertionError(port.said)


def end(leader: Leader, port: SourceEnd, mismatch: Mismatch | None = None) -> None:
    """As the lease thread hears it: the last word first, then the end."""
    if mismatch is not None:
        leader.sources.hear(port, (mismatch,))
    leader.sources.hear_end(port)


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
    assert leader.sources.suspicion.lanes == {"10.0.0.7": 2}
    assert leader.state.ledger.count(RecordKind.PAGE).quarantined == 0
    assert not leader.sources.suspicion


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
    assert not leader.sources.suspicion


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
    end(leader, first, Mismatch((shared.name,)))
    await turns()
    while rank.held:
        await rank.report()
        assert shared.name not in [record.name for record in second.granted]
    # Its first token was out before anybody knew, so it cannot be tried again.
    assert [refusal.reason for refusal in second.refusals] == ["TokensSuspect"]
    for port in (first, second):
        end(leader, port)
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
    end(leader, first, Mismatch(tuple(record.name for record in first.granted)))
    while not second.is_complete:
        await rank.report()
    order = [type(message) for message in second.said if isinstance(message, Granted | Complete)]
    assert order == sorted(order, key=lambda kind: kind is Complete)
    assert len(second.granted) == len(first.granted)
    for port in (first, second):
        end(leader, port)
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
        end(leader, each)
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
