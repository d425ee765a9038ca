"""Threads that run no code of ours: a thread is made to stand still by a signal whose handler waits for another one."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path

# Of gRPC's threads one is Python's, and this is what it runs.
POLLER = "_poll_wrapper"
# Long enough for the signal to be taken while nobody else runs Python: who stands still must not have the interpreter.
TAKEN_US = 20_000


def freeze_rpc() -> None:
    """All of gRPC's threads, for good. There is no thread of another library in a process of ours that has gRPC."""
    known = {thread.native_id for thread in threading.enumerate() if POLLER not in thread.name}
    everybody = {int(path.name) for path in Path("/proc/self/task").iterdir()}
    # Calls through PyDLL keep the interpreter.
    c = ctypes.PyDLL(None, use_errno=True)
    number = signal.SIGRTMIN + 6
    c.signal(number, ctypes.cast(c.pause, ctypes.c_void_p))
    for tid in sorted(everybody - known):
        c.tgkill(os.getpid(), tid, number)
    c.usleep(TAKEN_US)
