"""A reader takes only records of its own tokens, whatever trailers and digests say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from leader_double import HeldRank, ask, make_leader, turns
from lease_double import Leases, ReaderEnd

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.handoff.granted import fault_of_commit, fault_of_grant
from sluice_engine.leader.leader import Leader
from sluice_engine.step import PullSet
from sluice_protocol.generate import EndReason, Role
from sluice_protocol.source import (
    Complete,
    FirstToken,
    Granted,
    GrantedRecord,
    LeaseAdmitted,
    Pulled,
    Released,
    SourceMessage,
)
from sluice_records import Layouts, RecordKind, block_keys, extend_chain, record_identity

PROMPT = tuple(range(1, 41))  # two full pages and a tail


class Quiet:
    """A transport that does nothing."""

    is_up = True

    def pull(self, pulls: PullSet) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *told: {}


async def reading(tmp_path: Path, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 9) -> tuple[Leader, Generation]:
    leader = make_leader(tmp_path, Role.DECODE, memory_bytes=400_000, max_running=4)
    leader.ranks.append(HeldRank(leader))
    leader.readers.transfer, leader.readers.leases = Quiet(), Leases()  # type: ignore[assignment]
    generation = ask(leader, 1, prompt, max_tokens)
    await turns()
    return leader, generation


def stream_of(leader: Leader) -> ReaderEnd:
    """The one lease that is open."""
    leases = leader.readers.leases
    assert isinstance(leases, Leases)
    return leases.streams[-1]


def say(leader: Leader, *messages: SourceMessage) -> None:
    """The source does."""
    leader.readers.hear(stream_of(leader).lease_id, messages)


def source_grants(layouts: Layouts, salt: bytes, prompt: tuple[int, ...]) -> list[GrantedRecord]:
    """What a source that means this prompt would grant, from the definition of the hash chain."""
    size = layouts.page_tokens
    keys = list(block_keys(salt, prompt, size))
    tail = len(prompt) % size
    last = extend_chain(keys[-1] if keys else salt, prompt[len(prompt) - tail :]) if tail else keys[-1]
    page, state = layouts[RecordKind.PAGE], layouts[RecordKind.STATE]
    pages = [GrantedRecord("page", n, 1, record_identity(page, key), 7, size, n) for n, key in enumerate(keys)]
    if tail:
        pages.append(GrantedRecord("page", len(keys), 1, record_identity(page, last), 7, tail, len(keys)))
    return [*pages, GrantedRecord("state", 0, 1, record_identity(state, last), 7, len(prompt), 0)]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 40])
async def test_what_a_source_of_the_same_prompt_grants_is_taken(tmp_path: Path, tokens: int) -> None:
    prompt = PROMPT[:tokens]
    leader, generation = await reading(tmp_path, prompt)
    sequence = leader.state.sequences[generation.sequence]
    records = source_grants(leader.resolved.layouts, leader.state.salt, prompt)
    assert fault_of_grant(leader.state, sequence, records) == ""
    assert len(records) == len(sequence.pages) + 1


OTHER = (*PROMPT[:20], 63, *PROMPT[21:])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda mine, other: [other[1]], "page 1 of other tokens"),
        (lambda mine, other: [other[2]], "page 2 of other tokens"),
        (lambda mine, other: [other[-1]], "state 0 of other tokens"),
        (lambda mine, other: [mine[0], msgspec.structs.replace(mine[0], index=1)], "page 1 of other tokens"),
        (lambda mine, other: [msgspec.structs.replace(mine[0], index=3)], "page 3, which this sequence does not have"),
        (lambda mine, other: [msgspec.structs.replace(mine[-1], index=1)], "state 1, which"),
        (lambda mine, other: [msgspec.structs.replace(mine[0], kind="snapshot")], "snapshot 0, which"),
        (lambda mine, other: [msgspec.structs.replace(mine[2], valid_tokens=16)], "16 tokens where 8 are needed"),
    ],
)
async def test_records_of_another_prompt_fail_the_room_by_name(
    tmp_path: Path, change: Callable[..., list[GrantedRecord]], named: str
) -> None:
    leader, generation = await reading(tmp_path)
    layouts, salt = leader.resolved.layouts, leader.state.salt
    records = change(source_grants(layouts, salt, PROMPT), source_grants(layouts, salt, OTHER))
    say(leader, LeaseAdmitted(), Granted(tuple(records)))
    ended = generation.last_word
    assert (ended.reason, ended.error) == (EndReason.FAILED, "BadSource")
    assert named in ended.detail
    await leader.emptied()
    leader.state.check_integrity()
    assert len(leader.state.cache) == 0


async def test_a_prompt_with_an_equal_beginning_shares_that_much_and_no_more(tmp_path: Path) -> None:
    leader, generation = await reading(tmp_path)
    sequence = leader.state.sequences[generation.sequence]
    other = source_grants(leader.resolved.layouts, leader.state.salt, OTHER)
    assert fault_of_grant(leader.state, sequence, other[:1]) == ""
    assert fault_of_grant(leader.state, sequence, other[:2]) != ""


async def granted_in_full(tmp_path: Path, records: int) -> tuple[Leader, Generation]:
    """A reader to which that many of its records were granted, each of which is being filled."""
    leader, generation = await reading(tmp_path)
    grants = source_grants(leader.resolved.layouts, leader.state.salt, PROMPT)[:records]
    say(leader, LeaseAdmitted(), Granted(tuple(grants)))
    await turns()
    return leader, generation


async def test_what_was_granted_is_compared_once_more_when_it_is_committed(tmp_path: Path) -> None:
    leader, generation = await granted_in_full(tmp_path, 4)
    sequence = leader.state.sequences[generation.sequence]
    assert fault_of_commit(leader.state, sequence) == ""
    # The keys are mixed up between the grant and the commit: by a fault of ours, or of the memory that holds them.
    sequence.keys[0], sequence.keys[1] = sequence.keys[1], sequence.keys[0]
    await release(leader, 4)
    ended = generation.last_word
    assert ended is not None
    assert (ended.reason, ended.error) == (EndReason.FAILED, "BadSource")
    assert "page 0 was filled with other tokens" in ended.detail
    assert len(leader.state.cache) == 0


async def release(leader: Leader, records: int) -> None:
    """Every record that was granted is here, and the source releases them."""
    stream = stream_of(leader)
    say(leader, FirstToken(40, None, 0, 1, False), Complete(records, 0, len(PROMPT)))
    leader.readers.on_records_done(stream.lease_id, records, 0)
    names = tuple(record.name for record in source_grants(leader.resolved.layouts, leader.state.salt, PROMPT)[:records])
    say(leader, Released(names))


async def test_a_source_that_completes_without_a_record_commits_nothing(tmp_path: Path) -> None:
    leader, generation = await granted_in_full(tmp_path, 3)
    await release(leader, 3)
    ended = generation.last_word
    assert ended is not None
    assert (ended.reason, ended.error) == (EndReason.FAILED, "BadSource")
    assert ended.detail == "it completed with the wrong number of records: 3 said, 3 granted, 4 needed"
    assert len(leader.state.cache) == 0


async def test_a_record_that_was_granted_and_is_not_filled_is_missed_at_the_commit(tmp_path: Path) -> None:
    leader, generation = await granted_in_full(tmp_path, 3)
    sequence = leader.state.sequences[generation.sequence]
    assert fault_of_commit(leader.state, sequence) == "it completed without state 0"


async def test_what_is_granted_in_full_is_committed_when_it_is_released_and_not_before(tmp_path: Path) -> None:
    leader, generation = await granted_in_full(tmp_path, 4)
    stream = stream_of(leader)
    say(leader, FirstToken(40, None, 0, 1, False), Complete(4, 0, len(PROMPT)))
    assert stream.said == []
    leader.readers.on_records_done(stream.lease_id, 4, 0)
    assert stream.said == [Pulled()]
    assert generation.sequence in leader.readers
    names = tuple(record.name for record in source_grants(leader.resolved.layouts, leader.state.salt, PROMPT))
    say(leader, Released(names))
    assert generation.sequence not in leader.readers
    assert stream.is_over
    assert generation.last_word is None, "it decodes now"


async def test_another_generation_of_a_record_is_not_what_was_granted(tmp_path: Path) -> None:
    leader, generation = await granted_in_full(tmp_path, 4)
    say(leader, FirstToken(40, None, 0, 1, False), Complete(4, 0, len(PROMPT)))
    leader.readers.on_records_done(stream_of(leader).lease_id, 4, 0)
    grants = source_grants(leader.resolved.layouts, leader.state.salt, PROMPT)
    reused = msgspec.structs.replace(grants[0], generation=2)
    say(leader, Released(tuple(record.name for record in (reused, *grants[1:]))))
    ended = generation.last_word
    assert ended is not None
    assert (ended.reason, ended.error) == (EndReason.FAILED, "GenerationMismatch")


async def test_a_source_that_says_nothing_twice_in_a_row_is_silent(tmp_path: Path) -> None:
    leader, generation = await granted_in_full(tmp_path, 2)
    stream, leader.readers.silent_s = stream_of(leader), 5.0
    stream.quiet_since = leader.clock() - 100
    leader.readers.look()
    stream.quiet_since = leader.clock()  # it was this process that did not read
    leader.readers.look()
    stream.quiet_since = leader.clock() - 100
    leader.readers.look()
    assert generation.last_word is None
    leader.readers.look()
    ended = generation.last_word
    assert ended is not None
    assert (ended.error, ended.detail) == ("SourceSilent", "the source has not said anything of it for 5 s")
    assert stream.distrusts


async def test_a_source_that_calls_the_first_token_the_last_is_not_believed(tmp_path: Path) -> None:
    """Both sides have one rule for the end of a request: nobody waits for a token that the source will not send."""
    leader, generation = await granted_in_full(tmp_path, 2)
    say(leader, FirstToken(40, None, 0, 1, True))
    ended = generation.last_word
    assert ended is not None
    assert (ended.reason, ended.error) == (EndReason.FAILED, "BadSource")
    assert ended.detail == "it calls its first token 40 the last, and this request has more to come"
    assert len(leader.readers) == 1, "its records are free once no READ can land any more"
    leader.readers.on_pulls_terminal(stream_of(leader).lease_id, ())
    assert len(leader.readers) == 0
    rank = leader.ranks[0]
    assert isinstance(rank, HeldRank)
    await turns()
    while rank.held:
        await rank.report()
    await leader.emptied()
    leader.state.check_integrity()


async def test_a_first_token_that_ends_the_request_ends_it_though_the_source_does_not_say_so(tmp_path: Path) -> None:
    leader, generation = await reading(tmp_path, max_tokens=1)
    say(leader, LeaseAdmitted(), FirstToken(40, None, 0, 1, False))
    assert generation.last_word is not None
    assert generation.last_word.reason is EndReason.LENGTH
    assert stream_of(leader).is_over
