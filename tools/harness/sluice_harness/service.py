"""One engine under its supervisor, as whoever runs it sees it: events, probes, evidence, status."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_harness.client import NoAnswer, get, inspect
from sluice_harness.processes import Event, Late, Process, eventually, is_running

SETTLE_S = 60.0


@dataclass
class Engine:
    """`life` of one supervisor; a restart is another Engine of the same name in another run directory."""

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
        return str(self.supervising.fields["probes"])

    @property
    def debug(self) -> str:
        return str(self.supervising.fields["debug"])

    @property
    def address(self) -> str:
        assert self.ready is not None
        return str(self.ready.fields["address"])

    @property
    def source_address(self) -> str:
        assert self.ready is not None
        return str(self.ready.fields["source_address"])

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        self.ready = self.process.wait_for("ready", timeout_s)
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


def spawn(
    role: str,
    name: str,
    directory: Path,
    key: str,
    spec: Mapping[str, Any],
    health: Mapping[str, Any],
    zygote: str = "",
) -> Engine:
    """Started, and supervised; not ready yet. Raises Late."""
    run_dir = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory))
    faults, evidence = directory / f"{name}.faults", directory / f"{name}.evidence"
    faults.mkdir(exist_ok=True)
    told = {
        "role": role,
        "name": name,
        "run_dir": str(run_dir),
        "key": key,
        "faults": str(faults),
        "health": {
            "evidence_dir": str(evidence),
            "termination_path": str(run_dir / "termination-log"),
            "quarantine_s": 0,
            **health,
        },
    }
    path = run_dir / "spec.json"
    path.write_text(json.dumps({**told, **spec}))
    argv = ["-m", "sluice_engine.supervise", "--spec", str(path), "--parent", str(os.getpid())]
    process = Process([*argv, *(["--zygote", zygote] if zygote else [])], run_dir / "stderr")
    try:
        supervising = process.wait_for("supervising")
    except Late:
        process.end()
        raise
    engine = Engine(name, role, process, run_dir, faults, evidence, key, supervising)
    engine.pids["supervisor"] = process.pid
    return engine
