"""Everything about handoffs that touches the outside: lease thread, source server or lease client, link to the sidecar.

grpc is met only through the lease package, NIXL only in the sidecar.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from sluice_engine.leader.handoff.reader import MIN_ANSWER_S, MIN_SILENT_S
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.lease.connections import Connections
from sluice_engine.leader.lease.reader_stream import LeaseClient
from sluice_engine.leader.lease.source_stream import SourceServer
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.leader.scheduling.sequence import Fenced, StrandingEnded
from sluice_engine.pool import Pools, map_pools
from sluice_engine.spec import ResolvedEngine
from sluice_engine.step import PullSet
from sluice_engine.transfer.errors import TransferError
from sluice_engine.transfer.link import SidecarLink, TransferLink
from sluice_engine.transfer.local import LocalLink
from sluice_engine.transfer.messages import (
    FenceWanted,
    FetchWanted,
    PeerRefused,
    Pinged,
    PullEvent,
    PullFailed,
    PullsTerminal,
    RecordsDone,
    StrandedEnded,
)
from sluice_engine.transfer.stream import StreamTransfer, read_ranges
from sluice_engine.transfer.verify import VerifyLevel, VerifyPolicy
from sluice_engine.watched_rows import LEASE_THREAD
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_protocol.source import RecordBytes, RecordName, SourceHello
from sluice_records import RecordKind
from sluice_runtime.health.recorder import rows_of
from sluice_runtime.health.verdict import Budgets
from sluice_runtime.health.watch import restart_budget_s
from sluice_runtime.tls.keeper import IdentityKeeper

# Limits of an engine without a supervisor, which would name a slow sidecar before them.
SIDECAR_START_S = 30.0
ATTACH_S = 20.0


class Transport:
    """Runs on the leader's loop, and is the leader's `TransferPort`.

    The source's incarnation is the sidecar's: a new one invalidates all leases of the one before. The engine's own,
    which gateways see, changes with the leader only.
    """

    def __init__(
        self,
        spec: EngineSpec,
        resolved: ResolvedEngine,
        leader: Leader,
        start_id: str,
        memory_fd: int,
        on_death: Callable[[Exception], None],
        on_fence_wanted: Callable[[str], None],
        identity: IdentityKeeper | None = None,
    ) -> None:
        self.spec = spec
        self.resolved = resolved
        self.leader = leader
        self.source_address = ""
        self._identity = identity
        self._start_id = start_id
        self._memory_fd = memory_fd
        self._on_death = on_death
        self._on_fence_wanted = on_fence_wanted
        (row,) = rows_of(spec.recorder_path, LEASE_THREAD.name)
        self._thread = LeaseThread(asyncio.get_running_loop(), leader.counters, on_death, row)
        self._link: TransferLink | None = None
        self._pools: Pools = {}
        self._peers: dict[str, SourceHello] = {}
        self._pinged: dict[str, str] = {}  # incarnation -> address of the source
        self._pulled_from: dict[str, str] = {}  # lease -> incarnation of the source
        self._connections: Connections | None = None
        self._server: SourceServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if self.spec.transport == "stream":
            self._pools = map_pools(self._memory_fd, self.resolved.layouts, self.resolved.pools)
        await self._connect(self._start_s)
        self._thread.start()
        self.leader.readers.transfer = self
        if self.spec.role is Role.PREFILL:
            # Kept: a gRPC server without a reference to it is shut down.
            read = self._read_records if self.spec.transport == "stream" else None
            self._server = SourceServer(self._thread, self.leader.sources, self._hello, read, self._identity)
            self.source_address = await self._thread.run(
                self._server.start(self.spec.host, self.spec.key, self.spec.ports.source)
            )
        else:
            readers, floor_s = self.leader.readers, self.spec.health.floor_s
            # A source that is stuck is named by its own supervisor first, which takes a floor.
            readers.answer_s, readers.silent_s = max(MIN_ANSWER_S, floor_s / 2), max(MIN_SILENT_S, 2 * floor_s)
            fingerprint = self.resolved.fingerprint
            connections = Connections(self._thread, fingerprint, self.spec.key, self.attach, self._identity)
            self._connections = connections
            client = readers.leases = LeaseClient(self._thread, connections, readers)
            client.watch(readers.on_pair, readers.pairs.forget, self._ping)

    def describe(self) -> dict[str, object]:
        if self._link is None:
            return {}
        hello = self._link.hello
        return {
            "name": hello.transport,
            "pid": hello.pid,
            "lane": hello.lane.lane,
            "bytes_per_second": hello.lane.bytes_per_second,
            "warning": hello.lane.warning,
            "lanes": hello.lane.lanes,
        }

    # -- TransferPort ----------------------------------------------------------------------------------------------

    def attach(self, peer: SourceHello) -> None:
        self._peers[peer.incarnation] = peer
        self._spawn(self._attach(peer))

    @property
    def is_up(self) -> bool:
        return self._link is not None and not self._link.closed.done()

    def pull(self, pulls: PullSet) -> bool:
        is_posted = self._with_link(lambda link: link.pull(pulls))
        if is_posted:  # only then it is forgotten by `forget`
            self._pulled_from[pulls.lease_id] = pulls.peer
        return is_posted

    def stop(self, lease_id: str) -> None:
        if not self._with_link(lambda link: link.stop(lease_id)):
            self.leader.readers.on_pulls_terminal(lease_id, ())  # without a transport nothing can land

    def forget(self, lease_id: str) -> None:
        self._pulled_from.pop(lease_id, None)
        self._with_link(lambda link: link.forget(lease_id))

    def stream_ended(self, lease_id: str) -> None:
        self._with_link(lambda link: link.stream_ended(lease_id))

    def _meet_again(self, incarnation: str, reason: str) -> None:
        """A connection that broke under a living source comes back only by a new Hello, which attaches it again."""
        if reason == "PeerLost" and incarnation and self._connections is not None:
            self._connections.forget_source(incarnation)

    def _ping(self, source: str, incarnation: str) -> None:
        """Its Hello came: is the lane there too?"""
        self._pinged[incarnation] = source
        if not self._with_link(lambda link: link.ping(incarnation)):
            del self._pinged[incarnation]  # Our own transport is away: that says nothing of the source.

    # -- life of the link ------------------------------------------------------------------------------------------

    @property
    def _start_s(self) -> float:
        """Of the first sidecar: others may load for as long."""
        return max(self.spec.health.start_s, self.spec.health.floor_s) + SIDECAR_START_S

    @property
    def _restart_s(self) -> float:
        health = self.spec.health
        return restart_budget_s(Budgets(health.floor_s, health.factor, health.start_s)) + SIDECAR_START_S

    @property
    def _attach_s(self) -> float:
        return self.spec.health.floor_s + ATTACH_S

    async def _connect(self, timeout_s: float) -> None:
        if self.spec.transport == "stream":
            verify = VerifyPolicy(VerifyLevel(self.spec.verify))
            transfer = StreamTransfer(self._pools)
            self._link = LocalLink(self._start_id, transfer, self._pools, self._on_event, policy=verify)
        else:
            path = Path(self.spec.sidecar_path)
            link = await SidecarLink.connect(path, self._on_event, timeout_s=timeout_s)
            self._link = link
        self._link.closed.add_done_callback(self._lost)
        for peer in self._peers.values():
            self._spawn(self._attach(peer))

    def _lost(self, closed: asyncio.Future[str]) -> None:
        """The sidecar is dead, and with it every handle: fail what it was doing, then meet its successor."""
        self._link = None
        self._pinged.clear()
        self.leader.sources.end_all()
        self.leader.readers.on_transport_lost()
        self.leader.tell(Fenced())
        self._spawn(self._reconnect())

    async def _reconnect(self) -> None:
        try:
            await self._connect(self._restart_s)
        except TransferError as error:
            self._on_death(error)

    async def _attach(self, peer: SourceHello) -> None:
        link = self._link
        if link is None:
            return  # `_connect` attaches all peers anew
        try:
            async with asyncio.timeout(self._attach_s):
                await link.attach(peer)
        except (TransferError, TimeoutError) as error:
            # Pulls from it fail by name; the next room says Hello again, and attaches again.
            print(f"transport: source {peer.incarnation} refused: {error!r}", flush=True)
            self._peers.pop(peer.incarnation, None)
            if self._connections is not None:
                self._connections.forget_source(peer.incarnation)

    def _with_link(self, do: Callable[[TransferLink], None]) -> bool:
        if self._link is None or self._link.closed.done():
            return False
        do(self._link)
        return True

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_death(error if isinstance(error, Exception) else RuntimeError(str(error)))

    # -- events ----------------------------------------------------------------------------------------------------

    def _on_event(self, event: PullEvent) -> None:
        try:
            self._handle(event)
        except Exception as error:
            self._on_death(error)

    def _handle(self, event: PullEvent) -> None:
        readers = self.leader.readers
        match event:
            case RecordsDone(lease_id, num_records, num_bytes):
                readers.on_records_done(lease_id, num_records, num_bytes)
            case PullFailed(lease_id, reason, detail, mismatched):
                self._meet_again(self._pulled_from.get(lease_id, ""), reason)
                readers.on_pull_failed(lease_id, reason, detail, mismatched)
            case PullsTerminal(lease_id, stranded):
                readers.on_pulls_terminal(lease_id, stranded)
            case StrandedEnded(_, records):
                ledger = self.leader.state.ledger
                self.leader.tell(StrandingEnded(tuple(ledger.ref(kind, record) for kind, record in records)))
            case FetchWanted(lease_id, fetch):
                readers.on_fetch_wanted(lease_id, fetch)
            case FenceWanted(peer, stranded):
                self._on_fence_wanted(f"{stranded} records stranded by {peer}")
            case Pinged(peer, reason, detail):
                self._meet_again(peer, reason)
                if (source := self._pinged.pop(peer, None)) is not None:
                    readers.on_pair(source, reason, detail)
            case PeerRefused():
                pass  # its leases fail by themselves; the fence follows when it stays so

    # -- source side -----------------------------------------------------------------------------------------------

    def _hello(self) -> SourceHello | None:
        """What readers are told, from the lease loop; None while there is no transport to read through."""
        link = self._link
        return None if link is None else link.hello.source_hello(self.resolved.fingerprint)

    async def _read_records(self, names: tuple[RecordName, ...]) -> AsyncIterator[RecordBytes]:
        """Byte stream: contents of records that a lease holds. When the lease ends, so does the stream of these."""
        held = {(RecordKind(name.kind), name.record): name.generation for name in names}
        for data in read_ranges(self._pools, names, lambda kind, record: held.get((kind, record))):
            yield data

    def feed(self, lease_id: str, data: RecordBytes) -> None:
        try:
            self._with_link(lambda link: link.feed(lease_id, data))
        except TransferError as error:
            self.leader.readers.on_pull_failed(lease_id, error.reason, str(error))
