"""The notes of this user's `sluice up`: one for each that runs, by which `sluice chat` and `sluice status` find it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "sluice-up-"
NONE_RUNS = "no `sluice up` of yours runs on this machine"


def note_path(pid: int) -> Path:
    """Of the `sluice up` that is process `pid`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/sluice-{os.getuid()}"
    return Path(runtime) / f"{PREFIX}{pid}.json"


def write_note(url: str, model: str, *, is_ready: bool = True, services: Sequence[Mapping[str, object]] = ()) -> None:
    """Ours. `services`: what their supervisors announced, for `sluice status`. Raises OSError when the place is
    somebody else's; serving goes on without a note."""
    pid = os.getpid()
    path = note_path(pid)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path.parent} belongs to somebody else")
    _sweep(path.parent)
    note: dict[str, Any] = {"url": url, "pid": pid, "born": _born(pid), "model": model, "is_ready": is_ready}
    note["services"] = list(services)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(note))
    fresh.replace(path)


def read_stacks() -> list[dict[str, Any]]:
    """A note for each `sluice up` that runs here: url, pid, model, is_ready, services. Those that serve come first, the
    latest before the others."""
    place = note_path(0).parent
    if not place.exists() or place.lstat().st_uid != os.getuid():
        return []
    notes = [note for path in place.glob(f"{PREFIX}*.json") if (note := _read(path)) is not None]
    return sorted(notes, key=lambda note: (note["is_ready"], note["born"], note["pid"]), reverse=True)


def read_note() -> str:
    """URL of the `sluice up` that serves here. Raises OSError when there is none."""
    stacks = read_stacks()
    if not stacks:
        raise FileNotFoundError(NONE_RUNS)
    if not stacks[0]["is_ready"]:
        raise FileNotFoundError("your `sluice up` on this machine is still starting")
    return str(stacks[0]["url"])


def remove_note() -> None:
    """Ours."""
    path = note_path(os.getpid())
    with contextlib.suppress(OSError):
        path.unlink()
        if "XDG_RUNTIME_DIR" not in os.environ:
            path.parent.rmdir()


def _read(path: Path) -> dict[str, Any] | None:
    """None: it is no note, or its writer was killed."""
    try:
        told = json.loads(path.read_text())
        pid, born = int(told["pid"]), int(told["born"])
        if born != _born(pid):
            return None
        services = [dict(service) for service in told["services"]]
        return {**told, "url": str(told["url"]), "is_ready": bool(told["is_ready"]), "services": services}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sweep(directory: Path) -> None:
    """Remove the notes of those that were killed."""
    for path in directory.glob(f"{PREFIX}*.json"):
        if _read(path) is None:
            with contextlib.suppress(OSError):
                path.unlink()


def _born(pid: int) -> int:
    """When the process began, in ticks since the machine did: a number may be another process's by now. Raises OSError
    when there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
