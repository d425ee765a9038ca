"""Real sidecars for tests: started by exec over a memfd of real records, ended by their own pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from transfer_double import KEY, PLAN, fill, item, new_memory, tiny_layouts

from sluice_engine.pool import RecordPool
from sluice_engine.step import PullItem, PullSet
from sluice_engine.transfer.lanes import count_nvidia_gpus
from sluice_engine.transfer.link import SidecarLink
from sluice_engine.transfer.messages import PullEvent, PullFailed, PullsTerminal, RecordsDone, Stats
from sluice_engine.transfer.pull import PullerSettings
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, write_spec
from sluice_engine.transfer.verify import VerifyPolicy
from sluice_launch.commands import Command
from sluice_launch.process import Process, stop_process
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.source import SourceHello
from sluice_records import Layouts, PoolPlan, RecordKind

FINGERPRINT = Fingerprint.of({"model": "tiny"})
# NIXL makes no agent without a CUDA lane where it sees a GPU.
_CUDA = ",cuda_copy" if count_nvidia_gpus() else ""
LANES = (f"tcp,cma,self{_CUDA}", f"tcp,self{_CUDA}")


@dataclass
class Memory:
    """One engine's records; outlives its sidecars."""

    layouts: Layouts = field(default_factory=tiny_layouts)
    plan: PoolPlan = PLAN

    def __post_init__(self) -> None:
        self.fd, self.pools = new_memory(self.layouts, self.plan)

    def close(self) -> None:
        os.close(self.fd)


class Sidecar:
    """One incarnation."""

    def __init__(
        self,
        folder: Path,
        memory: Memory,
        incarnation: str,
        *,
        lanes: str = LANES[0],
        role: SidecarRole = SidecarRole.BOTH,
        puller: PullerSettings | None = None,
        verify: VerifyPolicy | None = None,
        hooks: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.lanes = lanes
        self.memory, self.socket = memory, folder / f"{incarnation}.sock"
        spec = SidecarSpec(
            MemorySpec.of(memory.layouts, memory.plan),
            incarnation,
            KEY,
            role,
            verify or VerifyPolicy(),
            puller or PullerSettings(),
            one_host=True,
        )
        spec_fd = write_spec(spec)
        told = ["--spec-fd", str(spec_fd), "--memory-fd", str(memory.fd), "--socket", str(self.socket)]
        told += ["--lanes", lanes, *(["--test-hooks"] if hooks else [])]
        command = Command("sidecar", ("-m", "sluice_engine.transfer.sidecar", *told))
        self.process = Process(command, pass_fds=(spec_fd, memory.fd), environment=environment)
        os.close(spec_fd)
        self.events: list[PullEvent] = []
        self._changed = asyncio.Event()

    async def connect(self) -> SidecarLink:
        self.link = await SidecarLink.connect(self.socket, self._on_event, timeout_s=45)
        return self.link

    @property
    def pools(self) -> dict[RecordKind, RecordPool]:
        return self.memory.pools

    @property
    def source_hello(self) -> SourceHello:
        return self.link.hello.source_hello(FINGERPRINT)

    def _on_event(self, event: PullEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def event(self, kind: type[PullEvent], lease_id: str = "", timeout_s: float = 20.0) -> PullEvent:
        """The first such event, waited for."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and lease_id in ("", getattr(event, "lease_id", "")):
                        return event
                self._changed.clear()
                await self._changed.wait()

    async def finish(self, lease_id: str) -> RecordsDone | PullFailed:
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    if isinstance(event, RecordsDone | PullFailed) and event.lease_id == lease_id:
                        return event
                self._changed.clear()
                await self._changed.wait()

    async def stats_when(self, reached: Callable[[Stats], bool]) -> Stats:
        async with asyncio.timeout(20):
            # The answer is in another process: there is no event to wait for.
            while not reached(told := await self.link.stats()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return told

    def memory_mappings(self) -> list[str]:
        """Permissions of every mapping of the records' memory in the sidecar."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line.split()[1] for line in maps if "memfd:sluice-test" in line]

    def pull(self, source: Sidecar, lease_id: str, items: tuple[PullItem, ...]) -> None:
        self.link.pull(PullSet(lease_id, source.link.hello.incarnation, items))

    async def stop(self, lease_id: str) -> PullsTerminal:
        self.link.stop(lease_id)
        event = await self.event(PullsTerminal, lease_id)
        assert isinstance(event, PullsTerminal)
        return event

    def signal(self, number: signal.Signals) -> None:
        """After SIGSTOP no thread of it answers any more."""
        if number is signal.SIGSTOP:
            stop_process(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """The fence: after this returns nothing lands any more."""
        self.process.end(number=signal.SIGKILL)

    def exit_line(self) -> dict[str, object]:
        """The last JSON line that it printed; waits for its end."""
        self.process.wait(30)
        self.process.end()
        return dict(self.process.events[-1]) if self.process.events else {}

    async def end(self) -> None:
        self.kill()
        if hasattr(self, "link"):
            async with asyncio.timeout(10):
                await self.link.close()
        self.socket.unlink(missing_ok=True)


class Pair:
    """A source and a reader, each in a process of its own, attached."""

    def __init__(self, source: Sidecar, reader: Sidecar) -> None:
        self.source, self.reader = source, reader
        self.first_reader = reader
        self.more: list[Sidecar] = []

    def items(self, *pairs: tuple[int, int], kind: RecordKind = RecordKind.PAGE) -> tuple[PullItem, ...]:
        return tuple(item(self.source.pools, kind, source, destination) for source, destination in pairs)

    async def respawn_reader(self, incarnation: str) -> Sidecar:
        """What a supervisor does after the fence: the same memory, another sidecar."""
        fresh = Sidecar(self.reader.socket.parent, self.reader.memory, incarnation, lanes=self.reader.lanes)
        self.more.append(fresh)
        await fresh.connect()
        return fresh


@contextlib.asynccontextmanager
async def sidecar_pair(
    folder: Path, lanes: str, *, source_role: SidecarRole = SidecarRole.SOURCE, **reader: object
) -> AsyncIterator[Pair]:
    theirs, ours = Memory(), Memory()
    fill(theirs.pools)
    source = Sidecar(folder, theirs, "source.1", lanes=lanes, role=source_role)
    pair = Pair(source, Sidecar(folder, ours, "reader.1", lanes=lanes, **reader))  # type: ignore[arg-type]
    try:
        await asyncio.gather(source.connect(), pair.reader.connect())
        await pair.reader.link.attach(source.source_hello)
        yield pair
    finally:
        for sidecar in (*pair.more, pair.reader, pair.source):
            await sidecar.end()
        theirs.close()
        ours.close()
