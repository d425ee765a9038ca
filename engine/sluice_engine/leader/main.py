"""The leader's process: joins loop, ranks, transport, lease thread and gRPC servers.

Says one JSON line per event on stdout: loading, ready, draining, drained, died. A drain is asked for by the RPC, and
then it stays and waits, or by SIGTERM, and then it exits with 0 once it is empty. It exits with 1 when it died.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import uvloop
from grpc_health.v1.health_pb2 import HealthCheckResponse

from sluice_engine.errors import EngineError, RankFault
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.rank_server import RankServer
from sluice_engine.leader.scheduling.sequence import Mode, SequenceSpec
from sluice_engine.leader.server import start_engine_server
from sluice_engine.rank.rank import LoadProgress, RankMessage
from sluice_engine.spec import load_spec, resolve
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import EndReason, EngineHello
from sluice_protocol.sampling import Sampling
from sluice_runtime import fault_points, log
from sluice_runtime.health.layout import Phase, Readiness
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.stacks import answer_with_stacks
from sluice_runtime.process.outlet import drop_what_nobody_reads
from sluice_runtime.process.processes import die_with_parent, give_way, go_first, say, settle_heap
from sluice_runtime.rpc.health import BoundedHealth
from sluice_runtime.rpc.self_call import SelfCall
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import Peer
from sluice_runtime.tracing import make_tracer

if TYPE_CHECKING:
    from sluice_engine.leader.transport import Transport

# The answers that are sent at the end of a drain need so long to reach gateways and readers.
GIVE_BACK_S = 2.0
LOOK_S = 0.25
SWITCH_S = 0.0005


SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class WarmUpFailed(EngineError):
    """The first real steps of this engine did not make a token."""


def cause(error: Exception) -> dict[str, object]:
    """The reason once, and what it says beside it."""
    if isinstance(error, RankFault):
        return {"reason": error.reason, "detail": f"rank {error.rank}: {error.detail}"}
    return {"reason": type(error).__name__, "detail": str(error)}


def say_last_words(error: Exception) -> None:
    say("died", **cause(error))
    traceback.print_exception(error, file=sys.stderr)


class LeaderProcess:
    def __init__(self, spec: EngineSpec, memory_fd: int, health_address: str = "") -> None:
        self.spec = spec
        self._health_address = health_address
        self._memory_fd = memory_fd
        self.start_id = uuid.uuid4().hex[:12]
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        recorder = Recorder.attach(spec.recorder_path) if spec.recorder_path.exists() else None
        cold_ns = int(spec.health.start_s / spec.health.factor * 1e9)
        self.marks = LeaderMarks(recorder, cold_ns)
        self.resolved = resolve(spec, self.marks.has_read)
        self._read_weights()
        tracer = make_tracer(spec.otlp, spec.role.value, spec.name)
        self.leader = Leader(
            spec,
            self.resolved,
            self.start_id,
            on_death=self.die,
            on_drain=self._drain_begins,
            on_pair_change=lambda source, reason, detail: say("pair", source=source, reason=reason, detail=detail),
            marks=self.marks,
            tracer=tracer,
        )
        self._said_drained = self._exiting = False
        self._health = BoundedHealth()
        self.ranks = RankServer(1, self.leader.on_result, self.die, self._progress)
        self.identity: IdentityKeeper | None = None
        self.transport: Transport | None = None
        self._servers: list[grpc.aio.Server] = []
        self._calling: asyncio.Task[None] | None = None

    def _read_weights(self) -> None:
        """All of them, for the fingerprint: the longest part of a start from a slow disk. Ends at a signal."""
        self.marks.begin(Phase.LOADING)
        self.marks.row.doing("reads the weights for the fingerprint")
        _ = self.resolved.fingerprint
        self.marks.row.doing("")

    async def run(self) -> int:
        """Until drained or dead: the exit status."""
        self.marks.begin(Phase.STARTING)
        self._look_after()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._drain_and_exit)
        starting = loop.create_task(self._start())
        starting.add_done_callback(self._end_of)
        status = await self._ended
        starting.cancel()
        return status

    async def _start(self) -> None:
        spec, leader = self.spec, self.leader
        await self.ranks.start(spec.socket_path)
        say("listening", socket=spec.socket_path)
        identity = self.identity = IdentityKeeper(Path(spec.tls), Peer(spec.role)) if spec.tls else None
        if spec.has_transport:
            from sluice_engine.leader.transport import Transport

            self.transport = Transport(
                spec, self.resolved, leader, self.start_id, self._memory_fd, self.die, _want_fence, identity
            )
            self.marks.row.doing("waits for the transport sidecar")
            await self.transport.start()
        self.marks.row.doing("waits for the ranks")
        await self.ranks.wait_ready()
        self.marks.row.doing("warms up")
        leader.ranks.extend(self.ranks.links)
        await warm_up(leader)
        self.marks.row.doing("calls itself")
        calling = SelfCall(self.marks.grpc)
        await calling.open()
        server, address = await start_engine_server(leader, self._hello, self._health, spec, identity)
        self._servers.append(server)
        self.marks.row.doing("")
        self._calling = asyncio.get_running_loop().create_task(calling.run())
        self._calling.add_done_callback(self._end_of)
        settle_heap()
        go_first()
        say(
            "ready",
            role=spec.role.value,
            fingerprint=self.resolved.fingerprint.digest.hex(),
            address=address,
            source_address=self.transport.source_address if self.transport else "",
            pid=os.getpid(),
            ranks=self.ranks.pids,
            transport=self.transport.describe() if self.transport else {},
            limits={"pages": self.resolved.pools.pages, "page_tokens": self.resolved.limits.page_tokens},
        )

    def _look_after(self) -> None:
        """For ever, also while nothing happens."""
        loop = asyncio.get_running_loop()
        self.leader.look_after()
        if self.identity is not None:
            self.identity.look()
            self.marks.identity(self.identity.describe())
        if self.leader.draining and self.leader.is_empty and not self._said_drained:
            self._said_drained = True
            say("drained")
        serving = self.marks.readiness is Readiness.READY and not self.leader.draining
        following = loop.create_task(self._health.set("", SERVING if serving else NOT_SERVING))
        self._following = following  # kept until it is done: it only wakes watchers
        loop.call_later(LOOK_S, self._guarded_look)

    def _guarded_look(self) -> None:
        """An event loop logs the error of a callback and forgets it: that would be the end of the ticks."""
        try:
            self._look_after()
        except Exception as error:
            self.die(error)

    def _end_of(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.die(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def _hello(self) -> EngineHello:
        transport = self.transport
        return EngineHello(
            role=self.spec.role,
            fingerprint=self.resolved.fingerprint,
            incarnation=self.start_id,
            max_context_tokens=self.resolved.limits.max_context_tokens,
            page_tokens=self.resolved.limits.page_tokens,
            source_address=transport.source_address if transport else "",
            pid=os.getpid(),
            vocab_size=self.resolved.limits.vocab_size,
            health_address=self._health_address,
        )

    def _progress(self, message: RankMessage) -> None:
        if isinstance(message, LoadProgress):
            say("loading", rank=message.rank, loaded=message.loaded, total=message.total)

    def die(self, error: Exception) -> None:
        if not self._ended.done():
            self.marks.say(f"died: {error}")
            self.leader.mirror_books(now=True)
            say_last_words(error)
            self._ended.set_result(1)

    def _drain_begins(self) -> None:
        say("draining", sequences=len(self.leader.state.sequences), within_s=self.spec.drain_s)

    def _drain_and_exit(self) -> None:
        """The drain that it may be in already, and then the end. What hangs is not left in silence: the supervisor
        names an engine that does not end."""
        if self._exiting:
            return
        self._exiting = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.leader.drain().left_ms / 1e3 + GIVE_BACK_S

        def check() -> None:
            if self._ended.done():
                return
            if self.leader.is_empty or (self.leader.is_idle and loop.time() > deadline):
                self._ended.set_result(0)
            else:
                loop.call_later(0.02, check)

        check()


async def warm_up(leader: Leader) -> None:
    """A prompt through the real step loop, prefill and decode, before anybody is told that this engine is there.

    Shorter than a page, so that nothing of it stays in the cache. Raises WarmUpFailed, for a model whose very first
    logits are none.
    """
    sampling = Sampling(max_tokens=2, temperature=0.0)
    spec = SequenceSpec(leader.loop.next_sequence, Mode.UNIFIED, (0, 0), (), sampling)
    ended = await leader.run_alone(spec)
    if ended.reason is EndReason.FAILED:
        raise WarmUpFailed(f"{ended.error}: {ended.detail}: does this checkpoint compute at all?")
    await leader.emptied()
    leader.counters.clear()


def _want_fence(why: str) -> None:
    """The supervisor kills the sidecar: after its death nothing can land."""
    say("fence-wanted", detail=why)


async def _amain(spec: EngineSpec, memory_fd: int, health_address: str) -> None:
    try:
        process = LeaderProcess(spec, memory_fd, health_address)
    except Exception as error:  # such as weights that cannot be read
        say_last_words(error)
        os._exit(1)
    status = await process.run()
    if status == 0:
        process.leader.tracer.close()
    # Streams that are still open end with the process: their clients see a lost connection, not a loop that closes.
    sys.stdout.flush()
    os._exit(status)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sluice_engine.leader.main")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--memory-fd", type=int, required=True, help="the pools; mapped for the byte stream only")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--health-address", default="", help="where the supervisor answers, for gateways to know")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    give_way()
    drop_what_nobody_reads()
    spec = load_spec(args.spec)
    log.configure(spec.log, spec.name)
    answer_with_stacks(Path(spec.run_dir), "leader")
    if spec.faults:
        fault_points.arm(spec.faults)
    # Lower the GIL switch interval from 5 ms: step loop, lease thread and gRPC's pollers share the interpreter.
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(_amain(spec, args.memory_fd, args.health_address))


if __name__ == "__main__":
    main()
