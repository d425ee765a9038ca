"""A source's half of handoffs on the leader's loop: how long a lease may last, and who hears what meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from leader_double import HeldRank, PromptRank, make_leader, turns
from lease_double import HELLO, SourceEnd

from sluice_engine.leader.handoff.ports import StreamEnd
from sluice_engine.leader.handoff.source import PULL_BASE_S, REASSURE_S
from sluice_engine.leader.leader import Leader
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Role
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import (
    Complete,
    Fetch,
    Granted,
    LeaseAdmitted,
    Open,
    Progress,
    Pulled,
    ReaderMessage,
    RecordName,
    Released,
    WantPrefill,
)

PROMPT = tuple(range(1, 41))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def source(tmp_path: Path, rank: type[HeldRank] = PromptRank) -> tuple[Leader, Clock]:
    clock = Clock()
    leader = make_leader(tmp_path, Role.PREFILL, clock=clock, memory_bytes=400_000, max_running=4)
    leader.ranks.append(rank(leader))
    return leader, clock


def opened(**changes: object) -> Open:
    want = WantPrefill(PROMPT, (), Sampling(max_tokens=9), "r")
    told: dict[str, object] = {
        "lease_id": "lease",
        "incarnation": HELLO.incarnation,
        "fingerprint": HELLO.fingerprint,
        "want": want,
        "have_prefix": 0,
        "ttl_ms": 60_000,
    }
    return Open(**(told | changes))  # type: ignore[arg-type]


def hear(leader: Leader, stream: SourceEnd, *messages: ReaderMessage) -> None:
    leader.sources.hear(stream, messages)


async def completed(leader: Leader, **changes: object) -> SourceEnd:
    stream = SourceEnd()
    hear(leader, stream, opened(**changes))
    for _ in range(200):
        await turns()
        if stream.is_complete:
            return stream
    raise AssertionError(stream.said)


async def test_what_is_pulled_is_released_by_name_and_held_until_then(tmp_path: Path) -> None:
    leader, _ = await source(tmp_path)
    stream = await completed(leader)
    assert len(leader.sources) == 1
    hear(leader, stream, Pulled())
    assert stream.released == tuple(record.name for record in stream.granted)
    assert (stream.ended, len(leader.sources)) == (StreamEnd.OK, 0)
    await leader.emptied()
    leader.state.check_integrity()


async def test_a_lease_that_is_not_pulled_in_time_ends_by_name(tmp_path: Path) -> None:
    leader, clock = await source(tmp_path)
    stream = await completed(leader)
    clock.now += PULL_BASE_S
    leader.sources.look()
    assert stream.ended is None
    clock.now += 1.0
    leader.sources.look()
    assert (stream.ended, stream.detail) == (StreamEnd.OUT_OF_TIME, "lease: complete, and not pulled within 10 s")
    assert leader.counters["leases_stalled"] == 1
    await leader.emptied()
    leader.state.check_integrity()


async def test_a_ttl_that_the_reader_asked_for_is_no_stall(tmp_path: Path) -> None:
    leader, clock = await source(tmp_path)
    stream = await completed(leader, ttl_ms=3000)
    clock.now += 3.1
    leader.sources.look()
    assert (stream.ended, stream.detail) == (StreamEnd.OUT_OF_TIME, "lease: its ttl ran out")
    assert leader.counters["leases_stalled"] == 0


async def test_a_reader_hears_that_its_prompt_is_still_computed_and_no_more_once_all_is_granted(
    tmp_path: Path,
) -> None:
    leader, clock = await source(tmp_path, HeldRank)
    stream = SourceEnd()
    hear(leader, stream, opened())
    await turns()
    for _ in range(3):
        clock.now += REASSURE_S / 2 + 0.1
        leader.sources.look()
    assert [type(message) for message in stream.said] == [LeaseAdmitted, Granted]
    assert stream.granted == []
    rank = leader.ranks[0]
    assert isinstance(rank, HeldRank)
    while not stream.is_complete:
        await rank.report()
    clock.now += REASSURE_S * 2
    said = list(stream.said)
    leader.sources.look()
    assert stream.said == said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": "yesterday"}, "IncarnationChanged"),
        ({"fingerprint": Fingerprint.of({"a": "b"})}, "FingerprintMismatch"),
    ],
)
async def test_a_reader_that_met_another_source_is_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    leader, _ = await source(tmp_path)
    stream = SourceEnd()
    hear(leader, stream, opened(**changes))
    assert [refusal.reason for refusal in stream.refusals] == [reason]
    assert (stream.ended, len(leader.sources), len(leader.state.sequences)) == (StreamEnd.OK, 0, 0)


@pytest.mark.parametrize("first", [Pulled(), Fetch((RecordName("page", 0, 1),)), Progress(3)])
async def test_anything_before_open_ends_that_stream_and_is_counted(tmp_path: Path, first: ReaderMessage) -> None:
    leader, _ = await source(tmp_path)
    stream = SourceEnd()
    hear(leader, stream, first)
    assert (stream.said, stream.ended, leader.counters["unknown_messages"]) == ([], StreamEnd.UNKNOWN_MESSAGE, 1)
    leader.sources.hear_end(stream)
    hear(leader, SourceEnd(), opened())
    assert len(leader.sources) == 1


async def test_a_fetch_is_answered_only_for_what_was_granted(tmp_path: Path) -> None:
    leader, _ = await source(tmp_path)
    stream = await completed(leader)
    mine = stream.granted[0].name
    hear(leader, stream, Fetch((mine,)))
    assert stream.bytes_of == [mine]
    hear(leader, stream, Fetch((mine, RecordName("page", 9999, 1))))
    assert (stream.bytes_of, stream.ended) == ([mine], StreamEnd.UNKNOWN_MESSAGE)
    await leader.emptied()
    leader.state.check_integrity()


@pytest.mark.parametrize("complete", [False, True])
async def test_a_drain_that_is_over_tells_each_reader_why(tmp_path: Path, complete: bool) -> None:
    leader, _ = await source(tmp_path, PromptRank if complete else HeldRank)
    stream = await completed(leader) if complete else SourceEnd()
    if not complete:
        hear(leader, stream, opened())
    leader.sources.refuse_all("Draining", "time is over")
    assert [refusal.reason for refusal in stream.refusals] == ["Draining"]
    assert (stream.ended, len(leader.sources)) == (StreamEnd.OK, 0)


async def test_a_new_incarnation_ends_every_lease_and_no_message_that_was_under_way_matters(tmp_path: Path) -> None:
    leader, _ = await source(tmp_path)
    stream = await completed(leader)
    said = list(stream.said)
    leader.sources.end_all()
    hear(leader, stream, Pulled())
    leader.sources.hear_end(stream)
    assert (stream.said, stream.ended, len(leader.sources)) == (said, StreamEnd.OK, 0)
    assert not [message for message in stream.said if isinstance(message, Released)]
    assert [message for message in stream.said if isinstance(message, Complete)]
    await leader.emptied()
    leader.state.check_integrity()
