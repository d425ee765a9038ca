"""A room from both sides: the reader's books, what it commits, and what it refuses to."""

from __future__ import annotations

import pytest
from engine_double import Engine
from handoff_double import Handoff

from sluice_engine.leader.scheduling.ledger import Holder, HolderKind, LedgerError, RecordState, Seal
from sluice_engine.leader.scheduling.sequence import (
    Aborted,
    EndCause,
    Fenced,
    LeaseEnded,
    Mode,
    Phase,
    PullCommitted,
    PullGranted,
    PullsTerminal,
    StrandingEnded,
)
from sluice_protocol.engine_spec import SnapshotPolicy
from sluice_protocol.source import GrantedRecord
from sluice_records import PoolPlan, RecordKind


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7 + i * i) % 64 for i in range(length))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 33, 60])
def test_a_handed_over_sequence_goes_on_as_if_nothing_had_happened(length):
    handoff = Handoff(Engine(), Engine())
    sequence = handoff.submit(prompt(length), 12)
    handoff.run()
    assert handoff.outputs[sequence] == Engine().generate(prompt(length), 12)
    assert handoff.pulled_records == -(-length // 8) + 1


def test_many_rooms_at_once():
    handoff = Handoff(Engine(), Engine())
    sequences = [handoff.submit(prompt(10 + 5 * i, i), 5 + i) for i in range(6)]
    handoff.run()
    for i, sequence in enumerate(sequences):
        assert handoff.outputs[sequence] == Engine().generate(prompt(10 + 5 * i, i), 5 + i)


def test_pages_that_the_reader_holds_are_not_pulled_again():
    handoff = Handoff(Engine(), Engine())
    first = handoff.submit(prompt(40), 6)
    handoff.run()
    before = handoff.pulled_records
    second = handoff.submit(prompt(40), 6)
    handoff.outputs[first] = []
    handoff.run()
    assert handoff.pulled_records - before == 1  # the state alone
    assert handoff.outputs[second] == Engine().generate(prompt(40), 6)


def room(engine: Engine, length: int = 20) -> int:
    sequence = engine.submit(prompt(length), 8, mode=Mode.READER)
    engine.step()
    assert engine.state.sequences[sequence].phase is Phase.PULLING
    return sequence


def grant(kind: RecordKind, index: int, record: int = 0) -> GrantedRecord:
    return GrantedRecord(kind.value, record, 1, b"i" * 16, 7, 8, index)


def everything(engine: Engine, sequence: int) -> tuple[GrantedRecord, ...]:
    pages = len(engine.state.sequences[sequence].pages)
    return (*(grant(RecordKind.PAGE, i, i) for i in range(pages)), grant(RecordKind.STATE, 0))


def test_an_abort_while_pulling_keeps_the_records_until_nothing_can_land(engine):
    sequence = room(engine)
    engine.tell(PullGranted(sequence, "l", "p", everything(engine, sequence)))
    engine.step()
    engine.tell(Aborted(sequence))
    planned = engine.step()
    assert planned.cancelled == (sequence,)
    for _ in range(3):
        engine.step()
    assert engine.state.ledger.count(RecordKind.PAGE).filling == 3
    engine.tell(PullsTerminal(sequence))
    engine.run()
    assert engine.state.ledger.count(RecordKind.PAGE).filling == 0
    assert engine.state.ledger.count(RecordKind.PAGE).free == engine.pool_plan.pages
    assert engine.ended[sequence] is EndCause.ABORTED


def test_a_stranded_record_comes_back_by_the_fence_only(engine):
    sequence = room(engine)
    engine.tell(PullGranted(sequence, "l", "p", everything(engine, sequence)))
    engine.step()
    stranded = engine.state.sequences[sequence].pages[1]
    engine.tell(Aborted(sequence), PullsTerminal(sequence, (stranded,)))
    engine.run()
    assert engine.state.ledger.state(stranded) is RecordState.STRANDED
    assert engine.state.ledger.count(RecordKind.PAGE).free == engine.pool_plan.pages - 1
    engine.tell(Fenced())
    engine.run()
    assert engine.state.ledger.count(RecordKind.PAGE).free == engine.pool_plan.pages


def test_a_zombie_that_ends_after_all_gives_its_record_back(engine):
    sequence = room(engine)
    engine.tell(PullGranted(sequence, "l", "p", everything(engine, sequence)))
    engine.step()
    stranded = engine.state.sequences[sequence].pages[1]
    engine.tell(Aborted(sequence), PullsTerminal(sequence, (stranded,)))
    engine.run()
    engine.tell(StrandingEnded((stranded,)))
    engine.run()
    assert engine.state.ledger.count(RecordKind.PAGE).free == engine.pool_plan.pages


@pytest.mark.parametrize(
    "records",
    [
        (grant(RecordKind.PAGE, 99),),
        (grant(RecordKind.SNAPSHOT, 0),),
        (grant(RecordKind.PAGE, 1), grant(RecordKind.PAGE, 1)),
        (grant(RecordKind.STATE, 0), grant(RecordKind.STATE, 0)),
    ],
    ids=["out of range", "of no business", "page twice", "state twice"],
)
def test_a_grant_that_makes_no_sense_fails_the_room_and_nothing_else(engine, records):
    other = engine.submit(prompt(9, 3), 6)
    sequence = room(engine)
    engine.tell(PullGranted(sequence, "l", "p", records))
    assert sequence in engine.step().cancelled
    engine.tell(PullsTerminal(sequence))
    engine.run()
    assert engine.ended[sequence] is EndCause.FAILED
    assert engine.outputs[other] == Engine().generate(prompt(9, 3), 6)


def test_a_commit_without_all_records_fails_the_room(engine):
    sequence = room(engine)
    engine.tell(PullGranted(sequence, "l", "p", (grant(RecordKind.PAGE, 0),)))
    engine.step()
    engine.tell(PullCommitted(sequence, 5))
    assert sequence in engine.step().cancelled
    engine.run()  # nobody says PullsTerminal: that room is over for the transport
    assert engine.ended[sequence] is EndCause.FAILED


def test_facts_about_somebody_who_is_gone_are_late_and_nothing_more(engine):
    sequence = room(engine)
    engine.tell(Aborted(sequence))
    engine.tell(PullsTerminal(sequence))
    engine.run()
    engine.tell(PullCommitted(sequence, 3), PullsTerminal(sequence), Aborted(sequence))
    engine.run()
    assert not engine.state.sequences


def test_the_books_refuse_what_no_plan_may_do():
    engine = Engine()
    sequence = room(engine)
    ledger = engine.state.ledger
    page = engine.state.sequences[sequence].pages[0]
    with pytest.raises(LedgerError, match="does not hold"):
        ledger.drop(page, engine.state.sequences[sequence].lease_holder)
    with pytest.raises(LedgerError, match="is LIVE, not FILLING"):
        ledger.commit(page)
    ledger.begin_fill(page, Seal(bytes(16), 4))
    with pytest.raises(LedgerError, match="is FILLING, not LIVE"):
        ledger.close_all([page], [Seal(bytes(16), 4)])
    ledger.end_fill(page)
    engine.tell(Aborted(sequence), PullsTerminal(sequence))
    engine.run()
    with pytest.raises(LedgerError, match="free"):
        ledger.hold(page, Holder(HolderKind.SEQUENCE, sequence))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_that_can_place_nothing_is_made_once_until_a_fact_comes(overlap):
    engine = Engine(pool_plan=PoolPlan(6, 4, 2), max_running=4, snapshots=SnapshotPolicy.NEVER, overlap=overlap)
    held = engine.submit(prompt(40, 1), 4, mode=Mode.SOURCE)
    waiting = engine.submit(prompt(8, 2), 20)  # its first page is the last one free
    engine.run()
    assert engine.state.sequences[held].phase is Phase.HELD
    before = len(engine.plans)
    engine.run()
    assert len(engine.plans) <= before + 1
    engine.tell(LeaseEnded(held))
    engine.run()
    assert engine.outputs[waiting] == Engine().generate(prompt(8, 2), 20)
