"""The supervisor: starts the processes of one engine, watches them, answers probes. No torch, no gRPC, no requests.

If one of them dies or freezes with work pending, evidence is kept, the cause is said, and this process exits: 1 for a
death, 3 for a wedge. The transport sidecar alone is started again, for its death is also the fence; but when one of its
threads has ended, that is a death like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sluice_engine.model.errors import ModelError
from sluice_engine.pool import create_memory
from sluice_engine.spec import resolve
from sluice_engine.supervisor.arguments import own_spec, parse_arguments
from sluice_engine.supervisor.deaths import ChildDied, blamed, deaths_of, first_cause, has_followed
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.supervisor.zygote_link import ZYGOTE_START_S, ZygoteLink
from sluice_engine.transfer.sidecar import EXIT_LEADER_GONE, EXIT_SPEC, EXIT_THREAD_DIED, EXIT_UNAVAILABLE
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, write_spec
from sluice_engine.transfer.verify import VerifyLevel, VerifyPolicy
from sluice_engine.watched_rows import LEADER_LOOP, EngineReason
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_runtime import fault_points
from sluice_runtime.descriptors import raise_limit
from sluice_runtime.errors import SpecError
from sluice_runtime.health.guard import Guard
from sluice_runtime.health.last_words import cause_of_death, clean
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.secrets import without_secrets
from sluice_runtime.health.service import Service
from sluice_runtime.health.stacks import share_stacks
from sluice_runtime.health.verdict import Verdict
from sluice_runtime.process.child_stderr import ChildStderr, passed_on
from sluice_runtime.process.outlet import heard_or_not
from sluice_runtime.process.processes import MAX_EVENT_BYTES, child_environment, die_with_parent, pass_on, say
from sluice_runtime.process.supervision import (
    announce,
    child_events,
    end_by,
    ends_as_asked,
    failed_start,
    leave_message,
    named,
    policy_of,
    ports_of,
    probe_url,
    sole_user,
    undisturbed,
)

# So many deaths of the sidecar within the window are a death of the service.
SIDECAR_DEATHS, SIDECAR_WINDOW_S = 5, 60.0
# What an engine may take to end beyond its drain.
STOP_SLACK_S = 5.0
# One death brings others about: so long the last words of all are waited for before one of them is blamed.
SETTLE_S = 0.5
CAUSE_S = 3.0


class Supervisor:
    def __init__(self, spec: EngineSpec, spec_path: Path, zygote: str) -> None:
        self.spec = spec
        self._spec_path = spec_path
        self._zygote_path = zygote
        self._resolved = resolve(spec)
        self._start_id = uuid.uuid4().hex[:12]
        self._memory = -1
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stderr: dict[str, ChildStderr] = {}
        self._hearing: asyncio.Task[None] | None = None
        self._rank_pids: dict[int, int] = {}
        self._rank_fds: list[int] = []
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
            self.pids,
            self._about,
            self._shared_zygote,
        )
        self.guard = Guard(service, policy_of(spec.health))
        self._stopping = self.guard.stopping

    def pids(self) -> dict[str, int]:
        """Of what lives now."""
        told = {name: p.pid for name, p in self._processes.items() if p.returncode is None}
        return told | {f"rank{rank}": pid for rank, pid in self._rank_pids.items()}

    def _shared_zygote(self) -> dict[str, int]:
        return {"zygote": self._zygote_pid} if self._zygote_path and self._zygote_pid else {}

    def _about(self) -> dict[str, object]:
        """For a bundle: the config without its secret."""
        spec = json.loads(msgspec.json.encode(self.spec))
        processes: dict[str, dict[str, object]] = {
            name: {"pid": p.pid, "status": p.returncode} for name, p in self._processes.items()
        }
        for name, stderr in self._stderr.items():
            if lines := stderr.tail():
                processes.setdefault(name, {})["stderr"] = [clean(line, (self.spec.key,)) for line in lines]
        return {
            "spec": spec | {"key": "(not told)", "otlp": without_secrets(self.spec.otlp)},
            "facts": dict(self._resolved.facts),
            "ready": self._fingerprint,
            "processes": processes | {f"rank{rank}": {"pid": pid} for rank, pid in self._rank_pids.items()},
        }

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._stopping.set)
        tasks: list[asyncio.Task[Any]] = []
        try:
            try:
                self._memory = create_memory(self._resolved.layouts, self._resolved.pools, self.spec.name)
                await self.guard.start(self.spec.host, self.spec.ports.probe)
            except OSError as error:
                return await end_by(self.guard, failed_start(error))
            announce(self.guard, self.spec.host)
            # The start of every child is among what is watched: it can fail and hang as anything else can.
            tasks += [loop.create_task(self._stopping.wait()), loop.create_task(self.guard.run())]
            tasks += [loop.create_task(child) for child in self._children()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            verdict = await named(self.guard, self._judge(tasks))
            if verdict is None:
                say("stopped")
                return 0
            return await end_by(self.guard, verdict)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._kill_all()
            await self.guard.stop()
            if self._memory >= 0:
                os.close(self._memory)

    def _children(self) -> list[Coroutine[Any, Any, None]]:
        children = [self._run_leader(), self._run_rank(0)]
        if self.spec.has_transport and self.spec.transport == "nixl":
            children.append(self._keep_sidecar())
        return children

    async def _judge(self, tasks: list[asyncio.Task[Any]]) -> Verdict | None:
        """After a wish to stop, the first death, or a verdict. Raises whatever ended the watch or a task."""
        if self._stopping.is_set():
            self.guard.drain(LEADER_LOOP.name, self.spec.drain_s + STOP_SLACK_S)
            return await self._drain(tasks[1], tasks[2:])
        return await self._fatal(tasks[1], tasks[2:])

    async def _drain(self, watching: asyncio.Task[Verdict], children: list[asyncio.Task[Any]]) -> Verdict | None:
        """None: the leader has finished what it had. An engine that dies or freezes meanwhile is told of as ever."""
        leader = self._processes.get("leader")
        if leader is None:
            return None
        if await ends_as_asked(leader, watching):
            return None
        if watching.done():
            return watching.result()
        await asyncio.wait(children, timeout=SETTLE_S, return_when=asyncio.ALL_COMPLETED)
        gone = blamed(Exit("leader", leader.returncode, *self._last_words.get("leader", ())))
        self.guard.exited(self._with_last_words(gone))
        watching.cancel()
        return self.guard.watch.look()

    async def _fatal(self, watching: asyncio.Task[Verdict], children: list[asyncio.Task[Any]]) -> Verdict:
        """A verdict on what is wedged, or on who died first. Raises what was no death but a defect of ours."""
        if watching.done():
            return watching.result()
        await asyncio.wait(children, timeout=SETTLE_S, return_when=asyncio.ALL_COMPLETED)
        deadline = asyncio.get_running_loop().time() + CAUSE_S
        while (deaths := deaths_of(children)) and all(has_followed(error) for error in deaths):
            # Whom it followed has not been reaped yet.
            rest, left = [task for task in children if not task.done()], deadline - asyncio.get_running_loop().time()
            if not rest or left <= 0:
                break
            await asyncio.wait(rest, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for error in deaths:
            if not isinstance(error, ChildDied):
                raise error
        for gone in first_cause([error.exit for error in deaths if isinstance(error, ChildDied)]):
            self.guard.exited(self._with_last_words(gone))
        watching.cancel()
        return self.guard.watch.look()

    def _with_last_words(self, gone: Exit) -> Exit:
        """A death whose process has given no detail gets what its stderr says; NIXL's own reason is only there."""
        stderr = self._stderr.get("zygote" if gone.process not in self._stderr else gone.process)
        if stderr is None or (gone.detail and gone.process != "sidecar"):
            return gone
        stderr.close()
        secrets = (self.spec.key,)
        words = cause_of_death(stderr.tail(), secrets, holds_prompts=gone.process == "leader")
        if not words or words in gone.detail:
            return gone
        return replace(gone, detail=f"{gone.detail}; its stderr: {words}" if gone.detail else words)

    # -- children --------------------------------------------------------------------------------------------------

    async def _exec(self, name: str, *argv: str, pass_fds: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
        """Raises ChildDied also when the system has no room for another process."""
        try:
            stderr = self._listen_to(name)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr.child_fd,
                limit=MAX_EVENT_BYTES,
                pass_fds=pass_fds,
                env=child_environment(),
            )
        except OSError as error:
            raise ChildDied(name, None, type(error).__name__, str(error)) from error
        stderr.given()
        self._processes[name] = process
        return process

    def _listen_to(self, name: str) -> ChildStderr:
        """What the life before this one said is passed on first. Raises OSError."""
        if name in self._stderr:
            self._stderr.pop(name).close()
        stderr = self._stderr[name] = ChildStderr(self._said_by(name))
        return stderr

    def _said_by(self, process: str) -> Callable[[bytes], None]:
        return passed_on(self.spec.log, self.spec.name, process)

    async def _run_leader(self) -> None:
        """Its whole life, from before it listens."""
        argv = (
            *("-m", "sluice_engine.leader.main", "--spec", str(self._spec_path)),
            *("--memory-fd", str(self._memory), "--parent", str(os.getpid())),
            *("--health-address", probe_url(self.guard, self.spec.host)),
        )
        leader = await self._exec("leader", *argv, pass_fds=(self._memory,))
        async for event in child_events(leader, self._said_by("leader")):
            self._on_leader(event)
        status = await leader.wait()
        if not self._stopping.is_set():
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
            self._fence()
        elif event["event"] == "draining":
            self.guard.drain(LEADER_LOOP.name, self.spec.drain_s + STOP_SLACK_S)
        elif event["event"] == "drained" and not self._stopping.is_set():
            self.guard.drained()
        pass_on(event)

    def _fence(self) -> None:
        """After its death nothing can land any more; `_keep_sidecar` starts the next one."""
        sidecar = self._processes.get("sidecar")
        if sidecar is not None and sidecar.returncode is None:
            sidecar.kill()

    async def _keep_sidecar(self) -> None:
        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        await self._listening.wait()
        while True:
            process = await self._spawn_sidecar()
            last: dict[str, object] = {}
            async for last in child_events(process, self._said_by("sidecar")):
                say("sidecar", **{f"sidecar_{key}": value for key, value in last.items()})
            status = await process.wait()
            if self._stopping.is_set() or (status == EXIT_LEADER_GONE and await self._is_leader_gone()):
                return
            if status in (EXIT_SPEC, EXIT_UNAVAILABLE, EXIT_THREAD_DIED):
                raise ChildDied("sidecar", status, str(last.get("reason")), str(last.get("detail")))
            self.guard.forget("sidecar")
            self.guard.event(f"sidecar died with {status}; it is started again")
            now = loop.time()
            deaths = [t for t in deaths if now - t < SIDECAR_WINDOW_S] + [now]
            say("sidecar-died", status=status, deaths=len(deaths))
            if len(deaths) >= SIDECAR_DEATHS:
                detail = f"{len(deaths)} times within {SIDECAR_WINDOW_S:.0f} s"
                raise ChildDied("sidecar", status, EngineReason.SIDECAR_DEAD, detail)

    async def _is_leader_gone(self) -> bool:
        """Its death is told by somebody else; nobody needs a sidecar then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._processes["leader"].wait(), SETTLE_S)
        return self._processes["leader"].returncode is not None

    async def _spawn_sidecar(self) -> asyncio.subprocess.Process:
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
            return await self._exec("sidecar", *argv, pass_fds=(self._memory, fd))
        finally:
            os.close(fd)

    async def _run_rank(self, rank: int) -> None:
        """A real model's rank comes from a zygote, a scripted one needs no torch and is started as it is."""
        await self._listening.wait()
        if self.spec.scripted is not None:
            argv = (
                *("-m", "sluice_engine.rank.rank", "--spec", str(self._spec_path), "--rank", str(rank)),
                *("--memory-fd", str(self._memory), "--parent", str(os.getpid())),
            )
            process = await self._exec(f"rank{rank}", *argv, pass_fds=(self._memory,))
            await self._hear(f"rank{rank}", process)
            status: int | None = await process.wait()
        else:
            status = await self._fork_rank(rank)
        if not self._stopping.is_set():
            raise ChildDied(f"rank{rank}", status)

    async def _fork_rank(self, rank: int) -> int | None:
        """Its exit status. Raises ChildDied for the zygote when that has gone, and the rank with it."""
        path = self._zygote_path or await self._start_zygote()
        try:
            link = await ZygoteLink.connect(path)
        except TimeoutError as error:
            detail = f"none answers at {path} after {ZYGOTE_START_S:.0f} s"
            raise ChildDied("zygote", None, EngineReason.ZYGOTE_DEAD, detail) from error
        try:
            self._zygote_pid = link.pid
            if self._zygote_path:
                share_stacks(Path(self.spec.run_dir), "zygote", Path(path).parent)
            self.guard.recorder.row(f"rank{rank}.loop").doing(f"asked of the zygote, process {link.pid}")
            status = await link.run_rank(self._spec_path, rank, self._memory, lambda pid: self._note_rank(rank, pid))
            self._rank_pids.pop(rank, None)
            if status is None and await link.has_died(SETTLE_S):
                raise ChildDied("zygote", await self._zygote_status(), EngineReason.ZYGOTE_DEAD, f"rank {rank} with it")
            return status
        finally:
            link.close()

    async def _zygote_status(self) -> int | None:
        """None: a shared one is somebody else's child."""
        own = self._processes.get("zygote")
        return None if own is None else await own.wait()

    def _note_rank(self, rank: int, pid: int) -> None:
        """A rank is the zygote's child; by its pidfd it can be ended also while the zygote is stuck."""
        self._rank_pids[rank] = pid
        self.guard.recorder.row(f"rank{rank}.loop").doing("")
        with contextlib.suppress(ProcessLookupError):
            self._rank_fds.append(os.pidfd_open(pid))

    async def _start_zygote(self) -> str:
        path = str(Path(self.spec.run_dir) / "zygote.sock")
        process = await self._exec(
            "zygote", "-m", "sluice_engine.rank.zygote", "--socket", path, "--parent", str(os.getpid())
        )
        async for event in child_events(process, self._said_by("zygote")):
            if event["event"] == "zygote-ready":
                self._hearing = asyncio.get_running_loop().create_task(self._hear("zygote", process))
                return path
        raise ChildDied("zygote", await process.wait(), EngineReason.ZYGOTE_DEAD)

    async def _hear(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Stdout of one that has no more to tell us, to its end: native code may print there, and must not be held up.
        A zygote's is its ranks' too."""
        async for event in child_events(process, self._said_by(name)):
            self._said_by(name)(json.dumps(event).encode() + b"\n")

    async def _kill_all(self) -> None:
        for fd in self._rank_fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        for process in self._processes.values():
            await process.wait()
        if self._hearing is not None:
            await self._hearing
        for stderr in self._stderr.values():
            stderr.close()


# The spec, or the model that it names, cannot be served: nobody has died.
EXIT_REFUSED = 2


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.parent:
        die_with_parent(args.parent, signal.SIGTERM)
    raise_limit()
    with heard_or_not():
        try:
            spec, path = own_spec(args.spec, args.name, args.host, args.key_file, args.tls_dir)
            if spec.faults:
                fault_points.arm(spec.faults)
            with sole_user(Path(spec.run_dir)):
                return asyncio.run(undisturbed(_run(spec, path, args.zygote)))
        except (SpecError, ModelError) as error:
            say("died", cause=f"{type(error).__name__}: {error}")
            return EXIT_REFUSED
        except Exception as error:
            say("died", cause=f"{type(error).__name__}: {error}")
            return 1


async def _run(spec: EngineSpec, path: Path, zygote: str) -> int:
    try:
        return await Supervisor(spec, path, zygote).run()
    except (SpecError, ModelError):
        raise
    except Exception as error:  # none is known that comes so far; without a message nobody would know of one
        leave_message(spec.health, Path(spec.run_dir), error)
        raise


if __name__ == "__main__":
    sys.exit(main())
