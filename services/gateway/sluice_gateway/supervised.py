"""`python -m sluice_gateway.supervised -- ARGUMENTS OF sluice_gateway`: the gateway under a supervisor.

The same watch, probes, evidence and exit statuses as an engine's: 1 when the gateway died, 3 when it was wedged, and 2
when it refused its arguments. No torch, no gRPC, no requests in this process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_LOOP
from sluice_protocol.service_spec import HealthSpec, LogFormat
from sluice_runtime import fault_points
from sluice_runtime.health.guard import Guard
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.secrets import without_secrets
from sluice_runtime.health.service import Service
from sluice_runtime.process.children import ChildDied, Children, StderrTerms
from sluice_runtime.process.processes import pass_on, say
from sluice_runtime.process.supervision import policy_of, ports_of, probe_url
from sluice_runtime.process.supervisor import EXIT_REFUSED, Ending, Planned, Refused, Supervisor, run_process

# More than a gateway's --shutdown-s usually is.
STOP_S = 25.0
# Of the one child, as the recorder's rows call it.
NAME = "gateway"


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


class GatewayProcess:
    """The workload of a gateway's supervisor."""

    def __init__(self, spec: GatewaySpec) -> None:
        self.spec = spec
        terms = StderrTerms(hold_prompts=frozenset((NAME,)))
        self.children = Children(spec.name, log_format_of(spec.arguments), terms)
        service = Service(spec.name, "gateway", spec.run_dir, GATEWAY_KIND, self.children.pids, self._about)
        self.guard = Guard(service, policy_of(spec.health))
        self.ending = Ending(NAME, GATEWAY_LOOP.name, spec.stop_s)

    def _about(self) -> dict[str, object]:
        """Keys are in files, so that the arguments have no secrets."""
        processes = {name: {"stderr": [], **about} for name, about in self.children.about().items()}
        return {"arguments": [without_secrets(argument) for argument in self.spec.arguments], "processes": processes}

    # -- of a Workload ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """It needs nothing."""

    def release(self) -> None:
        """It has taken nothing."""

    def lives(self) -> list[Coroutine[Any, Any, None]]:
        return [self._run()]

    def exit_of(self, process: str, status: int | None) -> Exit:
        if status == EXIT_REFUSED and not self.guard.watch.started:
            raise Refused
        return Exit(process, status)

    def first_cause(self, exits: list[Exit]) -> list[Exit]:
        return exits

    def asked_to_end(self) -> None:
        say("draining", within_s=self.spec.stop_s)

    # -- the gateway -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Its whole life; what it says is passed on."""
        spec = self.spec
        argv = (
            *("-m", "sluice_gateway", *spec.arguments),
            *("--recorder", str(self.guard.recorder.path), "--parent", str(os.getpid())),
            *("--supervisor", probe_url(self.guard, spec.host)),
            *(["--faults", spec.faults] if spec.faults else []),
        )
        gateway = await self.children.start(NAME, *argv)
        async for event in self.children.events(NAME):
            if event["event"] == "ready":
                self.guard.started(*ports_of(event["url"]))
                event |= {"probes": self.guard.probe_port, "debug": self.guard.debug_port}
            pass_on(event)
        status = await gateway.wait()
        if not self.guard.stopping.is_set():
            gone = self.exit_of(NAME, status)
            raise ChildDied(gone.process, gone.status)


def gateway_supervisor(spec: GatewaySpec) -> Supervisor:
    """To be called within the loop."""
    gateway = GatewayProcess(spec)
    return Supervisor(gateway.guard, gateway.children, gateway, gateway.ending, spec.host, spec.probe_port)


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
    if spec.faults:
        fault_points.arm(spec.faults)
    return run_process(lambda: Planned(spec.health, spec.run_dir, lambda: gateway_supervisor(spec)), parent)


if __name__ == "__main__":
    sys.exit(main())
