"""The supervisor: starts the processes of one engine, watches them, answers probes. No torch, no gRPC, no requests.

If one of them dies the engine is dead: the others are ended and this process exits with 1 and a cause. The transport
sidecar alone is started again, for its death is also the fence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sluice_engine.pool import create_memory
from sluice_engine.probes import ProbeServer, Readiness
from sluice_engine.processes import MAX_EVENT_BYTES, die_with_parent, json_lines, say
from sluice_engine.spec import EngineSpec, load_spec, resolve
from sluice_engine.transfer.sidecar import EXIT_SPEC, EXIT_UNAVAILABLE
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, write_spec
from sluice_engine.transfer.verify import VerifyLevel, VerifyPolicy
from sluice_protocol.generate import Role

# So many deaths of the sidecar within the window are a death of the service.
SIDECAR_DEATHS, SIDECAR_WINDOW_S = 5, 60.0
STOP_S = 25.0
ZYGOTE_START_S = 120.0


class ChildDied(Exception):
    def __init__(self, what: str, status: int | None, detail: str = "") -> None:
        super().__init__(f"{what} ended with {status}{': ' if detail else ''}{detail}")
        self.what, self.status, self.detail = what, status, detail


class Supervisor:
    def __init__(self, spec: EngineSpec, spec_path: Path, zygote: str) -> None:
        self.spec = spec
        self._spec_path = spec_path
        self._zygote_path = zygote
        self._resolved = resolve(spec)
        self._start_id = uuid.uuid4().hex[:12]
        self._memory = -1
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._cause = ""
        self._sidecar_counter = 0
        self.readiness = Readiness(role=spec.role.value)
        self._probes = ProbeServer(self.readiness)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._stopping.set)
        self._memory = create_memory(self._resolved.layouts, self._resolved.pools, self.spec.name)
        port = await self._probes.start(self.spec.host)
        say("supervising", pid=os.getpid(), name=self.spec.name, probes=f"http://{self.spec.host}:{port}")
        tasks: list[asyncio.Task[Any]] = [loop.create_task(self._stopping.wait())]
        try:
            leader = await self._spawn_leader()
            tasks.append(loop.create_task(self._watch("leader", leader)))
            if self.spec.has_transport and self.spec.transport == "nixl":
                tasks.append(loop.create_task(self._keep_sidecar()))
            tasks.append(loop.create_task(self._run_rank(0)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return await self._end(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._kill_all()
            await self._probes.stop()
            os.close(self._memory)

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> int:
        """After a wish to stop or the first death."""
        self.readiness.ready = False
        for task in tasks[1:]:
            if task.done() and (error := task.exception()) is not None:
                self.readiness.dead = str(error)
                say("died", cause=self._cause or str(error))
                return 1
        leader = self._processes["leader"]
        if leader.returncode is None:
            leader.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leader.wait(), STOP_S)
        say("stopped")
        return 0

    # -- children --------------------------------------------------------------------------------------------------

    async def _exec(self, name: str, *argv: str, pass_fds: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdout=asyncio.subprocess.PIPE, limit=MAX_EVENT_BYTES, pass_fds=pass_fds
        )
        self._processes[name] = process
        return process

    async def _spawn_leader(self) -> asyncio.subprocess.Process:
        argv = (
            *("-m", "sluice_engine.leader_main", "--spec", str(self._spec_path)),
            *("--memory-fd", str(self._memory), "--parent", str(os.getpid())),
        )
        leader = await self._exec("leader", *argv, pass_fds=(self._memory,))
        async for event in _events(leader):
            if event["event"] == "listening":
                break
        else:
            raise ChildDied("leader", await leader.wait())
        return leader

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        async for event in _events(process):
            if event["event"] == "ready":
                self.readiness.ready = True
            elif event["event"] == "died":
                self._cause = f"{event.get('reason')}: {event.get('detail')}"
            elif event["event"] == "fence-wanted":
                self._fence()
            elif event["event"] == "draining":
                self.readiness.draining, self.readiness.ready = True, False
            print(json.dumps(event), flush=True)
        status = await process.wait()
        if not self._stopping.is_set():
            raise ChildDied(name, status)

    def _fence(self) -> None:
        """After its death nothing can land any more; `_keep_sidecar` starts the next one."""
        sidecar = self._processes.get("sidecar")
        if sidecar is not None and sidecar.returncode is None:
            sidecar.kill()

    async def _keep_sidecar(self) -> None:
        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        while True:
            process = await self._spawn_sidecar()
            last: dict[str, object] = {}
            async for last in _events(process):
                say("sidecar", **{f"sidecar_{key}": value for key, value in last.items()})
            status = await process.wait()
            if self._stopping.is_set():
                return
            if status in (EXIT_SPEC, EXIT_UNAVAILABLE):
                self._cause = f"{last.get('reason')}: {last.get('detail')}"
                raise ChildDied("transport sidecar", status, self._cause)
            now = loop.time()
            deaths = [t for t in deaths if now - t < SIDECAR_WINDOW_S] + [now]
            say("sidecar-died", status=status, deaths=len(deaths))
            if len(deaths) >= SIDECAR_DEATHS:
                raise ChildDied("transport sidecar", status, f"{len(deaths)} times within {SIDECAR_WINDOW_S:.0f} s")

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
        )
        self._sidecar_counter += 1
        fd = write_spec(told)
        try:
            argv = (
                *("-m", "sluice_engine.transfer.sidecar", "--spec-fd", str(fd)),
                *("--memory-fd", str(self._memory), "--socket", spec.sidecar_path),
            )
            return await self._exec("sidecar", *argv, pass_fds=(self._memory, fd))
        finally:
            os.close(fd)

    async def _run_rank(self, rank: int) -> None:
        """A real model's rank comes from a zygote, a scripted one needs no torch and is started as it is."""
        if self.spec.scripted is not None:
            argv = (
                *("-m", "sluice_engine.rank", "--spec", str(self._spec_path), "--rank", str(rank)),
                *("--memory-fd", str(self._memory), "--parent", str(os.getpid())),
            )
            process = await self._exec(f"rank{rank}", *argv, pass_fds=(self._memory,))
            status: int | None = await process.wait()
        else:
            status = await self._fork_rank(rank)
        if not self._stopping.is_set():
            raise ChildDied(f"rank {rank}", status)

    async def _fork_rank(self, rank: int) -> int | None:
        path = self._zygote_path or await self._start_zygote()
        loop = asyncio.get_running_loop()
        sock = await _connect_zygote(path)
        with sock:
            request = json.dumps({"spec": str(self._spec_path), "rank": rank}).encode() + b"\n"
            socket.send_fds(sock, [request], [self._memory])
            sock.setblocking(False)
            data = b""
            with contextlib.suppress(ConnectionResetError):  # the zygote died before it had read that
                while block := await loop.sock_recv(sock, 65536):
                    data += block
        lines = [json.loads(line) for line in data.splitlines()]
        return next((line["exit"] for line in lines if "exit" in line), None)

    async def _start_zygote(self) -> str:
        path = str(Path(self.spec.run_dir) / "zygote.sock")
        process = await self._exec(
            "zygote", "-m", "sluice_engine.zygote", "--socket", path, "--parent", str(os.getpid())
        )
        async for event in _events(process):
            if event["event"] == "zygote-ready":
                return path
        raise ChildDied("zygote", await process.wait())

    async def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        for process in self._processes.values():
            await process.wait()


async def _connect_zygote(path: str) -> socket.socket:
    """A shared zygote may still be importing torch, or be started again. Raises TimeoutError."""
    async with asyncio.timeout(ZYGOTE_START_S):
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(path)
                return sock
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                await asyncio.sleep(0.05)


async def _events(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, object]]:
    """JSON lines of a child; anything else it prints goes to stderr."""
    assert process.stdout is not None
    async for event in json_lines(process.stdout, _to_stderr):
        if "event" in event:
            yield event
        else:
            _to_stderr(json.dumps(event).encode() + b"\n")


def _to_stderr(noise: bytes) -> None:
    sys.stderr.buffer.write(noise)
    sys.stderr.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run one engine of Sluice and watch it")
    parser.add_argument("--spec", type=Path, required=True, help="engine spec (JSON)")
    parser.add_argument("--zygote", default="", help="socket of a zygote that several engines share")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    args = parser.parse_args(argv)
    if args.parent:
        die_with_parent(args.parent, signal.SIGTERM)
    spec = load_spec(args.spec)
    try:
        return asyncio.run(_run(spec, args.spec, args.zygote))
    except Exception as error:
        say("died", cause=f"{type(error).__name__}: {error}")
        return 1


async def _run(spec: EngineSpec, path: Path, zygote: str) -> int:
    return await Supervisor(spec, path, zygote).run()


if __name__ == "__main__":
    sys.exit(main())
