"""`python -m sluice_gateway.supervised -- ARGUMENTS OF sluice_gateway`: the gateway under a supervisor.

The same watch, probes, evidence and exit statuses as an engine's: 1 when the gateway died, 3 when it was wedged, and 2
when it refused its arguments. No torch, no gRPC, no requests in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_LOOP
from sluice_protocol.service_spec import HealthSpec, LogFormat
from sluice_runtime import fault_points
from sluice_runtime.descriptors import raise_limit
from sluice_runtime.errors import SpecError
from sluice_runtime.health.guard import Guard
from sluice_runtime.health.last_words import cause_of_death, clean
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.secrets import without_secrets
from sluice_runtime.health.service import Service
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

# More than a gateway's --shutdown-s usually is.
STOP_S = 25.0
REFUSED = 2


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """`arguments`: of sluice_gateway. `faults`: as in EngineSpec. `probe_port` 0: the system picks one. `stop_s`: how
    long the gateway may take to end; more than its --shutdown-s."""

    name: str
    run_dir: Path
    arguments: tuple[str, ...]
    health: HealthSpec
    host: str = "127.0.0.1"
    faults: str = ""
    probe_port: int = 0
    stop_s: float = STOP_S


class GatewaySupervisor:
    def __init__(self, spec: GatewaySpec) -> None:
        self.spec = spec
        self._gateway: asyncio.subprocess.Process | None = None
        self._is_refused = False
        self._said = passed_on(log_format_of(spec.arguments), spec.name, "gateway")
        self._stderr: ChildStderr | None = None
        service = Service(spec.name, "gateway", spec.run_dir, GATEWAY_KIND, self.pids, self._about)
        self.guard = Guard(service, policy_of(spec.health))

    def pids(self) -> dict[str, int]:
        """Of what lives now."""
        lives = self._gateway is not None and self._gateway.returncode is None
        return {"gateway": self._gateway.pid} if lives and self._gateway is not None else {}

    def _about(self) -> dict[str, object]:
        """Keys are in files, so that the arguments have no secrets."""
        gateway = self._gateway
        told: dict[str, dict[str, object]] = {}
        if gateway is not None:
            lines = self._stderr.tail() if self._stderr is not None else []
            about: dict[str, object] = {
                "pid": gateway.pid,
                "status": gateway.returncode,
                "stderr": [clean(line) for line in lines],
            }
            told["gateway"] = about
        return {"arguments": [without_secrets(argument) for argument in self.spec.arguments], "processes": told}

    async def run(self) -> int:
        guard, loop = self.guard, asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, guard.stopping.set)
        tasks: list[asyncio.Task[Any]] = []
        try:
            try:
                await guard.start(self.spec.host, self.spec.probe_port)
            except OSError as error:
                return await end_by(guard, failed_start(error))
            announce(guard, self.spec.host)
            verdict = await named(guard, self._judge(tasks))
            if verdict is not None:
                return await end_by(guard, verdict)
            if self._is_refused:
                return REFUSED  # it has said why on stderr
            say("stopped")
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._gateway is not None:
                if self._gateway.returncode is None:
                    self._gateway.kill()
                await self._gateway.wait()
            if self._stderr is not None:
                self._stderr.close()
            await guard.stop()

    async def _judge(self, tasks: list[asyncio.Task[Any]]) -> Verdict | None:
        """Its whole life. None: it has ended as it should, or refused its arguments. `tasks` gets what goes on."""
        guard, loop = self.guard, asyncio.get_running_loop()
        try:
            gateway = self._gateway = await self._spawn()
        except OSError as error:  # the system has no room for another process
            guard.exited(Exit("gateway", None, type(error).__name__, str(error)))
            return guard.watch.look()
        watching = loop.create_task(guard.run())
        living = loop.create_task(self._follow(gateway))
        tasks += [watching, living, loop.create_task(guard.stopping.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if guard.stopping.is_set():
            return await self._stop(gateway, watching)
        return watching.result() if watching.done() else self._verdict_on(living.result())

    def _verdict_on(self, status: int | None) -> Verdict | None:
        self._is_refused = status == REFUSED and not self.guard.watch.started
        if self._is_refused:
            return None
        self.guard.exited(Exit("gateway", status, "", self._last_words()))
        return self.guard.watch.look()

    def _last_words(self) -> str:
        """What the gateway's stderr says of its death."""
        if self._stderr is None:
            return ""
        self._stderr.close()
        return cause_of_death(self._stderr.tail(), holds_prompts=True)

    async def _stop(self, gateway: asyncio.subprocess.Process, watching: asyncio.Task[Verdict]) -> Verdict | None:
        """It finishes what it has. One that dies, freezes or takes too long meanwhile is told of as ever."""
        self.guard.drain(GATEWAY_LOOP.name, self.spec.stop_s)
        say("draining", within_s=self.spec.stop_s)
        if await ends_as_asked(gateway, watching):
            return None
        return watching.result() if watching.done() else self._verdict_on(gateway.returncode)

    async def _spawn(self) -> asyncio.subprocess.Process:
        spec = self.spec
        argv = [
            *("-m", "sluice_gateway", *spec.arguments),
            *("--recorder", str(self.guard.recorder.path), "--parent", str(os.getpid())),
            *("--supervisor", probe_url(self.guard, spec.host)),
            *(["--faults", spec.faults] if spec.faults else []),
        ]
        stderr = self._stderr = ChildStderr(self._said)
        gateway = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr.child_fd,
            limit=MAX_EVENT_BYTES,
            env=child_environment(),
        )
        stderr.given()
        return gateway

    async def _follow(self, gateway: asyncio.subprocess.Process) -> int:
        """Pass on what it says, until its end: the exit status."""
        async for event in child_events(gateway, self._said):
            if event["event"] == "ready":
                self.guard.started(*ports_of(event["url"]))
                event |= {"probes": self.guard.probe_port, "debug": self.guard.debug_port}
            pass_on(event)
        return await gateway.wait()


def log_format_of(arguments: Sequence[str]) -> LogFormat:
    """The last `--log FORMAT` or `--log=FORMAT` of the gateway's own arguments. One that it will refuse is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log", default="")
    try:
        return LogFormat(parser.parse_known_args(list(arguments))[0].log)
    except (argparse.ArgumentError, ValueError):
        return LogFormat.HUMAN


def parse_arguments(argv: Sequence[str]) -> tuple[GatewaySpec, int]:
    """What to run, and whose end is ours. Exits with 2 on what makes no sense."""
    parser = argparse.ArgumentParser(prog="sluice_gateway.supervised", description="Run a gateway and watch it")
    parser.add_argument("--name", default="gateway")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="for the recorder and the evidence; one per gateway"
    )
    parser.add_argument("--health", default="{}", metavar="JSON", help="fields of HealthSpec")
    parser.add_argument("--probe-host", default="127.0.0.1", help="where the probes answer")
    parser.add_argument("--probe-port", type=int, default=0, help="0: the system picks one")
    parser.add_argument("--stop-s", type=float, default=STOP_S, help="how long it may take to end, then it is killed")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    parser.add_argument("--faults", default="", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of sluice_gateway, after --")
    args = parser.parse_args(argv)
    try:
        health = msgspec.json.decode(args.health, type=HealthSpec)
    except msgspec.DecodeError as error:
        parser.error(f"--health: {error}")
    args.run_dir.mkdir(parents=True, exist_ok=True)
    return GatewaySpec(
        args.name,
        args.run_dir,
        tuple(args.arguments),
        health,
        args.probe_host,
        args.faults,
        args.probe_port,
        args.stop_s,
    ), args.parent


def main(argv: Sequence[str] | None = None) -> int:
    spec, parent = parse_arguments(sys.argv[1:] if argv is None else argv)
    if parent:
        die_with_parent(parent, signal.SIGTERM)
    raise_limit()
    if spec.faults:
        fault_points.arm(spec.faults)
    with heard_or_not():
        try:
            with sole_user(spec.run_dir):
                return asyncio.run(undisturbed(_run(spec)))
        except SpecError as error:
            say("died", cause=f"{type(error).__name__}: {error}")
            return REFUSED
        except Exception as error:
            say("died", cause=f"{type(error).__name__}: {error}")
            return 1


async def _run(spec: GatewaySpec) -> int:
    try:
        return await GatewaySupervisor(spec).run()
    except Exception as error:  # none is known that comes so far; without a message nobody would know of one
        leave_message(spec.health, spec.run_dir, error)
        raise


if __name__ == "__main__":
    sys.exit(main())
