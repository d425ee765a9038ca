"""Whether an evidence bundle is complete: what somebody who was not there needs is in it, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

from sluice_runtime.health.evidence import ABOUT_FILE, RECORDER_FILE, VERDICT_FILE
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import RecorderError


def problems_of(bundle: Path, key: str, reason: str) -> list[str]:
    """What is missing, or is there and should not be."""
    problems = [*_recorder_problems(bundle), *_json_problems(bundle, reason)]
    for proc in sorted(bundle.glob("*.proc")):
        problems += _process_problems(proc)
    problems += [f"{file.name} holds the key" for file in bundle.iterdir() if key.encode() in file.read_bytes()]
    return problems


def _recorder_problems(bundle: Path) -> list[str]:
    try:
        copy = Copy((bundle / RECORDER_FILE).read_bytes())
        return [] if copy.rows() and copy.events() else ["the recorder is empty"]
    except (OSError, RecorderError) as error:
        return [f"the recorder cannot be read: {error}"]


def _json_problems(bundle: Path, reason: str) -> list[str]:
    try:
        told = json.loads((bundle / VERDICT_FILE).read_text())
        about = json.loads((bundle / ABOUT_FILE).read_text())
    except (OSError, ValueError) as error:
        return [f"{error}"]
    problems = [] if told["reason"] == reason else [f"its verdict is {told['reason']}, not {reason}"]
    if not (about.get("spec") or about.get("arguments")):
        problems.append("it does not say what was configured")
    living = [name for name, process in about.get("processes", {}).items() if process.get("status") is None]
    problems += [f"{name} lived, and is not described" for name in living if not (bundle / f"{name}.proc").exists()]
    return problems if about.get("processes") else [*problems, "it does not say which processes there were"]


def _process_problems(proc: Path) -> list[str]:
    """Stacks of whoever can speak, and what the kernel says of whoever cannot."""
    text = proc.read_text()
    state = next((line.split()[1] for line in text.splitlines() if line.startswith("State:")), "")
    stacks = proc.with_suffix(".stacks").read_text()
    if state in ("R", "S", "D") and not ("hread 0x" in stacks or "it has ended" in stacks):
        return [f"{proc.stem} was in state {state}, and its stacks are missing: {stacks[:80]!r}"]
    return [] if "--- status" in text else [f"{proc.name} says nothing"]
