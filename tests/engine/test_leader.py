"""The leader's loop over a rank in the same process: the real leader, scheduler, executor and token sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sluice_engine.errors import RankFault
from sluice_engine.leader.generation import Generation
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.scheduling.sequence import EndCause, Gone
from sluice_engine.leader.server import LEAST_PAUSE_S, MOST_PAUSE_S, TokenSink
from sluice_engine.pool import RecordPool
from sluice_engine.rank.executor import Executor
from sluice_engine.rank.host_store import HostStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.scripted import Script, ScriptedModel
from sluice_engine.spec import resolve
from sluice_engine.step import StepResult
from sluice_protocol.engine_spec import EngineSpec, ScriptedSpec
from sluice_protocol.generate import EndReason, GenerateRequest, Role, TokenBatch
from sluice_protocol.sampling import Sampling
from sluice_records import RecordKind

TOKENS = 6


class RankHere:
    """Executes in a turn of its own, as if over a socket. `said` is what happened, in order."""

    rank = 0

    def __init__(
        self, leader: Leader, said: list[str], change: Callable[[StepResult], StepResult] = lambda result: result
    ) -> None:
        self._change = change
        layouts, plan = leader.resolved.layouts, leader.resolved.pools
        pools = {
            kind: RecordPool(layouts[kind], plan[kind], np.zeros(plan[kind] * layouts[kind].stride, dtype=np.uint8))
            for kind in RecordKind
        }
        mirror = RecordMirror(plan)
        self._executor = Executor(0, HostStore(0, pools), mirror, ScriptedModel(Script(), pools, mirror))
        self._leader, self._said = leader, said

    def send(self, frame: bytes) -> None:
        result = self._change(self._executor.execute(frame))
        self._said.append(f"step {result.number}")
        asyncio.get_running_loop().call_later(0, self._leader.on_result, result)


async def write_tokens(sink: TokenSink, said: list[str]) -> None:
    """As the Attach stream does."""
    while True:
        said.append(f"tokens of step {(await sink.get()).step}")


def make_leader(tmp_path: Path, on_death: Callable[[Exception], None], *, lockstep: bool = False) -> Leader:
    spec = EngineSpec(
        role=Role.UNIFIED,
        name="u",
        run_dir=str(tmp_path),
        scripted=ScriptedSpec(),
        memory_bytes=16 << 20,
        lockstep=lockstep,
    )
    return Leader(spec, resolve(spec), "u.1", on_death=on_death)


def begin(leader: Leader) -> Generation:
    leader.attach("gw", TokenSink().put)
    generation = leader.submit(GenerateRequest("r", "gw", (1, 2, 3), (), Sampling(max_tokens=TOKENS)))
    assert isinstance(generation, Generation)
    return generation


@pytest.mark.parametrize("lockstep", [False, True])
async def test_the_next_step_is_with_the_ranks_before_anybody_writes_the_tokens_of_the_last(
    tmp_path: Path, lockstep: bool
) -> None:
    """Whoever writes takes longer than the plan, and the ranks would wait for it; in overlap for the one after it."""
    died: list[Exception] = []
    leader = make_leader(tmp_path, died.append, lockstep=lockstep)
    said: list[str] = []
    leader.ranks.append(RankHere(leader, said))
    sink = TokenSink(count(step=1).__next__)  # by its clock every step takes a second: no two travel together
    leader.attach("gw", sink.put)
    writing = asyncio.create_task(write_tokens(sink, said))
    generation = leader.submit(GenerateRequest("r", "gw", (1, 2, 3), (), Sampling(max_tokens=TOKENS)))
    assert isinstance(generation, Generation)
    async with asyncio.timeout(30):
        ended = await generation.wait()
        await leader.emptied()
    writing.cancel()
    assert (ended.reason, ended.num_tokens, died) == (EndReason.LENGTH, TOKENS, [])
    steps = [f"step {number}" for number in range(TOKENS)]
    writes = [f"tokens of step {number}" for number in range(TOKENS)]
    ahead = 1 if lockstep else 2
    between = [told for pair in zip(steps[ahead:], writes[:-ahead], strict=True) for told in pair]
    assert said == [*steps[:ahead], *between, *writes[-ahead:]]


def batch(step: int, streams: int) -> TokenBatch:
    return TokenBatch(step, tuple(range(streams)), (1,) * streams, (step,) * streams)


async def test_a_message_that_comes_after_a_pause_leaves_at_once_and_one_right_after_another_waits_for_company() -> (
    None
):
    now = 100.0
    sink = TokenSink(lambda: now)
    sink.put(batch(1, 40))
    assert (await sink.get()).step == 1
    sink.put(batch(2, 40))
    waiting = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    sink.put(batch(3, 40))
    merged = await waiting
    assert (merged.step, merged.counts) == (3, (2,) * 40)
    assert merged.tokens == (2, 3) * 40
    now += MOST_PAUSE_S
    sink.put(batch(4, 40))
    last = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    assert last.done()


async def test_few_streams_wait_for_company_only_so_long_as_nobody_sees_it() -> None:
    now = 100.0
    sink = TokenSink(lambda: now)
    for step in range(3):
        sink.put(batch(step, 1))
        got = asyncio.create_task(sink.get())
        await asyncio.sleep(0)
        assert got.done()
        now += LEAST_PAUSE_S
    sink.put(batch(3, 1))
    waits = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    assert waits.done()  # a pause of that length was there already
    sink.put(batch(4, 1))
    sink.put(batch(5, 1))
    assert (await sink.get()).counts == (2,)


async def test_a_pause_has_a_bound() -> None:
    """The clock stands, and the pause is over all the same."""
    sink = TokenSink(lambda: 100.0)
    sink.put(batch(1, 100_000))
    await sink.get()
    sink.put(batch(2, 1))
    async with asyncio.timeout(10):
        assert (await sink.get()).step == 2


CHANGES: dict[str, Callable[[StepResult], StepResult]] = {
    "no row": lambda result: msgspec.structs.replace(result, sampled=()),
    "a row without a token": lambda result: msgspec.structs.replace(
        result, sampled=tuple(msgspec.structs.replace(row, tokens=()) for row in result.sampled)
    ),
    "another row": lambda result: msgspec.structs.replace(
        result, sampled=tuple(msgspec.structs.replace(row, row=row.row + 1) for row in result.sampled)
    ),
    "a row twice": lambda result: msgspec.structs.replace(result, sampled=2 * result.sampled),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_a_result_that_is_not_what_was_asked_for_ends_the_engine(
    tmp_path: Path, change: Callable[[StepResult], StepResult]
) -> None:
    """One row less in one result, and that client waited for its last token for ever, in an engine that was idle."""
    died: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    leader = make_leader(tmp_path, died.set_result)
    leader.ranks.append(RankHere(leader, [], change))
    generation = begin(leader)
    async with asyncio.timeout(30):
        error = await died
    assert isinstance(error, RankFault)
    assert error.reason == "IncompleteResult"
    assert generation.last_word is None


async def test_a_digest_that_was_not_told_ends_the_engine_too(tmp_path: Path) -> None:
    died: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    leader = make_leader(tmp_path, died.set_result)
    leader.ranks.append(RankHere(leader, [], lambda result: msgspec.structs.replace(result, digests=())))
    leader.attach("gw", TokenSink().put)
    page = leader.resolved.limits.page_tokens
    leader.submit(GenerateRequest("r", "gw", (1,) * (page + 1), (), Sampling(max_tokens=TOKENS)))
    async with asyncio.timeout(30):
        error = await died
    assert "digests" in str(error)


async def test_a_sequence_that_has_finished_leaves_no_stream_behind(tmp_path: Path) -> None:
    leader = make_leader(tmp_path, lambda error: None)
    generation = begin(leader)
    leader._on_gone(Gone(generation.sequence, EndCause.FINISHED, 0, 1))
    ended = await generation.wait()
    assert (ended.reason, ended.error) == (EndReason.FAILED, "TokensLost")
    assert not leader.generations
