"""A standard stream that never waits for its reader: a process that watches others must not stop because of it."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from sluice_runtime.process.processes import MAX_EVENT_BYTES

# Of what is said and not yet read; beyond it what comes next is dropped, and counted.
MAX_WAITING_BYTES = 2 * MAX_EVENT_BYTES
# What is left at the end of the process gets so long to find a reader.
FLUSH_S = 1.0


class _Descriptor(io.RawIOBase):
    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


class DroppingStream(_Descriptor):
    """Writes to a descriptor that does not block. What it does not take is lost; the next write that comes through is
    preceded by a line that says how many were. Never raises OSError."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._dropped = 0
        self._is_cut = False

    def write(self, data: object) -> int:
        kept = bytes(data)  # type: ignore[call-overload]
        if self._dropped:
            note = _dropped(self._dropped, pid=os.getpid())
            if self._put(b"\n" * self._is_cut + note) == 0:
                self._dropped += 1
                return len(kept)
            self._dropped, self._is_cut = 0, False
        taken = self._put(kept)
        if taken < len(kept):
            self._dropped += 1
            self._is_cut = taken > 0
        return len(kept)

    def _put(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except OSError:
            return 0


class Outlet(_Descriptor):
    """Writes to `fd` from a daemon thread. One `write` is kept whole or dropped whole; the next that comes through is
    preceded by a line that says how many were dropped. A reader that has gone away is no error."""

    def __init__(self, fd: int, most: int = MAX_WAITING_BYTES) -> None:
        super().__init__(fd)
        self._most = most
        self._waiting: deque[bytes] = deque()
        self._held = 0  # bytes that wait or are being written
        self._dropped_now = 0
        self.dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._pump, name=f"outlet-{fd}", daemon=True).start()

    def write(self, data: object) -> int:
        """Never blocks, never raises OSError."""
        kept = bytes(data)  # type: ignore[call-overload]
        with self._changed:
            if self._held + len(kept) > self._most:
                self.dropped += 1
                self._dropped_now += 1
            elif kept:
                if self._dropped_now:
                    self._put(_dropped(self._dropped_now))
                    self._dropped_now = 0
                self._put(kept)
                self._changed.notify_all()
        return len(kept)

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._held += len(data)

    def settle(self, timeout_s: float) -> bool:
        """Whether all that was kept has been taken within the time. Blocks."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def _pump(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            _write_all(self._fd, data)
            with self._changed:
                self._held -= len(data)
                self._changed.notify_all()


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process has made it so, for all that share it
            time.sleep(0.01)
        except OSError:
            return


def _dropped(writes: int, **about: object) -> bytes:
    return json.dumps({"event": "dropped", "writes": writes, **about}).encode() + b"\n"


def _text(stream: _Descriptor, errors: str) -> TextIO:
    return cast(TextIO, io.TextIOWrapper(cast(io.BufferedIOBase, stream), errors=errors, line_buffering=True))


def drop_what_nobody_reads() -> None:
    """Of a supervised process, at its beginning: where stderr does not block, `sys.stderr` never raises for it."""
    if not os.get_blocking(2):
        sys.stderr = _text(DroppingStream(2), "backslashreplace")


@contextmanager
def heard_or_not() -> Iterator[None]:
    """Within it, what this process says on stdout and stderr waits for no reader."""
    before = sys.stdout, sys.stderr
    outlets = Outlet(1), Outlet(2)
    sys.stdout, sys.stderr = (_text(outlet, "replace") for outlet in outlets)
    try:
        yield
    finally:
        deadline = time.monotonic() + FLUSH_S
        for outlet in outlets:
            outlet.settle(max(0.0, deadline - time.monotonic()))
        sys.stdout, sys.stderr = before
