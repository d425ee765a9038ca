"""What runs an engine, a gateway or a zygote, as values: the one place that knows their modules and their options."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice_protocol.generate import Role

ENGINE_MODULES = {
    Role.PREFILL: "sluice_prefill",
    Role.DECODE: "sluice_decode",
    Role.UNIFIED: "sluice_engine.supervisor.supervise",
}


@dataclass(frozen=True, slots=True)
class Command:
    """`argv`: after the interpreter. `ready`: the event on stdout, one JSON object a line, that says it is ready."""

    name: str
    argv: tuple[str, ...]
    ready: str = "ready"

    @property
    def whole(self) -> tuple[str, ...]:
        """With this process's interpreter."""
        return sys.executable, *self.argv

    def is_ready(self, event: Mapping[str, object]) -> bool:
        return event.get("event") == self.ready


def engine_command(spec: Mapping[str, object], zygote: str = "", program: Sequence[str] = ()) -> Command:
    """An engine under its supervisor. `spec`: fields of EngineSpec, role, name and run_dir among them; they are written
    to spec.json in the run directory, readable by this user only, since it holds the key. `zygote`: socket of one
    that engines share; empty: one of its own. `program`: instead of the module of its role. Raises OSError."""
    run_dir = Path(str(spec["run_dir"]))
    run_dir.mkdir(exist_ok=True)
    path = run_dir / "spec.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(spec))
    argv = [*(program or ("-m", ENGINE_MODULES[Role(str(spec["role"]))])), "--spec", str(path), *_parent()]
    return Command(str(spec["name"]), (*argv, *(("--zygote", zygote) if zygote else ())))


def gateway_command(
    run_dir: Path, arguments: Sequence[str], health: Mapping[str, object] | None = None, faults: str = ""
) -> Command:
    """A gateway under its supervisor. `arguments`: of sluice_gateway. `health`: fields of HealthSpec. `faults`: as in
    EngineSpec."""
    supervisor = ["-m", "sluice_gateway.supervised", "--run-dir", str(run_dir), *_parent()]
    supervisor += ["--health", json.dumps(health or {}), *(["--faults", faults] if faults else [])]
    return Command("gateway", (*supervisor, "--", *arguments))


def lone_gateway_command(arguments: Sequence[str]) -> Command:
    """A gateway without a supervisor."""
    return Command("gateway", ("-m", "sluice_gateway", *_parent(), *arguments))


def zygote_command(path: str) -> Command:
    """`path`: its socket."""
    return Command("zygote", ("-m", "sluice_engine.rank.zygote", "--socket", path, *_parent()), "zygote-ready")


def _parent() -> tuple[str, str]:
    """They end when this process does."""
    return "--parent", str(os.getpid())
