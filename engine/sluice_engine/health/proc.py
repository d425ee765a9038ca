"""What the kernel says of a process: works for one that is stopped, stuck or dead."""

from __future__ import annotations

from pathlib import Path

from sluice_engine.health.reading import Thread

# Of /proc/PID/: what a bundle holds of a process that cannot speak for itself.
KEPT = ("status", "wchan", "stack", "syscall", "cmdline", "limits", "io")
MAX_THREADS = 256
_THREADS = {"T": Thread.STOPPED, "t": Thread.STOPPED, "R": Thread.RUNNING}


def thread_state(pid: int, tid: int) -> Thread:
    """GONE: it has ended though its process lives. The death of a process is its parent's to tell: UNKNOWN."""
    state = _state(f"/proc/{pid}/task/{tid}/stat")
    if state in ("", "Z", "X"):
        return Thread.UNKNOWN if _state(f"/proc/{pid}/stat") in ("", "Z", "X") else Thread.GONE
    return _THREADS.get(state, Thread.ALIVE)


def process_state(pid: int) -> str:
    """In words: why it may have had nothing to say."""
    state = _state(f"/proc/{pid}/stat")
    if state in ("", "Z", "X"):
        return "it has ended"
    return "it is stopped" if state in ("T", "t") else f"it did not answer (state {state})"


def _state(path: str) -> str:
    """The kernel's letter; "" where there is nothing of the kind."""
    try:
        return Path(path).read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


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
        return path.read_bytes()[:16384].replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError as error:
        return f"({error.strerror})"
