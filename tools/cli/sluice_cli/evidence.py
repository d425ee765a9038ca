"""Opening what a supervisor left behind: a bundle's folder, or a flight recorder's file (a copy of a live one)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sluice_cli.shapes import About, Judged, has_shape
from sluice_engine.health import layout
from sluice_engine.health.evidence import ABOUT_FILE, RECORDER_FILE, VERDICT_FILE
from sluice_engine.health.reading import Copy


class EvidenceError(Exception):
    """It cannot be read; the message says why and what would do."""


@dataclass(frozen=True)
class Evidence:
    """`verdict`, `about`: None where the bundle has none, as for a bare recorder, or a damaged one; `damaged` names
    those. `stacks`, `processes`: by process, the texts of `*.stacks` and `*.proc`. `written_s`: the file's time."""

    path: Path
    copy: Copy
    written_s: float
    verdict: dict[str, Any] | None = None
    about: dict[str, Any] | None = None
    stacks: dict[str, str] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


def open_evidence(path: Path) -> Evidence:
    """Raises EvidenceError."""
    try:
        if not path.is_dir():
            return Evidence(path, _recorder(path), path.stat().st_mtime)
        recorder = path / RECORDER_FILE
        if not recorder.exists():
            raise EvidenceError(f"{path}: {_no_bundle(path)}")
        verdict, about = _json(path / VERDICT_FILE, Judged), _json(path / ABOUT_FILE, About)
        told = {VERDICT_FILE: verdict, ABOUT_FILE: about}
        return Evidence(
            path,
            _recorder(recorder),
            recorder.stat().st_mtime,
            verdict,
            about,
            {file.stem: file.read_text(errors="replace") for file in sorted(path.glob("*.stacks"))},
            {file.stem: file.read_text(errors="replace") for file in sorted(path.glob("*.proc"))},
            tuple(name for name, value in told.items() if value is None and (path / name).exists()),
        )
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror}; give a bundle's folder or a flight recorder's file") from error


def _no_bundle(path: Path) -> str:
    bundles = sorted(bundle.name for bundle in path.glob("incident-*"))
    if bundles:
        return f"a folder of {len(bundles)} bundles; give one of them, e.g. {path / bundles[-1]}"
    return f"no {RECORDER_FILE} in it, so it is no evidence bundle; give a folder called incident-NNNN-REASON"


def _recorder(path: Path) -> Copy:
    data = path.read_bytes()
    problem = unreadable(data)
    if problem:
        raise EvidenceError(f"{path}: {problem}")
    return Copy(data)


def unreadable(data: bytes) -> str:
    """Why these bytes are no flight recorder that we can read, and the remedy; empty when they are one."""
    words = [int.from_bytes(data[i * layout.WORD : (i + 1) * layout.WORD], "little") for i in range(3)]
    if words[layout.Header.MAGIC] != layout.MAGIC:
        return (
            "no flight recorder of Sluice (it does not begin with SLUICEFR); give the file `recorder` or recorder.bin"
        )
    version = words[layout.Header.VERSION]
    if version != layout.VERSION:
        return (
            f"a flight recorder of version {version}, and this `sluice doctor` reads version {layout.VERSION}; "
            "use the one of the Sluice that wrote it"
        )
    if len(data) != layout.FILE_BYTES:
        return (
            f"{len(data)} bytes of a flight recorder of {layout.FILE_BYTES}: the copy is cut; "
            "copy the whole file again, or use another bundle"
        )
    return ""


def _json(path: Path, shape: type[msgspec.Struct]) -> dict[str, Any] | None:
    """None where there is none, or one that is damaged."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return told if has_shape(told, shape) else None
