"""Two sidecars, two processes, one READ: what arrives is what was there, or an error with a reason."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sidecar_double import LANES, Pair, sidecar_pair
from transfer_double import PAGE, STATE, close, identity_of, same_records, tiny_layouts

from sluice_engine.step import PullSet
from sluice_engine.transfer.errors import BadPeer, LinkClosed
from sluice_engine.transfer.messages import PullFailed, PullsTerminal, RecordsDone
from sluice_engine.transfer.pull import PullerSettings
from sluice_engine.transfer.spec import SidecarRole
from sluice_records import Trailer

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

RECORD_BYTES = tiny_layouts().page.record_bytes
ONE_RECORD = PullerSettings(piece_bytes=RECORD_BYTES)


@pytest.mark.parametrize("lanes", LANES)
async def test_scattered_and_adjacent_records_arrive_whole_and_verified(tmp_path: Path, lanes: str) -> None:
    async with sidecar_pair(tmp_path, lanes) as pair:
        expected = "cma" if "cma" in lanes else "tcp"
        assert pair.reader.link.hello.lane.lane == expected
        assert pair.reader.link.hello.lane.warning == ""
        items = pair.items((0, 7), (1, 8), (2, 9), (20, 1), (39, 3)) + pair.items((5, 0), kind=STATE)
        pair.reader.pull(pair.source, "lease", items)
        done = await pair.reader.finish("lease")
        assert isinstance(done, RecordsDone), done
        assert done.num_records == len(items)
        assert same_records(pair.source.pools, pair.reader.pools, items)
        stats = await pair.reader.link.stats()
        assert stats.counters["records_digested"] == len(items)
        moved, over_tcp = stats.counters["bytes"], stats.counters["tcp_bytes"]
        assert over_tcp < moved / 2 if "cma" in lanes else over_tcp >= moved, (moved, over_tcp)


@pytest.mark.parametrize("lanes", LANES)
async def test_the_poller_can_be_held_between_pieces_of_one_record(tmp_path: Path, lanes: str) -> None:
    async with sidecar_pair(tmp_path, lanes, puller=ONE_RECORD) as pair:
        pair.reader.link.allow(2)
        items = pair.items(*((n, 39 - n) for n in range(6)))
        pair.reader.pull(pair.source, "lease", items)
        stats = await pieces_done(pair, 2)
        assert stats["pieces_posted"] == 2
        assert not pair.reader.events
        assert same_records(pair.source.pools, pair.reader.pools, items[:2])
        assert not pair.reader.pools[PAGE].record(items[2].destination).any()
        pair.reader.link.allow(-1)
        done = await pair.reader.finish("lease")
        assert isinstance(done, RecordsDone)
        assert same_records(pair.source.pools, pair.reader.pools, items)


async def test_a_sidecar_without_work_is_seldom_awake(tmp_path: Path) -> None:
    """NIXL's progress thread looked a thousand times a second, by CMA for nothing."""
    async with sidecar_pair(tmp_path, LANES[0]) as pair:
        before = switches(pair.reader.process.pid)
        await asyncio.sleep(2)
        assert switches(pair.reader.process.pid) - before < 1000


def switches(pid: int) -> int:
    """How often its threads have waited so far."""
    told = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for status in told)


async def pieces_done(pair: Pair, count: int) -> dict[str, int]:
    return (await pair.reader.stats_when(lambda told: told.counters.get("pieces_done", 0) >= count)).counters


async def in_flight(pair: Pair, count: int) -> None:
    await pair.reader.stats_when(lambda told: told.in_flight == count)


@pytest.mark.parametrize("lanes", LANES)
async def test_a_source_killed_between_pieces_fails_the_lease_and_strands_nothing(tmp_path: Path, lanes: str) -> None:
    async with sidecar_pair(tmp_path, lanes, puller=ONE_RECORD) as pair:
        pair.reader.link.allow(2)
        pair.reader.pull(pair.source, "lease", pair.items(*((n, n) for n in range(6))))
        await pieces_done(pair, 2)
        pair.source.kill()
        pair.reader.link.allow(-1)
        failed = await pair.reader.event(PullFailed, "lease")
        assert isinstance(failed, PullFailed)
        assert failed.reason == "PeerLost", failed
        assert await pair.reader.event(PullsTerminal, "lease") == PullsTerminal("lease", ())
        assert not pair.reader.process.is_over


async def freeze_mid_pull(pair: Pair) -> int:
    """The destination that is in flight from a source that stands still."""
    items = pair.items(*((n, n + 10) for n in range(6)))
    pair.reader.link.allow(2)
    pair.reader.pull(pair.source, "lease", items)
    await pieces_done(pair, 2)
    pair.source.signal(signal.SIGSTOP)
    pair.reader.link.allow(-1)
    await in_flight(pair, 1)
    return items[2].destination


async def test_a_frozen_source_leaves_a_zombie_that_lands_late_and_says_so(tmp_path: Path) -> None:
    """The control for the fence: without it the bytes do come."""
    async with sidecar_pair(tmp_path, LANES[1], puller=ONE_RECORD) as pair:
        record = await freeze_mid_pull(pair)
        assert await pair.reader.stop("lease") == PullsTerminal("lease", ((PAGE, record),))
        stats = await pair.reader.link.stats()
        assert stats.counters["zombies"] == 1
        assert stats.stranded == stats.in_flight == 1
        assert not pair.reader.pools[PAGE].record(record).any()
        pair.source.signal(signal.SIGCONT)
        await in_flight(pair, 0)
        assert same_records(pair.source.pools, pair.reader.pools, pair.items((record - 10, record)))


async def test_after_the_fence_nothing_lands_and_a_new_incarnation_serves(tmp_path: Path) -> None:
    async with sidecar_pair(tmp_path, LANES[1], puller=ONE_RECORD) as pair:
        record = await freeze_mid_pull(pair)
        assert await pair.reader.stop("lease") == PullsTerminal("lease", ((PAGE, record),))
        assert (await pair.reader.link.stats()).counters["zombies"] == 1
        pair.reader.kill()
        async with asyncio.timeout(5):
            await pair.reader.link.closed
        # The record is given out again, and the source wakes up.
        pool = pair.reader.pools[PAGE]
        pool.record(record)[:] = 0xAB
        pair.source.signal(signal.SIGCONT)
        fresh = await pair.respawn_reader("reader.2")
        await fresh.link.attach(pair.source.source_hello)
        assert (pool.record(record) == 0xAB).all()
        items = pair.items((0, 20), (1, 21))
        fresh.pull(pair.source, "again", items)
        assert isinstance(await fresh.finish("again"), RecordsDone)
        assert same_records(pair.source.pools, fresh.pools, items)
        assert (pool.record(record) == 0xAB).all()
        assert fresh.link.hello.agent_name != pair.first_reader.link.hello.agent_name


async def test_a_frozen_source_meets_its_deadline_by_itself(tmp_path: Path) -> None:
    settings = PullerSettings(piece_bytes=RECORD_BYTES, deadline_base_s=0.5, settle_s=0.2)
    async with sidecar_pair(tmp_path, LANES[1], puller=settings) as pair:
        record = await freeze_mid_pull(pair)
        failed = await pair.reader.event(PullFailed, "lease")
        assert isinstance(failed, PullFailed)
        assert failed.reason == "Deadline"
        assert await pair.reader.event(PullsTerminal, "lease") == PullsTerminal("lease", ((PAGE, record),))


async def test_the_death_of_the_sidecar_closes_the_link_once(tmp_path: Path) -> None:
    async with sidecar_pair(tmp_path, LANES[0], puller=ONE_RECORD) as pair:
        closings: list[str] = []
        pair.reader.link.closed.add_done_callback(lambda future: closings.append(future.result()))
        pair.reader.link.allow(1)
        pair.reader.pull(pair.source, "lease", pair.items(*((n, n) for n in range(6))))
        await pieces_done(pair, 1)
        asking = asyncio.ensure_future(pair.reader.link.attach(replace(pair.source.source_hello, incarnation="x.1")))
        pair.reader.kill()
        await pair.reader.link.closed
        with pytest.raises((LinkClosed, BadPeer)):
            await asking
        with pytest.raises(LinkClosed):
            await pair.reader.link.stats()
        await asyncio.sleep(0)
        assert len(closings) == 1
        with pytest.raises(LinkClosed):
            pair.reader.link.pull(PullSet("another", "source.1", ()))


# -- wrong bytes -------------------------------------------------------------------------------------------------------


def flip_payload(pair: Pair) -> None:
    pair.source.pools[PAGE].record(5)[200] ^= 0x40


def flip_trailer(pair: Pair) -> None:
    layout = pair.source.pools[PAGE].layout
    pair.source.pools[PAGE].record(5)[layout.trailer_offset + 24 + 3] ^= 1


def begin_another_life(pair: Pair) -> None:
    close(pair.source.pools[PAGE], 5, generation=4)


def put_another_sequences_record(pair: Pair) -> None:
    pool = pair.source.pools[PAGE]
    pool.record(5)[:] = pool.record(6)


def wear_another_identity(pair: Pair) -> None:
    """Another sequence's bytes under the right name: only the digest can tell."""
    pool = pair.source.pools[PAGE]
    right = pool.trailer(5)
    pool.record(5)[:] = pool.record(6)
    pool.write_trailer(5, Trailer(right.format_id, identity_of(PAGE, 5), 3, 8, right.digest))


def forget_the_trailer(pair: Pair) -> None:
    pair.source.pools[PAGE].record(5)[pair.source.pools[PAGE].layout.trailer_offset :] = 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_payload, "DigestMismatch"),
        (flip_trailer, "IdentityMismatch"),
        (begin_another_life, "GenerationMismatch"),
        (put_another_sequences_record, "IdentityMismatch"),
        (wear_another_identity, "DigestMismatch"),
        (forget_the_trailer, "TrailerMismatch"),
    ],
)
async def test_wrong_bytes_are_an_error_with_a_reason(tmp_path: Path, damage: object, reason: str) -> None:
    async with sidecar_pair(tmp_path, LANES[0]) as pair:
        items = pair.items((4, 4), (5, 5), (6, 6))
        damage(pair)  # type: ignore[operator]
        pair.reader.pull(pair.source, "lease", items)
        failed = await pair.reader.finish("lease")
        assert isinstance(failed, PullFailed), failed
        assert failed.reason == reason
        assert await pair.reader.event(PullsTerminal, "lease") == PullsTerminal("lease", ())
        pair.reader.pull(pair.source, "good", pair.items((7, 7)))
        assert isinstance(await pair.reader.finish("good"), RecordsDone)
        assert not [event for event in pair.reader.events if event == RecordsDone("lease", 3, 0)]


async def test_a_reader_has_nothing_to_hand_out_and_a_source_does_not_map_its_memory_writable(tmp_path: Path) -> None:
    async with sidecar_pair(tmp_path, LANES[0], role=SidecarRole.READER) as pair:
        assert pair.reader.link.hello.agent_metadata == b""
        assert pair.reader.link.hello.pools == ()
        assert pair.source.memory_mappings() == ["r--s"]
        assert pair.reader.memory_mappings() == ["rw-s"]
        pair.reader.pull(pair.source, "lease", pair.items((0, 0)))
        assert isinstance(await pair.reader.finish("lease"), RecordsDone)


async def test_pulls_go_both_ways_between_engines_that_are_both(tmp_path: Path) -> None:
    async with sidecar_pair(tmp_path, LANES[0], source_role=SidecarRole.BOTH) as pair:
        there = pair.items((0, 3), (1, 4))
        pair.reader.pull(pair.source, "there", there)
        assert isinstance(await pair.reader.finish("there"), RecordsDone)
        pair.source.pools[PAGE].record(30)[:] = 0
        await pair.source.link.attach(pair.reader.source_hello)
        back = Pair(pair.reader, pair.source).items((3, 30))
        pair.source.pull(pair.reader, "back", back)
        assert isinstance(await pair.source.finish("back"), RecordsDone)
        assert np.array_equal(pair.source.pools[PAGE].record(30), pair.source.pools[PAGE].record(0))
