"""The supervisor: starts the processes of one engine, watches them, answers probes. No torch, no gRPC, no requests.

If one of them dies or freezes with work pending, evidence is kept, the cause is said, and this process exits: 1 for a
death, 3 for a wedge. The transport sidecar alone is started again, for its death is also the fence; but when one of its
threads has ended, that is a death like any other. The loop is every supervisor's (`sluice_runtime.process.supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from sluice_engine.model.errors import ModelError
from sluice_engine.pool import create_memory
from sluice_engine.spec import resolve
from sluice_engine.supervisor.arguments import own_spec, parse_arguments
from sluice_engine.supervisor.blame import first_cause
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.supervisor.zygote_link import ZYGOTE_START_S, ZygoteLink
from sluice_engine.transfer.sidecar import EXIT_LEADER_GONE, EXIT_SPEC, EXIT_THREAD_DIED, EXIT_UNAVAILABLE
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, write_spec
from sluice_engine.transfer.verify import VerifyLevel, VerifyPolicy
from sluice_engine.watched_rows import LEADER_LOOP, EngineReason
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_runtime import fault_points
from sluice_runtime.health.guard import Guard
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.secrets import without_secrets
from sluice_runtime.health.service import Service
from sluice_runtime.health.stacks import share_stacks
from sluice_runtime.process.children import ChildDied, Children, StderrTerms
from sluice_runtime.process.processes import pass_on
from sluice_runtime.process.restarts import RestartPolicy, keep
from sluice_runtime.process.supervision import policy_of, ports_of, probe_url
from sluice_runtime.process.supervisor import SETTLE_S, Ending, Planned, Supervisor, run_process

SIDECAR = RestartPolicy(
    most=5,
    window_s=60.0,
    reason=EngineReason.SIDECAR_DEAD,
    final=frozenset((EXIT_SPEC, EXIT_UNAVAILABLE, EXIT_THREAD_DIED)),
)
# What an engine may take to end beyond its drain.
STOP_SLACK_S = 5.0


class EngineProcesses:
    """The workload of an engine's supervisor: leader, rank, its zygote where it has one of its own, and sidecar."""

    def __init__(self, spec: EngineSpec, spec_path: Path, zygote: str) -> None:
        self.spec = spec
        self._spec_path = spec_path
        self._zygote_path = zygote
        self._resolved = resolve(spec)
        self._start_id = uuid.uuid4().hex[:12]
        self._memory = -1
        terms = StderrTerms(
            secrets=(spec.key,),
            hold_prompts=frozenset(("leader",)),
            inherited="zygote",
            has_reason=frozenset(("sidecar",)),  # NIXL's own is only there
        )
        self.children = Children(spec.name, spec.log, terms)
        self._zygote_pid = 0
        self._last_words: dict[str, tuple[str, str]] = {}  # process -> reason, detail
        self._sidecar_counter = 0
        self._fingerprint: object = None
        self._listening = asyncio.Event()  # the leader, at the socket of the ranks
        service = Service(
            spec.name,
            spec.role.value,
            Path(spec.run_dir),
            engine_kind(spec.role, spec.transport),
            self.children.pids,
            self._about,
            self._shared_zygote,
        )
        self.guard = Guard(service, policy_of(spec.health))
        self.ending = Ending("leader", LEADER_LOOP.name, spec.drain_s + STOP_SLACK_S)

    def _shared_zygote(self) -> dict[str, int]:
        return {"zygote": self._zygote_pid} if self._zygote_path and self._zygote_pid else {}

    def _about(self) -> dict[str, object]:
        """For a bundle: the config without its secret."""
        spec = json.loads(msgspec.json.encode(self.spec))
        return {
            "spec": spec | {"key": "(not told)", "otlp": without_secrets(self.spec.otlp)},
            "facts": dict(self._resolved.facts),
            "ready": self._fingerprint,
            "processes": self.children.about(),
        }

    # -- of a Workload ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._memory = create_memory(self._resolved.layouts, self._resolved.pools, self.spec.name)

    def release(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)

    def lives(self) -> list[Coroutine[Any, Any, None]]:
        lives = [self._run_leader(), self._run_rank(0)]
        if self.spec.has_transport and self.spec.transport == "nixl":
            lives.append(self._keep_sidecar())
        return lives

    def exit_of(self, process: str, status: int | None) -> Exit:
        return Exit(process, status, *self._last_words.get(process, ()))

    def first_cause(self, exits: list[Exit]) -> list[Exit]:
        return first_cause(exits)

    def asked_to_end(self) -> None:
        """The leader says of itself that it drains."""

    # -- leader ----------------------------------------------------------------------------------------------------

    async def _run_leader(self) -> None:
        """Its whole life, from before it listens."""
        argv = (
            *("-m", "sluice_engine.leader.main", "--spec", str(self._spec_path)),
            *("--memory-fd", str(self._memory), "--parent", str(os.getpid())),
            *("--health-address", probe_url(self.guard, self.spec.host)),
        )
        leader = await self.children.start("leader", *argv, pass_fds=(self._memory,))
        async for event in self.children.events("leader"):
            self._on_leader(event)
        status = await leader.wait()
        if not self.guard.stopping.is_set():
            raise ChildDied("leader", status, *self._last_words.get("leader", ()))

    def _on_leader(self, event: dict[str, object]) -> None:
        if event["event"] == "listening":
            self._listening.set()
            return
        if event["event"] == "ready":
            self._fingerprint = event
            self.guard.started(*ports_of(event["address"], event["source_address"]))
            event |= {"probes": self.guard.probe_port, "debug": self.guard.debug_port}
        elif event["event"] == "died":
            self._last_words["leader"] = str(event.get("reason")), str(event.get("detail"))
        elif event["event"] == "fence-wanted":
            self.children.kill("sidecar")  # after its death nothing can land any more; it is started again
        elif event["event"] == "draining":
            self.guard.drain(self.ending.row, self.ending.within_s)
        elif event["event"] == "drained" and not self.guard.stopping.is_set():
            self.guard.drained()
        pass_on(event)

    # -- sidecar ---------------------------------------------------------------------------------------------------

    async def _keep_sidecar(self) -> None:
        await self._listening.wait()
        await keep(self.children, self.guard, "sidecar", self._start_sidecar, SIDECAR, self._is_sidecar_over)

    async def _is_sidecar_over(self, status: int) -> bool:
        """Once the leader is dead, which is reported elsewhere, no sidecar is needed."""
        if self.guard.stopping.is_set():
            return True
        leader = self.children.get("leader")
        if status != EXIT_LEADER_GONE or leader is None:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leader.wait(), SETTLE_S)
        return leader.returncode is not None

    async def _start_sidecar(self) -> None:
        spec, resolved = self.spec, self._resolved
        Path(spec.sidecar_path).unlink(missing_ok=True)
        told = SidecarSpec(
            MemorySpec.of(resolved.layouts, resolved.pools),
            f"{self._start_id}.{self._sidecar_counter}",
            hashlib.sha256(spec.key.encode()).digest(),
            SidecarRole.SOURCE if spec.role is Role.PREFILL else SidecarRole.READER,
            VerifyPolicy(VerifyLevel(spec.verify)),
            one_host=spec.host.startswith("127."),
            tcp_port_range=spec.ports.transfer,
        )
        self._sidecar_counter += 1
        fd = write_spec(told)
        try:
            argv = (
                *("-m", "sluice_engine.transfer.sidecar", "--spec-fd", str(fd)),
                *("--memory-fd", str(self._memory), "--socket", spec.sidecar_path, "--parent", str(os.getpid())),
                *("--recorder", str(spec.recorder_path), *(["--faults", spec.faults] if spec.faults else [])),
            )
            await self.children.start("sidecar", *argv, pass_fds=(self._memory, fd))
        finally:
            os.close(fd)

    # -- rank ------------------------------------------------------------------------------------------------------

    async def _run_rank(self, rank: int) -> None:
        """A real model's rank comes from a zygote, a scripted one needs no torch and is started as it is."""
        name = f"rank{rank}"
        await self._listening.wait()
        if self.spec.scripted is not None:
            argv = (
                *("-m", "sluice_engine.rank.rank", "--spec", str(self._spec_path), "--rank", str(rank)),
                *("--memory-fd", str(self._memory), "--parent", str(os.getpid())),
            )
            process = await self.children.start(name, *argv, pass_fds=(self._memory,))
            await self.children.hear(name)
            status: int | None = await process.wait()
        else:
            status = await self._fork_rank(rank, name)
        if not self.guard.stopping.is_set():
            raise ChildDied(name, status)

    async def _fork_rank(self, rank: int, name: str) -> int | None:
        """Its exit status. Raises ChildDied for the zygote when that has gone, and the rank with it."""
        path = self._zygote_path or await self._start_zygote()
        try:
            link = await ZygoteLink.connect(path)
        except TimeoutError as error:
            detail = f"none answers at {path} after {ZYGOTE_START_S:.0f} s"
            raise ChildDied("zygote", None, EngineReason.ZYGOTE_DEAD, detail) from error
        row = self.guard.recorder.row(f"{name}.loop")

        def on_pid(pid: int) -> None:
            self.children.adopt(name, pid)
            row.doing("")

        try:
            self._zygote_pid = link.pid
            if self._zygote_path:
                share_stacks(Path(self.spec.run_dir), "zygote", Path(path).parent)
            row.doing(f"asked of the zygote, process {link.pid}")
            status = await link.run_rank(self._spec_path, rank, self._memory, on_pid)
            self.children.disown(name)
            if status is None and await link.has_died(SETTLE_S):
                raise ChildDied("zygote", await self._zygote_status(), EngineReason.ZYGOTE_DEAD, f"rank {rank} with it")
            return status
        finally:
            link.close()

    async def _zygote_status(self) -> int | None:
        """None: a shared zygote is not a child of this process."""
        own = self.children.get("zygote")
        return None if own is None else await own.wait()

    async def _start_zygote(self) -> str:
        path = str(Path(self.spec.run_dir) / "zygote.sock")
        argv = ("-m", "sluice_engine.rank.zygote", "--socket", path, "--parent", str(os.getpid()))
        process = await self.children.start("zygote", *argv)
        async for event in self.children.events("zygote"):
            if event["event"] == "zygote-ready":
                self.children.hear_meanwhile("zygote")
                return path
        raise ChildDied("zygote", await process.wait(), EngineReason.ZYGOTE_DEAD)


def engine_supervisor(spec: EngineSpec, spec_path: Path, zygote: str) -> Supervisor:
    """`spec_path`: where leader and rank find `spec`. `zygote`: socket of a shared one; empty: one of its own. To be
    called within the loop. Raises SpecError, ModelError."""
    engine = EngineProcesses(spec, spec_path, zygote)
    return Supervisor(engine.guard, engine.children, engine, engine.ending, spec.host, spec.ports.probe)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)

    def plan() -> Planned:
        spec, path = own_spec(args.spec, args.name, args.host, args.key_file, args.tls_dir)
        if spec.faults:
            fault_points.arm(spec.faults)
        return Planned(spec.health, Path(spec.run_dir), lambda: engine_supervisor(spec, path, args.zygote))

    return run_process(plan, args.parent, ModelError)


if __name__ == "__main__":
    sys.exit(main())
