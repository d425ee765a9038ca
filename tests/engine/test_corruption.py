"""Bytes that change behind the engine's back: named, quarantined, never computed into a token that a client sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from leader_double import HeldRank, PromptRank, ask, make_leader, turns

from sluice_engine.leader.corruption import MOST_RECORDS, MemoryCorrupt
from sluice_engine.leader.generation import Generation
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.scheduling.ledger import CACHE, RecordState
from sluice_engine.leader.scheduling.sequence import Corrupted, Suspected
from sluice_engine.step import RecordRef
from sluice_protocol.generate import Ended, EndReason, Refused
from sluice_records import RecordKind

PAGE, SNAPSHOT = RecordKind.PAGE, RecordKind.SNAPSHOT
PROMPT = tuple(range(1, 71))
MORE = {"memory_bytes": 400_000, "max_running": 4}


def start(tmp_path: Path, rank: type[HeldRank] = PromptRank, **spec: object) -> tuple[Leader, HeldRank]:
    leader = make_leader(tmp_path, **(MORE | spec))  # type: ignore[arg-type]
    leader.ranks.append(rank(leader))
    return leader, leader.ranks[0]  # type: ignore[return-value]


async def answer(leader: Leader, number: int, prompt: tuple[int, ...] = PROMPT, most: int = 6) -> Ended:
    generation = ask(leader, number, prompt, most)
    ended = await generation.wait()
    await leader.emptied()
    leader.state.check_integrity()
    return ended


def cached(leader: Leader, kind: RecordKind) -> list[RecordRef]:
    return [ref for ref in leader.state.cache.references() if ref.kind is kind]


def flip(rank: HeldRank, ref: RecordRef, at: int = 5, bit: int = 0x10) -> None:
    rank.pools[ref.kind].memory(ref.record)[at] ^= bit


def trailer_offset(rank: HeldRank, kind: RecordKind) -> int:
    return rank.pools[kind].layout.trailer_offset


def tokens_of(leader: Leader) -> list[int]:
    """All that the gateway was sent, in order."""
    return [token for batch in leader.requests.sinks["gw"].__self__.batches for token in batch.tokens]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [PAGE, SNAPSHOT])
@pytest.mark.parametrize("where", ["first byte", "digest in the trailer", "identity in the trailer"])
async def test_a_flipped_bit_in_a_cached_record_ends_the_request_that_meets_it_and_the_next_one_is_right(
    tmp_path: Path, kind: RecordKind, where: str
) -> None:
    leader, rank = start(tmp_path)
    assert (await answer(leader, 1)).reason is EndReason.LENGTH
    (bad, *_) = cached(leader, kind)
    offset = {"first byte": 0, "digest in the trailer": 48, "identity in the trailer": 24}[where]
    flip(rank, bad, offset + (trailer_offset(rank, kind) if offset else 0))
    met = await answer(leader, 2)
    assert (met.reason, met.error, met.num_tokens) == (EndReason.FAILED, "RecordCorrupt", 0)
    again = await answer(leader, 3)
    assert (again.reason, again.num_tokens) == (EndReason.LENGTH, 6)
    assert leader.counters["records_corrupt"] == 1
    assert leader.state.ledger.count(kind).quarantined == 1
    assert leader.state.ledger.state(leader.state.ledger.ref(kind, bad.record)) is RecordState.QUARANTINED


async def test_what_stands_on_a_bad_page_leaves_the_cache_with_it(tmp_path: Path) -> None:
    leader, rank = start(tmp_path)
    await answer(leader, 1)
    pages = cached(leader, PAGE)
    other = tuple(range(100, 170))
    await answer(leader, 2, other)
    assert len(pages) > 2
    flip(rank, pages[1])
    before = len(cached(leader, PAGE))
    assert (await answer(leader, 3)).error == "RecordCorrupt"
    gone = set(pages) - set(cached(leader, PAGE))
    assert gone == set(pages[1:])
    assert len(cached(leader, PAGE)) == before - len(gone)
    assert (await answer(leader, 4, other)).reason is EndReason.LENGTH


async def test_nothing_is_checked_twice_at_sample_but_every_snapshot_is(tmp_path: Path) -> None:
    leader, rank = start(tmp_path, verify="sample")
    await answer(leader, 1)
    checked = leader.counters["records_checked"]
    await answer(leader, 2)
    pages = len(PROMPT) // leader.state.limits.page_tokens
    assert 1 <= leader.counters["records_checked"] - checked < pages + 1
    flip(rank, cached(leader, SNAPSHOT)[0])
    assert (await answer(leader, 3)).error == "RecordCorrupt"


async def test_a_reader_of_a_bad_record_that_has_published_is_not_tried_again(tmp_path: Path) -> None:
    """It shares a cached page with one that meets it later. What it has said may be wrong: it ends as suspect."""
    leader, rank = start(tmp_path, HeldRank)
    first = ask(leader, 1, PROMPT, 4)
    await turns()
    while first.last_word is None:
        await rank.report()
    talking = ask(leader, 2, PROMPT, 40)
    await turns()
    while talking.sent < 3:
        await rank.report()
    flip(rank, cached(leader, PAGE)[0])
    meeting = ask(leader, 3, PROMPT, 4)
    await turns()
    while meeting.last_word is None or talking.last_word is None:
        assert talking.sent < 40
        await rank.report()
    told = talking.last_word
    assert (told.reason, told.error, meeting.last_word.error) == (
        EndReason.FAILED,
        "TokensSuspect",
        "RecordCorrupt",
    )
    while rank.held:
        await rank.report()
    await leader.emptied()
    leader.state.check_integrity()


async def test_no_token_of_a_step_that_found_a_bad_record_is_published(tmp_path: Path) -> None:
    leader, rank = start(tmp_path, HeldRank)
    first = ask(leader, 1, PROMPT, 2)
    await turns()
    while first.last_word is None:
        await rank.report()
    flip(rank, cached(leader, SNAPSHOT)[0])
    meeting = ask(leader, 2, PROMPT, 4)
    await turns()
    # With overlap the next step is with the rank already; neither may say a word.
    while meeting.last_word is None:
        await rank.report()
    while rank.held:
        await rank.report()
    assert meeting.sent == 0
    assert meeting.last_word.error == "RecordCorrupt"


async def test_the_scrubber_finds_a_bad_record_that_nobody_asks_for(tmp_path: Path) -> None:
    now = 0.0
    leader, rank = start(tmp_path)
    leader.clock = lambda: now
    await answer(leader, 1)
    flip(rank, cached(leader, PAGE)[2])
    for _ in range(50):
        now += 1.0
        leader.look_after()
        await turns()
        await leader.emptied()
        if leader.counters["records_corrupt"]:
            break
    assert leader.counters["records_corrupt"] == 1
    assert leader.state.ledger.count(PAGE).quarantined == 1
    leader.state.check_integrity()
    assert (await answer(leader, 2)).reason is EndReason.LENGTH


async def test_the_scrubber_goes_round_all_closed_records_and_waits_in_between(tmp_path: Path) -> None:
    now = 0.0
    leader, _ = start(tmp_path)
    leader.clock = lambda: now
    await answer(leader, 1)
    closed = len(cached(leader, PAGE)) + len(cached(leader, SNAPSHOT))
    steps = leader.state.next_number
    for _ in range(20):
        leader.look_after()  # at one moment: once is enough
        await turns()
    assert leader.state.next_number == steps + 1
    for _ in range(10):
        now += 100.0
        leader.look_after()
        await turns()
    assert leader.counters["records_checked"] >= closed
    assert leader.counters["records_corrupt"] == 0


async def test_several_bad_records_within_a_while_end_the_engine_by_name(tmp_path: Path) -> None:
    leader, rank = start(tmp_path)
    deaths: list[Exception] = []
    leader._on_death = deaths.append
    for number in range(MOST_RECORDS):
        prompt = tuple(range(number * 100 + 1, number * 100 + 71))
        await answer(leader, 2 * number, prompt)
        flip(rank, next(ref for ref in cached(leader, PAGE) if leader.state.ledger.holders(ref) == (CACHE,)))
        generation = ask(leader, 2 * number + 1, prompt, 4)
        ended = await generation.wait()
        assert ended.error == "RecordCorrupt"
        if number < MOST_RECORDS - 1:
            await leader.emptied()
            assert not deaths
    await turns()
    (death,) = deaths
    assert isinstance(death, MemoryCorrupt)


async def test_a_refusal_is_no_answer_from_a_prefix_that_was_dropped(tmp_path: Path) -> None:
    """After the quarantine a new copy of the prefix is computed and cached, and found."""
    leader, rank = start(tmp_path)
    await answer(leader, 1)
    flip(rank, cached(leader, PAGE)[0])
    await answer(leader, 2)
    await answer(leader, 3)
    generation = ask(leader, 4, PROMPT, 3)
    assert isinstance(generation, Generation)
    assert not isinstance(generation, Refused)
    ended = await generation.wait()
    assert ended.cached_tokens > 0


async def test_one_bad_record_counts_once_however_many_checks_have_met_it(tmp_path: Path) -> None:
    """Its readers meet it in plan after plan until it is gone: one accident, and no reason to end the engine."""
    leader, rank = start(tmp_path, HeldRank)
    first = ask(leader, 1, PROMPT, 2)
    await turns()
    while first.last_word is None:
        await rank.report()
    flip(rank, cached(leader, PAGE)[0])
    meeting = [ask(leader, number, PROMPT, 3) for number in (2, 3)]
    await turns()
    leader.tell(Suspected((cached(leader, PAGE)[0],)))
    meeting.append(ask(leader, 4, PROMPT, 3))
    while any(generation.last_word is None for generation in meeting):
        await rank.report()
    while rank.held:
        await rank.report()
    await leader.emptied()
    leader.state.check_integrity()
    assert {generation.last_word.error for generation in meeting} <= {"RecordCorrupt", ""}
    assert leader.state.ledger.count(PAGE).quarantined == 1


async def test_a_bad_record_that_is_free_again_by_then_is_quarantined_all_the_same(tmp_path: Path) -> None:
    leader, _ = start(tmp_path)
    await answer(leader, 1)
    ledger = leader.state.ledger
    free = next(n for n in range(ledger.count(PAGE).total) if ledger.state(ledger.ref(PAGE, n)) is RecordState.FREE)
    leader.tell(Corrupted((ledger.ref(PAGE, free),)))
    await turns()
    assert ledger.count(PAGE).quarantined == 1
    leader.state.check_integrity()
    assert (await answer(leader, 2)).reason is EndReason.LENGTH
