"""`LocalLink`: a puller in the leader's own process, for the byte stream and for tests over the in-memory transport."""

from __future__ import annotations

import asyncio
import os
import time

from sluice_engine.pool import Pools
from sluice_engine.step import PullSet
from sluice_engine.transfer.contract import Transfer
from sluice_engine.transfer.errors import LinkClosed, TransferUnavailable
from sluice_engine.transfer.link import OnEvent, raise_refusal
from sluice_engine.transfer.messages import (
    AskStats,
    Attach,
    Attached,
    Command,
    Detach,
    FetchWanted,
    Forget,
    LaneReport,
    Ping,
    Pull,
    SidecarHello,
    Stats,
    Stop,
)
from sluice_engine.transfer.plan import pool_info
from sluice_engine.transfer.poller import apply_command
from sluice_engine.transfer.pull import DEFAULTS, PullerSettings
from sluice_engine.transfer.puller import Puller
from sluice_engine.transfer.stream import StreamTransfer
from sluice_engine.transfer.verify import ThreadVerifier, VerifyPolicy
from sluice_protocol.source import RecordBytes, SourceHello


class LocalLink:
    """Same verbs as `SidecarLink`. Use inside a running loop; `close` it."""

    def __init__(
        self,
        incarnation: str,
        transfer: Transfer,
        pools: Pools,
        on_event: OnEvent,
        *,
        policy: VerifyPolicy | None = None,
        settings: PullerSettings = DEFAULTS,
    ) -> None:
        """`pools`: this engine's records, both what is pulled into and what is served; borrowed."""
        told = tuple(pool_info(pool.layout, pool.num_records) for pool in pools.values())
        lane = LaneReport(transfer.name, transfer.name, 0.0)
        self.hello = SidecarHello(transfer.name, incarnation, incarnation, b"", told, os.getpid(), lane)
        self.on_event = on_event
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.transfer = transfer
        self._verifier = ThreadVerifier(pools, policy or VerifyPolicy())
        self.puller = Puller(transfer, pools, self._verifier, settings)
        self._wake = asyncio.Event()
        self._closing = False
        self._turning = asyncio.create_task(self._run(), name="sluice-local-link")

    async def attach(self, source: SourceHello) -> None:
        answer = self._do(Attach(source))
        assert isinstance(answer, Attached)
        raise_refusal(answer)

    def detach(self, peer: str) -> None:
        self._do(Detach(peer))

    def pull(self, pulls: PullSet) -> None:
        self._do(Pull(pulls))

    def stop(self, lease_id: str) -> None:
        self._do(Stop(lease_id))

    def forget(self, lease_id: str) -> None:
        self._do(Forget(lease_id))

    def feed(self, lease_id: str, data: RecordBytes) -> None:
        if not isinstance(self.transfer, StreamTransfer):
            raise TransferUnavailable(f"records do not come by the lease's stream here (lease {lease_id!r})")
        self.transfer.feed(lease_id, data)
        self._wake.set()

    def stream_ended(self, lease_id: str) -> None:
        if isinstance(self.transfer, StreamTransfer):
            self.transfer.end(lease_id)
            self._wake.set()

    def ping(self, peer: str) -> None:
        self._do(Ping(peer))

    async def stats(self) -> Stats:
        answer = self._do(AskStats())
        assert isinstance(answer, Stats)
        return answer

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        await self._turning

    # -- inside ----------------------------------------------------------------------------------------------------

    def _do(self, command: Command) -> object:
        if self.closed.done():
            raise LinkClosed(self.closed.result())
        self._wake.set()
        return apply_command(self.puller, command, time.monotonic())

    async def _run(self) -> None:
        reason = "closed here"
        try:
            while not self._closing:
                self._turn()
                await self._pause(self.puller.idle_for(time.monotonic()))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._verifier.close()
            self.closed.set_result(reason)

    def _turn(self) -> None:
        self._wake.clear()
        for event in self.puller.tick(time.monotonic()):
            self.on_event(event)
        if isinstance(self.transfer, StreamTransfer):
            for lease_id, fetch in self.transfer.take_fetches():
                self.on_event(FetchWanted(lease_id, fetch))

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
