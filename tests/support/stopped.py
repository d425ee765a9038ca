"""A process that is really stopped: SIGSTOP returns before the last thread has noticed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop_process(pid: int, timeout_s: float = 20.0) -> None:
    """SIGSTOP, and wait until every thread of `pid` is in state T: none of them answers anybody any more."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except FileNotFoundError:
        return True  # it ended
