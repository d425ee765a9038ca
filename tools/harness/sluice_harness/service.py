"""An engine or the gateway under its supervisor, as whoever runs it sees it: events, probes, evidence, status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_harness.client import NoAnswer, get, inspect
from sluice_launch.commands import Command, engine_command, gateway_command
from sluice_launch.place import Place
from sluice_launch.process import Event, Late, Process, eventually, is_running

SETTLE_S = 60.0
TERMINATION = "termination-log"


@dataclass
class Service:
    """One life of one supervisor; a restart is another Service of the same name in another run directory. `faults`,
    `evidence`: of all its lives."""

    name: str
    role: str
    process: Process
    run_dir: Path
    faults: Path
    evidence: Path
    key: str
    supervising: Event
    ready: Event | None = None
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def probes(self) -> str:
        return str(self.supervising["probes"])

    @property
    def debug(self) -> str:
        return str(self.supervising["debug"])

    @property
    def url(self) -> str:
        """A gateway's."""
        assert self.ready is not None
        return str(self.ready["url"])

    @property
    def address(self) -> str:
        assert self.ready is not None
        return str(self.ready["address"])

    @property
    def source_address(self) -> str:
        assert self.ready is not None
        return str(self.ready["source_address"])

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        self.ready = self.process.wait_ready(timeout_s)
        self.note_pids()

    def note_pids(self) -> dict[str, int]:
        """Of all its processes, those before included: none of them may be left at the end. Raises NoAnswer."""
        told: dict[str, int] = get(self.probes, "/status")[1]["pids"]
        self.pids |= told | {"supervisor": self.process.pid}
        return told

    def pid(self, process: str) -> int:
        """Of `supervisor`, `leader`, `rank0`, `sidecar`: of the one that lives now. Raises Late."""
        if process == "supervisor":
            return self.process.pid
        return eventually(lambda: self.note_pids().get(process, 0), f"{self.name} has a process {process}")

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = get(self.probes, "/status")[1]
        return told

    def inspect(self) -> dict[str, Any]:
        return inspect(self.address, self.key)

    def phase_count(self, phase: str) -> int:
        """Sequences in that phase."""
        return int(self.inspect()["sequences"].get(phase, 0))

    def settled(self) -> dict[str, Any]:
        """Its books once nothing runs. Raises Late when that does not come, or when they are not exact."""
        told = eventually(self._idle_books, f"{self.name} settles", SETTLE_S)
        page, state = told["ledger"]["page"], told["ledger"]["state"]
        left = page["filling"] + page["stranded"] + state["filling"] + state["live"]
        if told["integrity"] != "exact" or left or page["live"] != told["cached"]["pages"]:
            raise Late(f"{self.name}: its books are not exact: {told}")
        return told

    def _idle_books(self) -> dict[str, Any] | None:
        try:
            told = self.inspect()
        except NoAnswer:
            return None
        busy = told["sequences"] or told["rooms"]["source"] or told["rooms"]["reader"] or told["streams"]
        return None if busy else told

    def bundles(self) -> list[Path]:
        return sorted(self.evidence.glob("incident-*"))

    def left_behind(self) -> list[str]:
        """Processes of it that still run though its supervisor is gone."""
        return [name for name, pid in self.pids.items() if is_running(pid)]


@dataclass(frozen=True, slots=True)
class HarnessPlace(Place):
    """Where all services of a stack live, with the folders that outlive each of their lives."""

    def faults(self, name: str) -> Path:
        return self.directory / f"{name}.faults"

    def evidence(self, name: str) -> Path:
        return self.directory / f"{name}.evidence"

    def health(self, name: str, run_dir: Path, health: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of HealthSpec."""
        return {
            "evidence_dir": str(self.evidence(name)),
            "termination_path": str(run_dir / TERMINATION),
            "quarantine_s": 0,
            **health,
        }


def spawn_engine(
    place: HarnessPlace, role: str, name: str, spec: Mapping[str, Any], health: Mapping[str, Any], zygote: str = ""
) -> Service:
    """Started, and supervised; not ready yet. Raises Late."""
    run_dir = place.run_dir(name)
    told = {
        "role": role,
        "name": name,
        "run_dir": str(run_dir),
        "key": place.key,
        "faults": str(place.faults(name)),
        "health": place.health(name, run_dir, health),
    }
    return _supervised(engine_command({**told, **spec}, zygote), place, role, run_dir)


def spawn_gateway(place: HarnessPlace, arguments: Sequence[str], health: Mapping[str, Any]) -> Service:
    """Started, and supervised; not ready yet. Raises Late."""
    name = role = "gateway"
    run_dir = place.run_dir(name)
    told = place.health(name, run_dir, health)
    return _supervised(gateway_command(run_dir, arguments, told, str(place.faults(name))), place, role, run_dir)


def _supervised(command: Command, place: HarnessPlace, role: str, run_dir: Path) -> Service:
    name = command.name
    place.faults(name).mkdir(exist_ok=True)
    process = Process(command, run_dir / "stderr")
    try:
        supervising = process.wait_for("supervising")
    except Late:
        process.end()
        raise
    service = Service(name, role, process, run_dir, place.faults(name), place.evidence(name), place.key, supervising)
    service.pids["supervisor"] = process.pid
    return service
