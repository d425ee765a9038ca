"""What a child writes to stderr, on its way through its supervisor: neither waits for the other's reader.

The child's end of the pipe never blocks, so that a supervisor that is frozen cannot hold it up either: what does not
fit is dropped, and counted by the child where it is Python's (`outlet.drop_what_nobody_reads`). The supervisor
passes each line on to its own stderr, which waits for no reader (`outlet.py`). A child that writes without end gets a
share of the supervisor's time, not all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable

from sluice_protocol.service_spec import LogFormat
from sluice_runtime.health.last_words import KEPT_LINES
from sluice_runtime.log import as_record
from sluice_runtime.process.processes import PAUSE_S, SLICE_S

# Room for a burst, such as the tracebacks of all threads; more than a system grants is not asked for again.
PIPE_BYTES = 1 << 20
# Of one line; a longer one goes on in pieces.
MAX_LINE_BYTES = 64 * 1024
READ_BYTES = 16 * 1024
# What comes within this time is read at once: to wake for a line costs more than to pass it on. It waits in the pipe,
# which outlives the process that wrote it.
GATHER_S, GATHER_LINES = 0.05, 32
# At the end of a child, for what it said last.
CLOSE_S = 0.5
# Of each of its last lines, which are kept.
MAX_TAIL_LINE_BYTES = 2048


class ChildStderr:
    """`child_fd` is what the child gets as its stderr; the code that has started it calls `given`. One pipe may have
    several writers: a child's own children inherit it."""

    def __init__(self, said: Callable[[bytes], None]) -> None:
        self._said = said
        self._fd, self.child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""
        self._lines: deque[bytes] = deque()
        self._tail: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._turn)

    def given(self) -> None:
        """The child has its own copy: ours is what would keep the pipe open."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def close(self) -> None:
        """Once the child is gone: what it said last is passed on, as far as CLOSE_S goes. Idempotent."""
        self.given()
        if self._fd >= 0 and self._pass_on(CLOSE_S):
            left = sum(map(len, self._lines)) + len(self._rest)
            self._lines.clear()
            self._rest = b""
            for _ in range(PIPE_BYTES // READ_BYTES):  # a pipe's worth: the process that holds it may not be our child
                left += len(block := self._block())
                if not block:
                    break
            self._said(json.dumps({"event": "dropped", "bytes": left}).encode() + b"\n")
        self._end()

    def tail(self) -> list[str]:
        """The last lines that came, as text."""
        return [line[:MAX_TAIL_LINE_BYTES].decode(errors="replace").rstrip("\r\n") for line in self._tail]

    def _turn(self) -> None:
        """One turn of the loop: a child that has more to say goes on after the others."""
        pause = PAUSE_S if self._pass_on(SLICE_S) else GATHER_S
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(pause, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._turn)
        self._turn()

    def _pass_on(self, seconds: float) -> bool:
        """Whether there is more than could be passed on within the time."""
        until = time.monotonic() + seconds
        while self._lines or self._read():
            if time.monotonic() > until:
                return True
            self._said(b"".join([self._lines.popleft() for _ in range(min(GATHER_LINES, len(self._lines)))]))
        return False

    def _read(self) -> bool:
        """Whether there is a line now."""
        while block := self._block():
            *lines, self._rest = (self._rest + block).split(b"\n")
            self._lines.extend(line + b"\n" for line in lines)
            self._tail.extend(lines)
            while len(self._rest) > MAX_LINE_BYTES:
                self._lines.append(self._rest[:MAX_LINE_BYTES] + b"\n")
                self._rest = self._rest[MAX_LINE_BYTES:]
            if self._lines:
                return True
        return False

    def _block(self) -> bytes:
        """Nothing, where there is nothing now or ever."""
        if self._fd < 0:
            return b""
        try:
            block = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            block = b""
        if not block:
            self._end()
        return block

    def _end(self) -> None:
        if self._fd < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._rest:
            self._said(self._rest + b"\n")
            self._tail.append(self._rest)
            self._rest = b""


def passed_on(log_format: LogFormat, service: str, process: str) -> Callable[[bytes], None]:
    """Lines of `process`, one or several, to this process's stderr in the log's format: as they are for people. In JSON
    what is no JSON object (a traceback, native code) is the text of one."""

    def told(line: bytes) -> bytes:
        if _is_record(line):
            return line
        text = line.decode(errors="replace").rstrip("\r")
        return as_record(service, "warning", "stderr", {"process": process, "text": text}).encode()

    def said(lines: bytes) -> None:
        if log_format is LogFormat.JSON:
            lines = b"\n".join(map(told, lines.removesuffix(b"\n").split(b"\n"))) + b"\n"
        sys.stderr.buffer.write(lines)
        sys.stderr.flush()

    return said


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
