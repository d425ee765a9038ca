"""Overlap: the leader plans while ranks execute, and makes the very plans that lockstep makes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leader_double import HeldRank, PromptRank, ask, make_leader, try_to_ask, turns
from lease_double import Leases

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.scheduling.sequence import Aborted
from sluice_engine.leader.scheduling.state import Plan
from sluice_engine.leader.scheduling.under_way import UnderWay
from sluice_engine.pool import Pools
from sluice_engine.step import PullSet, StepRecord, StepResult
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_protocol.generate import EndReason, Refused, Role
from sluice_protocol.source import Complete, FirstToken, Granted, GrantedRecord, LeaseAdmitted, RecordName, Released
from sluice_records import RecordKind, Trailer, extend_chain, record_identity
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder

# -- the plans -------------------------------------------------------------------------------------------------------

arrivals = st.tuples(
    st.integers(0, 12),  # with which step
    st.integers(1, 100),  # tokens of the prompt
    st.integers(1, 20),  # most tokens
    st.none() | st.integers(0, 8),  # aborted so many steps later
)


async def drive(tmp_path: Path, trace: list[tuple[int, int, int, int | None]], *, lockstep: bool) -> tuple[object, ...]:
    """Everything that the ranks were told, and what became of each request."""
    leader = make_leader(tmp_path, lockstep=lockstep)
    asked: dict[int, Generation | Refused] = {}

    def begin(number: int) -> None:
        _, size, most, _ = trace[number]
        asked[number] = try_to_ask(leader, number, tuple(range(number, number + size)), most)

    def on_send(step: int) -> None:
        for number, (when, _, _, patience) in enumerate(trace):
            if number not in asked and when <= step:
                begin(number)
            elif patience is not None and step == when + patience and number in asked:
                generation = asked[number]
                if isinstance(generation, Generation):
                    leader.tell(Aborted(generation.sequence))

    rank = PromptRank(leader, on_send=on_send)
    leader.ranks.append(rank)
    async with asyncio.timeout(60):
        for number in range(len(trace)):  # the first, and those whose step does not come
            if number not in asked:
                begin(number)
                await leader.emptied()
    leader.state.check_integrity()
    # Ranks hear of the last that were released with the next step.
    living = {ref for _, ref in leader.state.references()} | set(leader.state.ledger.take_released())
    assert leader.sources.closed.refs() <= living
    ends = {
        number: each.reason if isinstance(each, Refused) else (each.end, each.sent)
        for number, each in asked.items()
        if trace[number][3] is None  # who goes may have heard of one token more or less
    }
    return rank.frames, ends


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=st.lists(arrivals, min_size=1, max_size=8))
def test_ranks_are_told_the_same_in_lockstep_and_in_overlap(tmp_path: Path, trace) -> None:
    lockstep = asyncio.run(drive(tmp_path, trace, lockstep=True))
    assert asyncio.run(drive(tmp_path, trace, lockstep=False)) == lockstep


@pytest.mark.parametrize(("lockstep", "most"), [(True, 1), (False, 2)])
async def test_ranks_are_never_further_behind(tmp_path: Path, lockstep: bool, most: int) -> None:
    leader = make_leader(tmp_path, lockstep=lockstep)
    rank = HeldRank(leader)
    leader.ranks.append(rank)
    generation = ask(leader, 1, (1, 2, 3), 6)
    await turns()
    assert len(rank.held) == most
    while generation.last_word is None:
        await rank.report()
        assert len(rank.held) <= most
    assert generation.last_word.reason is EndReason.LENGTH


async def test_what_may_yet_decide_is_waited_for(tmp_path: Path) -> None:
    """One token left to choose: a plan that does not know it has nothing to do, and is not made."""
    leader = make_leader(tmp_path)
    rank = HeldRank(leader)
    leader.ranks.append(rank)
    ask(leader, 1, (1, 2, 3), 1)
    await turns()
    assert (len(rank.held), leader.state.next_number) == (1, 1)
    await rank.report()
    async with asyncio.timeout(30):
        await leader.emptied()


async def test_a_step_is_done_when_all_ranks_have_reported_it_and_those_before_it(tmp_path: Path) -> None:
    leader = make_leader(tmp_path)
    first, second = HeldRank(leader, 0), HeldRank(leader, 1)
    leader.ranks += [first, second]
    generation = ask(leader, 1, (1, 2, 3), 6)
    await turns()
    await first.report()
    await first.report()  # both steps, and the other rank none
    assert (generation.sent, len(first.frames)) == (0, 2)
    await second.report()
    assert (generation.sent, len(first.frames)) == (1, 3)
    while first.held or second.held:
        for rank in (first, second):
            if rank.held:
                await rank.report()
    assert generation.last_word.reason is EndReason.LENGTH


# -- pulls -----------------------------------------------------------------------------------------------------------


class Transport:
    """Takes note of what is to be pulled; of records only their trailers come."""

    is_up = True

    def __init__(self, pools: Pools) -> None:
        self.pulled: list[str] = []
        self._pools = pools

    def pull(self, pulls: PullSet) -> bool:
        self.pulled.append(pulls.lease_id)
        for item in pulls.items:
            pool = self._pools[item.kind]
            told = Trailer(pool.layout.format_id, item.identity, item.source_generation, item.valid_tokens, item.digest)
            pool.write_trailer(item.destination, told)
        return True

    def stop(self, lease_id: str) -> None:
        self.pulled.append(f"stop {lease_id}")

    def forget(self, lease_id: str) -> None: ...

    def stream_ended(self, lease_id: str) -> None: ...

    def describe(self) -> dict[str, object]:
        return {}


def make_reader(tmp_path: Path) -> tuple[Leader, HeldRank, Transport]:
    leader = make_leader(tmp_path, Role.DECODE)
    rank = HeldRank(leader)
    transport = Transport(rank.pools)
    leader.ranks.append(rank)
    leader.readers.transfer, leader.readers.leases = transport, Leases()  # type: ignore[assignment]
    return leader, rank, transport


def grant(leader: Leader, generation: Generation) -> str:
    """All records of its prompt. The lease's id."""
    state, prompt = leader.state, generation.spec.prompt
    assert len(prompt) < state.limits.page_tokens, "its one page is its tail"
    key = extend_chain(state.salt, prompt)
    records = tuple(
        GrantedRecord(kind, at, 1, record_identity(state.layouts[kind], key), 7, len(prompt), 0)
        for at, kind in enumerate((RecordKind.PAGE, RecordKind.STATE))
    )
    assert isinstance(leader.readers.leases, Leases)
    lease_id = leader.readers.leases.streams[-1].lease_id
    leader.readers.hear(lease_id, (LeaseAdmitted(), Granted(records)))
    return lease_id


async def decoding(tmp_path: Path) -> tuple[Leader, HeldRank, Transport, str]:
    """One room was committed and decodes: two steps are with the rank. Its lease."""
    leader, rank, transport = make_reader(tmp_path)
    generation = ask(leader, 1, (1, 2, 3), 12)
    await turns()
    lease = grant(leader, generation)
    await turns()
    assert transport.pulled == [lease]  # nothing was under way
    leader.readers.hear(lease, (FirstToken(40, None, 0, 1, False), Complete(2, 0, 3)))
    leader.readers.on_records_done(lease, 2, 0)
    leader.readers.hear(lease, (Released((RecordName("page", 0, 1), RecordName("state", 1, 1))),))
    await rank.report()
    await turns()
    assert len(rank.held) == 2
    return leader, rank, transport, lease


async def test_a_pull_begins_when_the_ranks_have_done_with_all_steps_before_it(tmp_path: Path) -> None:
    """A step that is still to be carried out may write the trailer of a record that the pull's step gives away."""
    leader, rank, transport, lease = await decoding(tmp_path)
    second = ask(leader, 2, (5, 6, 7), 4)
    await rank.report()  # the room of the second is opened with the next plan
    other = grant(leader, second)
    await rank.report()
    authorised = len(rank.frames) - 1
    assert (transport.pulled, len(rank.held)) == ([lease], 2)
    await rank.report()
    assert rank.held[0].number == authorised
    assert transport.pulled == [lease, other]


async def test_a_pull_that_has_not_begun_is_never_begun_once_its_room_is_cancelled(tmp_path: Path) -> None:
    leader, rank, transport, lease = await decoding(tmp_path)
    second = ask(leader, 2, (5, 6, 7), 4)
    await rank.report()
    grant(leader, second)
    await rank.report()
    leader.abandon(second)
    while rank.held:
        await rank.report()
    assert transport.pulled == [lease]
    async with asyncio.timeout(30):
        await leader.emptied()
    leader.state.check_integrity()


# -- what the flight recorder says -----------------------------------------------------------------------------------


async def test_the_recorder_has_what_is_with_the_ranks(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path / "recorder", engine_kind(Role.UNIFIED, "nixl").recorded)
    marks = LeaderMarks(recorder, cold_ns=1000)
    leader = make_leader(tmp_path, marks=marks)
    rank = HeldRank(leader)
    leader.ranks.append(rank)
    ask(leader, 1, (1, 2, 3), 12)
    ask(leader, 2, (4, 5, 6), 12)
    await turns()
    assert told(recorder) == (2, 0, 4, 2000)  # steps 0 and 1 of two rows each
    await rank.report()
    assert told(recorder)[:3] == (3, 1, 4)
    while rank.held:
        await rank.report()
    step, progress, pending, expected = told(recorder)
    assert (progress, pending, expected) == (step, 0, 0)


def told(recorder: Recorder) -> tuple[int, ...]:
    row = Copy(recorder.view).rows()["leader.loop"]
    return row.step, row.progress, row.pending, row.expected_ns


def test_a_step_that_waited_for_the_one_before_is_not_called_slow() -> None:
    """Two were sent at once and took a second each."""
    under_way = UnderWay(lockstep=False)
    for number in range(2):
        planned = Plan(StepRecord(number), {}, (), (), (), (), progressed=True, tokens=0)
        under_way.add(planned, [0], now=10.0)
    seconds = []
    for number, now in ((0, 11.0), (1, 12.0)):
        step = under_way.awaiting(number, 0)
        assert step is not None
        step.results[0] = StepResult(number, 0, (), (), 0)
        done = under_way.take_done(now)
        assert done is not None
        seconds.append(done[1])
    assert seconds == [1.0, 1.0]
    assert under_way.take_done(13.0) is None
