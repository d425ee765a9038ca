"""Stacks of all threads of a process, on demand from outside: a signal, whose handler runs without the interpreter's
lock and needs no ptrace. Works while a thread spins, waits for a lock, or holds the interpreter in foreign code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

STACKS_SIGNAL = signal.SIGUSR1
FOLDER = "stacks"
POLL_S = 0.02
# A file longer than this is emptied before its process is asked again: its writers append, wherever the end is then.
MAX_BYTES = 4 * 1024 * 1024
# The file of a registration must outlive it: held here for the life of the process.
_held: list[IO[bytes]] = []


def answer_with_stacks(run_dir: Path, name: str) -> None:
    """From now on STACKS_SIGNAL makes this process append all its stacks to a file of this name. Main thread only."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    file = (folder / f"{name}.txt").open("ab")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    _held.append(file)


def share_stacks(run_dir: Path, name: str, answered_in: Path) -> None:
    """A process that several services share answers in the folder of its own: in ours its file is a link to that."""
    link = run_dir / FOLDER / f"{name}.txt"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(answered_in.resolve() / FOLDER / f"{name}.txt")


def can_answer(pid: int) -> bool | None:
    """Whether a handler is there and could run: the signal would kill a process without one, and a process that is
    stopped is not waited for. None: it runs without a handler, as at its beginning and at its end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    if any(line.startswith("State:") and line.split()[1] in "TtZX" for line in status.splitlines()):
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1) or None


def collect_stacks(
    run_dir: Path, pids: Mapping[str, int], timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> dict[str, str]:
    """Process -> its stacks; "" where none came within the time (stopped, dead, or not ours). Blocks."""
    files = {name: run_dir / FOLDER / f"{name}.txt" for name in pids}
    sizes = {name: _size_of_bounded(path) for name, path in files.items()}
    asked: list[str] = []
    unasked = list(pids)
    seen: dict[str, int] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        for name in list(unasked):
            may = can_answer(pids[name])
            if may is not None:
                unasked.remove(name)
            if may and _signal(pids[name]):
                asked.append(name)
        if not (asked or unasked) or time.monotonic() > deadline:
            break
        sleep(POLL_S)
        for name in list(asked):
            size = _size(files[name])
            if size < sizes[name]:  # another asker has emptied it: all that is in it came since
                sizes[name] = 0
            if size > sizes[name] and seen.get(name) == size:  # written in one go: two equal looks are its end
                asked.remove(name)
            seen[name] = size
    return {name: _tail(files[name], sizes[name]) for name in pids}


def _signal(pid: int) -> bool:
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return False
    return True


def _size_of_bounded(path: Path) -> int:
    size = _size(path)
    if size > MAX_BYTES:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
        return _size(path)
    return size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
