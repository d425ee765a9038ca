"""What the kernel says of a process: works for one that is stopped, stuck or dead."""

from __future__ import annotations

import os
from pathlib import Path

from sluice_runtime.health.reading import Thread
from sluice_runtime.health.secrets import without_secrets

# Of /proc/PID/: what a bundle holds of a process that cannot speak for itself.
KEPT = ("status", "wchan", "stack", "syscall", "cmdline", "limits", "io")
MAX_THREADS = 256
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def look_at_thread(pid: int, tid: int) -> tuple[Thread, float]:
    """Its state, and the seconds of CPU that it has had.

    GONE: it has ended though its process lives. The death of a process is its parent's to tell: UNKNOWN.
    """
    fields = _stat(f"/proc/{pid}/task/{tid}/stat")
    if fields[0] in ("", "Z", "X"):
        return (Thread.UNKNOWN if state_of(pid) in ("", "Z", "X") else Thread.GONE), 0.0
    thread = Thread.STOPPED if fields[0] in ("T", "t") else Thread.ALIVE
    return thread, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def process_state(pid: int) -> str:
    """In words: why it may have had nothing to say."""
    state = state_of(pid)
    if state in ("", "Z", "X"):
        return "it has ended"
    return "it is stopped" if state in ("T", "t") else f"it did not answer (state {state})"


def state_of(pid: int, tid: int | None = None) -> str:
    """The kernel's letter for a process, or for one of its threads; "" where there is none."""
    return _stat(f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat")[0]


def _stat(path: str) -> list[str]:
    """Fields of a stat file from the state on (the third of proc(5)); [""] where there is nothing of the kind."""
    try:
        return Path(path).read_bytes().rpartition(b")")[2].decode().split() or [""]
    except OSError:
        return [""]


def describe_process(pid: int) -> str:
    """Text for a bundle: the process and the state of each of its threads."""
    lines = []
    for name in KEPT:
        lines += [f"--- {name}", _read(Path(f"/proc/{pid}/{name}"))]
    try:
        tids = sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        tids = []
    for tid in tids[:MAX_THREADS]:
        base = Path(f"/proc/{pid}/task/{tid}")
        told = " ".join(_read(base / name) for name in ("comm", "wchan", "stat"))
        lines.append(f"--- thread {tid}: {told}")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> str:
    try:
        return without_secrets(path.read_bytes().replace(b"\0", b" ").decode(errors="replace")).strip()[:16384]
    except OSError as error:
        return f"({error.strerror})"
