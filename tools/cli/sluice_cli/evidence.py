"""Opening what a supervisor left behind: a bundle's folder, or a flight recorder's file (a copy of a live one)."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sluice_cli.shapes import About, Judged, has_shape
from sluice_runtime.health import layout
from sluice_runtime.health.evidence import ABOUT_FILE, RECORDER_FILE, VERDICT_FILE
from sluice_runtime.health.reading import Copy

# Of stacks, and of what /proc said. Ours have kilobytes.
MAX_TEXT_BYTES = 16 << 20


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
            {file.stem: _text(file) for file in sorted(path.glob("*.stacks"))},
            {file.stem: _text(file) for file in sorted(path.glob("*.proc"))},
            tuple(name for name, value in told.items() if value is None and (path / name).exists()),
        )
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror}; give a bundle's folder or a flight recorder's file") from error


def _no_bundle(path: Path) -> str:
    bundles = sorted(bundle.name for bundle in path.glob("incident-*"))
    if bundles:
        return f"a folder of {len(bundles)} bundles; give one of them, e.g. {path / bundles[-1]}"
    return f"no {RECORDER_FILE} in it, so it is no evidence bundle; give a folder called incident-NNNN-REASON"


def _read(path: Path, most: int) -> bytes:
    """The beginning of a regular file. Raises OSError for anything else: a bundle comes from elsewhere, and a pipe in
    it would never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return file.read(most)


def _text(path: Path) -> str:
    try:
        data = _read(path, MAX_TEXT_BYTES + 1)
    except OSError as error:
        return f"it cannot be read: {error.strerror}\n"
    return data[:MAX_TEXT_BYTES].decode(errors="replace") + ("\n[cut]\n" if len(data) > MAX_TEXT_BYTES else "")


def _recorder(path: Path) -> Copy:
    data = _read(path, layout.FILE_BYTES + 1)
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
        fault = "the copy is cut" if len(data) < layout.FILE_BYTES else "it goes on behind it"
        return (
            f"{len(data)} bytes of a flight recorder of {layout.FILE_BYTES}: {fault}; "
            "copy the whole file again, or use another bundle"
        )
    return ""


def _json(path: Path, shape: type[msgspec.Struct]) -> dict[str, Any] | None:
    """None where there is none, or one that is damaged."""
    try:
        told: dict[str, Any] = json.loads(_read(path, MAX_TEXT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return told if has_shape(told, shape) else None
