"""Nothing that anybody says to a sidecar ends it, except where its end is the promise."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import hostile_writer
import msgspec
import pytest
from sidecar_double import LANES, Memory, Pair, Sidecar, sidecar_pair
from transfer_double import KEY

from sluice_engine.transfer.errors import BadPeer, TransferUnavailable
from sluice_engine.transfer.link import SidecarLink
from sluice_engine.transfer.messages import AskStats, RecordsDone, encode_frame
from sluice_engine.transfer.nixl import FORK_EXIT
from sluice_engine.transfer.seal import TAG_BYTES, seal
from sluice_engine.transfer.sidecar import EXIT_LEADER_GONE, EXIT_OK, EXIT_SPEC, EXIT_UNAVAILABLE
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, write_spec
from sluice_engine.wire import pack
from sluice_protocol.source import PoolInfo, SourceHello

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with sidecar_pair(tmp_path, LANES[0]) as made:
        yield made


async def still_serves(pair: Pair, lease_id: str = "still") -> None:
    await pair.reader.link.attach(pair.source.source_hello)
    pair.reader.pull(pair.source, lease_id, pair.items((0, 0), (1, 1)))
    assert isinstance(await pair.reader.finish(lease_id), RecordsDone)


# -- hellos ------------------------------------------------------------------------------------------------------------


def flip(hello: SourceHello) -> SourceHello:
    metadata = bytearray(hello.agent_metadata)
    metadata[60] ^= 1
    return replace(hello, agent_metadata=bytes(metadata))


def sealed_garbage(hello: SourceHello) -> SourceHello:
    return seal(replace(hello, agent_metadata=b"\x00garbage" * 9), KEY)


def sealed_for_another_name(hello: SourceHello) -> SourceHello:
    return seal(replace(hello, agent_name="somebody", agent_metadata=hello.agent_metadata[TAG_BYTES:]), KEY)


HELLOS: dict[str, Callable[[SourceHello], SourceHello]] = {
    "a flipped byte": flip,
    "cut short": lambda hello: replace(hello, agent_metadata=hello.agent_metadata[:-7]),
    "empty": lambda hello: replace(hello, agent_metadata=b""),
    "another key": lambda hello: seal(replace(hello, agent_metadata=hello.agent_metadata[TAG_BYTES:]), bytes(32)),
    "another base": lambda hello: replace(hello, pools=tuple(map(_moved, hello.pools))),
    "sealed garbage": sealed_garbage,
    "another agent's": sealed_for_another_name,
    "an unknown kind of record": lambda hello: replace(hello, pools=(PoolInfo("shoe", "00" * 16, 1, 1, 1, 1),)),
    "another transport": lambda hello: replace(hello, transport="pigeon"),
}


def _moved(pool: PoolInfo) -> PoolInfo:
    return replace(pool, base=pool.base + 4096)


@pytest.mark.parametrize("lie", HELLOS)
async def test_a_hello_that_lies_is_refused_and_nobody_dies(pair: Pair, lie: str) -> None:
    told = pair.source.source_hello
    sealed = seal(replace(told, incarnation="liar.1", agent_metadata=told.agent_metadata[TAG_BYTES:]), KEY)
    hello = HELLOS[lie](sealed)
    with pytest.raises(BadPeer):
        await pair.reader.link.attach(hello)
    await still_serves(pair)


async def test_a_source_restarted_under_the_same_incarnation_is_refused(pair: Pair, tmp_path: Path) -> None:
    pair.source.kill()
    folder = tmp_path / "again"
    await asyncio.to_thread(folder.mkdir)
    twin = Sidecar(folder, pair.source.memory, "source.1", role=SidecarRole.SOURCE)
    pair.more.append(twin)
    await twin.connect()
    with pytest.raises(BadPeer, match="something else"):
        await pair.reader.link.attach(twin.source_hello)
    pair.reader.pull(pair.source, "old", pair.items((0, 0)))
    assert not isinstance(await pair.reader.finish("old"), RecordsDone)


# -- the leader's socket -----------------------------------------------------------------------------------------------


GARBAGE = {
    "a frame of 4 GiB": b"\xff\xff\xff\xff",
    "no msgpack": pack(b"\xc1\xc1\xc1"),
    "an unknown verb": pack(msgspec.msgpack.encode(["Fly"]).ljust(6, b"\xc0")),
    "wrong fields": pack(msgspec.msgpack.encode(["Pull", 3])),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a report": encode_frame(RecordsDone("a", 1, 1)),
}


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_ends_its_own_connection_and_is_counted(pair: Pair, garbage: str) -> None:
    reader, writer = await asyncio.open_unix_connection(pair.reader.socket)
    writer.write(GARBAGE[garbage])
    async with asyncio.timeout(10):
        while await reader.read(1 << 16):
            pass
    writer.close()
    counters = (await pair.reader.link.stats()).counters
    assert counters["connection_FrameError"] == 1
    await still_serves(pair)


async def test_there_is_one_leader(pair: Pair) -> None:
    reader, writer = await asyncio.open_unix_connection(pair.reader.socket)
    writer.write(encode_frame(AskStats()))
    async with asyncio.timeout(10):
        while await reader.read(1 << 16):
            pass
    writer.close()
    await still_serves(pair)


async def test_garbage_from_the_leader_after_a_pull_is_the_end_of_the_process(pair: Pair) -> None:
    """A leader takes the end of its connection for "nothing lands any more", so that is what it must mean."""
    await still_serves(pair)
    pair.reader.link._writer.write(b"\xff" * 8)
    async with asyncio.timeout(10):
        await pair.reader.link.closed
    line = await asyncio.to_thread(pair.reader.exit_line)
    assert line["reason"] == "LeaderFrameError"
    assert pair.reader.process.popen.returncode == EXIT_LEADER_GONE


async def test_a_leader_that_leaves_after_a_pull_ends_the_process_and_one_that_did_not_pull_does_not(
    pair: Pair,
) -> None:
    await pair.source.link.stats()
    await pair.source.link.close()
    await still_serves(pair)
    again = await SidecarLink.connect(pair.source.socket, lambda event: None)
    assert again.hello == pair.source.link.hello
    await again.close()
    await pair.reader.link.close()
    line = await asyncio.to_thread(pair.reader.exit_line)
    assert (line["reason"], pair.reader.process.popen.returncode) == ("LeaderClosed", EXIT_LEADER_GONE)


async def test_hooks_are_refused_where_they_are_not_asked_for(tmp_path: Path) -> None:
    async with sidecar_pair(tmp_path, LANES[0], hooks=False) as pair:
        pair.reader.link.allow(1)
        async with asyncio.timeout(10):
            await pair.reader.link.closed
        assert not pair.reader.process.is_over


async def test_ticks_come_by_themselves(pair: Pair) -> None:
    link = pair.reader.link
    seen = set()
    async with asyncio.timeout(10):
        while len(seen) < 3:
            await asyncio.sleep(0.05)
            if link.ticked is not None:
                seen.add((link.ticked.socket_turns, link.ticked.poller_turns))
    assert sorted(seen) == sorted(seen, key=lambda turns: turns[1])


# -- hostile peers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", LANES)
async def test_a_write_with_a_sources_metadata_changes_nothing(tmp_path: Path, lanes: str) -> None:
    async with sidecar_pair(tmp_path, lanes, source_role=SidecarRole.BOTH) as pair:
        assert sorted(pair.source.memory_mappings()) == ["r--s", "rw-s"]
        before = {kind: pool.buffer.copy() for kind, pool in pair.source.pools.items()}
        told = tmp_path / "hello"
        await asyncio.to_thread(told.write_bytes, msgspec.msgpack.encode(pair.source.source_hello))
        program = [sys.executable, hostile_writer.__file__, lanes, str(told)]
        done = await asyncio.to_thread(subprocess.run, program, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
        results = json.loads(done.stdout.decode().splitlines()[-1])
        assert results["beyond"] == "nixlNotFoundError"
        assert results["named"] == "nixlRemoteDisconnectError"
        assert all((pool.buffer == before[kind]).all() for kind, pool in pair.source.pools.items())
        if "cma" in lanes:
            # The kernel refused the writer; the source did not notice.
            await still_serves(pair)
        else:
            # The source's own copy into a read-only page killed it, which is the fence: no byte of a record changed.
            assert await asyncio.to_thread(pair.source.process.wait, 10) == -signal.SIGSEGV


# -- starts that must fail, and ends -----------------------------------------------------------------------------------


async def ended(sidecar: Sidecar) -> tuple[int, dict[str, object]]:
    line = await asyncio.to_thread(sidecar.exit_line)
    return sidecar.process.popen.returncode, line


@pytest.fixture
async def memory() -> AsyncIterator[Memory]:
    made = Memory()
    yield made
    made.close()


async def test_without_nixl_it_ends_and_says_so(tmp_path: Path, memory: Memory) -> None:
    shadow = tmp_path / "shadow"
    for package in ("nixl_cu12", "nixl_cu13"):
        (shadow / package).mkdir(parents=True)
        (shadow / package / "__init__.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    sidecar = Sidecar(tmp_path, memory, "s.1", environment={"PYTHONPATH": str(shadow)})
    code, line = await ended(sidecar)
    assert code == EXIT_UNAVAILABLE
    assert line["reason"] == "TransferUnavailable"
    assert "libcuda.so.1 is missing" in str(line["detail"])
    with pytest.raises(TransferUnavailable):
        await SidecarLink.connect(sidecar.socket, lambda event: None, timeout_s=0.1)


async def test_nobodys_environment_chooses_the_lane(tmp_path: Path) -> None:
    theirs = {"UCX_TLS": "posix,self", "UCX_LOG_LEVEL": "trace", "NIXL_PLUGIN_DIR": "/nowhere", "HOME": "/nowhere"}
    async with sidecar_pair(tmp_path, LANES[0], environment=theirs) as pair:
        assert pair.reader.link.hello.lane.lane == "cma"
        await still_serves(pair)


async def test_a_bad_spec_is_told(tmp_path: Path, memory: Memory) -> None:
    spec = os.memfd_create("spec")
    os.write(spec, b"nonsense")
    told = ["--spec-fd", str(spec), "--memory-fd", str(memory.fd), "--socket", str(tmp_path / "s")]
    program = [sys.executable, "-m", "sluice_engine.transfer.sidecar", *told]
    done = await asyncio.to_thread(
        subprocess.run, program, pass_fds=(spec, memory.fd), capture_output=True, timeout=60, check=False
    )
    os.close(spec)
    assert done.returncode == EXIT_SPEC
    assert json.loads(done.stdout)["reason"] == "BadSpec"


def test_one_whose_starter_is_gone_before_it_looks_ends(tmp_path: Path, memory: Memory) -> None:
    """Its parent at that time is the system's, which never ends: the starter's own word counts."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    spec = write_spec(SidecarSpec(MemorySpec.of(memory.layouts, memory.plan), "s.1", KEY, one_host=True))
    told = ["--spec-fd", str(spec), "--memory-fd", str(memory.fd), "--socket", str(tmp_path / "s")]
    program = [sys.executable, "-m", "sluice_engine.transfer.sidecar", *told, "--parent", str(gone.pid)]
    done = subprocess.run(program, pass_fds=(spec, memory.fd), capture_output=True, timeout=60, check=False)
    os.close(spec)
    assert json.loads(done.stdout.splitlines()[-1])["reason"] == "ParentGone"


async def test_sigterm_is_an_orderly_end(tmp_path: Path, memory: Memory) -> None:
    sidecar = Sidecar(tmp_path, memory, "s.1")
    await sidecar.connect()
    sidecar.signal(signal.SIGINT)
    await sidecar.link.stats()
    sidecar.signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        await sidecar.link.closed
    assert (await ended(sidecar))[1]["reason"] == "Terminated"
    assert sidecar.process.popen.returncode == EXIT_OK


def test_the_sidecar_knows_no_torch_and_no_grpc() -> None:
    code = (
        "import sys, sluice_engine.transfer.sidecar; print(sorted({'torch', 'grpc', 'nixl_cu13'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=True)
    assert done.stdout.strip() == b"[]"


def under_a_shell(memory: Memory, path: Path) -> subprocess.Popen[bytes]:
    """A sidecar whose parent is a shell, until we close the shell's stdin."""
    spec = write_spec(SidecarSpec(MemorySpec.of(memory.layouts, memory.plan), "s.1", KEY, one_host=True))
    told = ["--spec-fd", str(spec), "--memory-fd", str(memory.fd), "--socket", str(path)]
    program = ["sh", "-c", '"$@" & read -r line', "sh", sys.executable, "-m", "sluice_engine.transfer.sidecar", *told]
    shell = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(spec, memory.fd))
    os.close(spec)
    return shell


async def test_an_orphan_ends_by_itself(tmp_path: Path, memory: Memory) -> None:
    shell = under_a_shell(memory, tmp_path / "s.sock")
    link = await SidecarLink.connect(tmp_path / "s.sock", lambda event: None, timeout_s=45)
    out, _ = await asyncio.to_thread(shell.communicate, timeout=30)
    assert json.loads(out.decode().splitlines()[-1])["reason"] == "ParentGone"
    async with asyncio.timeout(10):
        await link.closed


FORKER = """
import os, sys
from sluice_engine.transfer.lanes import choose_lanes, count_nvidia_gpus
from sluice_engine.transfer.nixl import NixlSettings, create_agent, load_nixl
nixl = load_nixl(NixlSettings(choose_lanes(count_nvidia_gpus()), one_host=True))
agents = [create_agent(nixl, "a"), create_agent(nixl, "b")]
pid = os.fork()
if pid == 0:
    print("the child ran", flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
peer = agents[0].add_remote_agent(agents[1].get_agent_metadata()).decode()
print(agents[0].check_remote_metadata(peer), flush=True)
os._exit(0)
"""


def test_a_forked_child_of_an_agents_process_ends_before_it_does_harm() -> None:
    done = subprocess.run([sys.executable, "-c", FORKER], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == [str(FORK_EXIT), "True"]
    assert b"must not fork" in done.stderr
