"""The leader's end: the same verbs whatever moves the records. Here without a process; over a sidecar elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from transfer_double import PAGE, fill, hello, new_pools, page_items, same_records, tiny_layouts

from sluice_engine.pool import RecordPool
from sluice_engine.step import PullSet
from sluice_engine.transfer.errors import BadPeer, LinkClosed, PeerLost, StaleRecord, TransferUnavailable
from sluice_engine.transfer.link import SidecarLink, TransferLink
from sluice_engine.transfer.local import LocalLink
from sluice_engine.transfer.memory import Fault, MemoryFabric, MemoryTransfer
from sluice_engine.transfer.messages import (
    Attached,
    FetchWanted,
    LaneReport,
    PullEvent,
    PullFailed,
    PullsTerminal,
    RecordsDone,
    SidecarHello,
    Stats,
    encode_frame,
)
from sluice_engine.transfer.stream import StreamTransfer, read_ranges
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.source import RecordBytes, RecordName
from sluice_records import RecordKind

Pools = dict[RecordKind, RecordPool]


@dataclass
class Leader:
    """What it heard, in order."""

    events: list[PullEvent] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    on_fetch: Callable[[FetchWanted], None] | None = None

    def __call__(self, event: PullEvent) -> None:
        self.events.append(event)
        if self.on_fetch is not None and isinstance(event, FetchWanted):
            self.on_fetch(event)
        self.heard.set()

    async def until(self, kind: type[PullEvent]) -> PullEvent:
        async with asyncio.timeout(10):
            while not (found := [event for event in self.events if isinstance(event, kind)]):
                self.heard.clear()
                await self.heard.wait()
        return found[0]


@pytest.fixture
def source() -> Pools:
    pools = new_pools(tiny_layouts(perturbed=True))
    fill(pools)
    return pools


@pytest.fixture
def reader() -> Pools:
    return new_pools(tiny_layouts(perturbed=True))


@pytest.fixture
async def leader() -> Leader:
    return Leader()


@pytest.fixture
async def streamed(source: Pools, reader: Pools, leader: Leader) -> AsyncIterator[LocalLink]:
    link = LocalLink("reader.1", StreamTransfer(reader), reader, leader)
    await link.attach(hello(source, transport="stream"))
    yield link
    await link.close()


def answer(link: TransferLink, source: Pools) -> Callable[[FetchWanted], None]:
    """A source at the other end of the lease's stream, soon."""

    def send(wanted: FetchWanted) -> None:
        for data in read_ranges(source, wanted.fetch.records, lambda *_: 3, message_bytes=64):
            asyncio.get_running_loop().call_soon(link.feed, wanted.lease_id, data)

    return send


async def test_records_come_by_the_leases_own_stream(
    streamed: LocalLink, source: Pools, reader: Pools, leader: Leader
) -> None:
    leader.on_fetch = answer(streamed, source)
    items = page_items(source, [(0, 3), (1, 4), (20, 9)])
    streamed.pull(PullSet("lease", "source.1", items))
    done = await leader.until(RecordsDone)
    assert isinstance(done, RecordsDone)
    assert done.num_records == 3
    assert same_records(source, reader, items)
    streamed.forget("lease")
    assert (await streamed.stats()).leases == 0


async def test_a_stopped_lease_is_terminal_when_its_stream_is(
    streamed: LocalLink, source: Pools, leader: Leader
) -> None:
    streamed.pull(PullSet("lease", "source.1", page_items(source, [(0, 3)])))
    await leader.until(FetchWanted)
    streamed.stop("lease")
    streamed.stream_ended("lease")
    assert await leader.until(PullsTerminal) == PullsTerminal("lease", ())
    with pytest.raises(BadPeer, match="not asked for"):
        streamed.feed("lease", RecordBytes("page", 0, 0, b"late"))


@pytest.mark.parametrize(
    "lie",
    [
        RecordBytes("page", 0, 1, b"not the start"),
        RecordBytes("page", 1, 0, b"another record"),
        RecordBytes("state", 0, 0, b"another kind"),
        RecordBytes("shoe", 0, 0, b"no kind"),
        RecordBytes("page", 0, 0, b""),
        RecordBytes("page", 0, 0, bytes(1 << 20)),
    ],
)
async def test_bytes_that_were_not_asked_for_fail_the_lease_and_touch_nothing(
    streamed: LocalLink, source: Pools, reader: Pools, leader: Leader, lie: RecordBytes
) -> None:
    streamed.pull(PullSet("lease", "source.1", page_items(source, [(0, 3)])))
    await leader.until(FetchWanted)
    before = {kind: pool.buffer.copy() for kind, pool in reader.items()}
    with pytest.raises(BadPeer):
        streamed.feed("lease", lie)
    failed = await leader.until(PullFailed)
    assert isinstance(failed, PullFailed)
    assert failed.reason == "BadPeer"
    assert all(np.array_equal(pool.buffer, before[kind]) for kind, pool in reader.items())


async def test_a_flipped_bit_on_the_stream_is_found(streamed: LocalLink, source: Pools, leader: Leader) -> None:
    items = page_items(source, [(0, 3)])
    source[PAGE].record(0)[5] ^= 1
    leader.on_fetch = answer(streamed, source)
    streamed.pull(PullSet("lease", "source.1", items))
    failed = await leader.until(PullFailed)
    assert isinstance(failed, PullFailed)
    assert failed.reason == "DigestMismatch"


def test_a_source_sends_only_the_life_that_was_asked_for(source: Pools) -> None:
    lives = iter([3, 3, 4])
    sent = []
    with pytest.raises(StaleRecord, match="asked for life 3, is 4"):
        sent += list(read_ranges(source, [RecordName("page", 0, 3)], lambda *_: next(lives), message_bytes=64))
    with pytest.raises(StaleRecord):
        list(read_ranges(source, [RecordName("page", 0, 3)], lambda *_: None))
    for name in (RecordName("page", 999, 3), RecordName("shoe", 0, 3)):
        with pytest.raises(StaleRecord):
            list(read_ranges(source, [name], lambda *_: 3))


def test_messages_are_at_most_as_large_as_told_and_cover_the_record(source: Pools) -> None:
    messages = list(read_ranges(source, [RecordName("page", 7, 3)], lambda *_: 3, message_bytes=100))
    assert all(len(message.data) <= 100 for message in messages)
    assert b"".join(message.data for message in messages) == source[PAGE].record(7).tobytes()


async def test_the_same_verbs_over_memory(source: Pools, reader: Pools, leader: Leader) -> None:
    fabric = MemoryFabric()
    transfer = MemoryTransfer(fabric, reader)
    link: TransferLink = LocalLink("reader.1", transfer, reader, leader)
    with pytest.raises(PeerLost):
        await link.attach(hello(source))
    fabric.serve("source.1", source)
    await link.attach(hello(source))
    items = page_items(source, [(0, 3), (1, 4)])
    link.pull(PullSet("lease", "source.1", items))
    await leader.until(RecordsDone)
    assert same_records(source, reader, items)
    with pytest.raises(TransferUnavailable):
        link.feed("lease", RecordBytes("page", 0, 0, b""))
    await link.close()
    assert link.closed.result() == "closed here"
    with pytest.raises(LinkClosed):
        link.stop("lease")


async def test_what_breaks_a_local_link_closes_it_with_the_reason(source: Pools, reader: Pools, leader: Leader) -> None:
    fabric = MemoryFabric({"source.1": source})

    def burst(piece: object) -> Fault:
        raise ZeroDivisionError("a bug of ours")

    link = LocalLink("reader.1", MemoryTransfer(fabric, reader, burst), reader, leader)
    await link.attach(hello(source))
    link.pull(PullSet("lease", "source.1", page_items(source, [(0, 3)])))
    async with asyncio.timeout(10):
        assert await link.closed == "ZeroDivisionError: a bug of ours"
    await link.close()


async def test_a_hello_is_told_word_for_word(streamed: LocalLink, reader: Pools) -> None:
    told = streamed.hello.source_hello(Fingerprint.of({"model": "tiny"}))
    assert told.incarnation == "reader.1"
    assert told.transport == "stream"
    assert {pool.kind: pool.format_id for pool in told.pools} == {
        kind.value: pool.layout.format_id for kind, pool in reader.items()
    }


async def test_connecting_outlives_a_sidecar_that_is_just_dying(tmp_path: Path) -> None:
    """After a fence the leader may still reach the dead one's listener: it hangs up, and the next one listens."""
    path, visits = tmp_path / "s.sock", 0
    told = SidecarHello("nixl", "i.1", "agent", b"", (), 1, LaneReport("cma", "cma", 1.0))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        if visits == 2:
            writer.write(encode_frame(told)[:7])  # dies inside its hello
        elif visits > 2:
            writer.write(encode_frame(told))
            await writer.drain()
            await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        link = await SidecarLink.connect(path, lambda event: None, timeout_s=20)
        assert (visits, link.hello) == (3, told)
        await link.close()


async def test_an_answer_to_who_has_given_up_is_nobodys_and_the_link_goes_on(tmp_path: Path) -> None:
    """A sidecar that was slow for as long as it may be: its late word tore the link, and all pulls with it."""
    path, asked, answer = tmp_path / "s.sock", asyncio.Event(), asyncio.Event()
    told = SidecarHello("nixl", "i.1", "agent", b"", (), 1, LaneReport("cma", "cma", 1.0))
    stats = Stats({"pulls": 3}, 1, 0, 0, 0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(told))
        await reader.read(1)
        asked.set()
        await answer.wait()
        writer.write(encode_frame(Attached("source.1")) + encode_frame(Attached("source.1")) + encode_frame(stats))
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        link = await SidecarLink.connect(path, lambda event: None, timeout_s=20)
        early = asyncio.create_task(link.attach(hello({})))
        late = asyncio.create_task(link.attach(hello({})))
        await asked.wait()
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        asking = asyncio.create_task(link.stats())
        await asyncio.sleep(0)
        answer.set()
        async with asyncio.timeout(20):
            await late
            assert await asking == stats
        assert not link.closed.done()
        # Nor is it a fault of its end.
        again = asyncio.create_task(link.attach(hello({})))
        await asyncio.sleep(0)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await link.close()
        assert "closed" in link.closed.result()
