"""The sidecar's end of the leader's socket: one loop over non-blocking connections, one of which is the leader.

A connection that says something that is no command is closed and counted; nobody else notices. But a leader counts on
this: when *its* connection ends, nothing can land any more. So once a connection has asked for a pull, its end, for
whatever reason, is the end of this process, and the socket is closed by the process's death and by nothing else.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice_engine import hooks
from sluice_engine.health.layout import Phase
from sluice_engine.health.recorder import Row, unrecorded
from sluice_engine.transfer.lane import tcp_bytes_received
from sluice_engine.transfer.messages import (
    Allow,
    Command,
    FrameReader,
    Pull,
    Report,
    SidecarHello,
    Stats,
    Ticked,
    decode_command,
    encode_frame,
)
from sluice_engine.transfer.poller import Poller
from sluice_engine.wire import FrameError

TICK_S = 0.25
_RECEIVE = 1 << 18
_MAX_UNSENT = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    frames: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    pulled: bool = False


class LeaderServer:
    def __init__(
        self,
        path: Path,
        hello: SidecarHello,
        end_process: Callable[[str, str], None],
        *,
        allow_hooks: bool = False,
        row: Row | None = None,
    ) -> None:
        """`end_process(reason, detail)` does not return. `allow_hooks`: tests may hold the poller."""
        self._row = row or unrecorded("sidecar.socket")
        self._hello, self._end_process, self._allow_hooks = hello, end_process, allow_hooks
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        # Appended by the poller, drained here: a deque needs no lock for that.
        self._reports: deque[Report] = deque()
        self._leader: _Connection | None = None
        self._turns, self._next_tick = 0, 0.0
        self.refused: Counter[str] = Counter()

    def emit(self, reports: Sequence[Report]) -> None:
        """From any thread."""
        self._reports.extend(reports)
        os.eventfd_write(self._wake, 1)

    def run(self, poller: Poller, still_wanted: Callable[[], bool]) -> None:
        """Until the process ends, or nobody wants it any more."""
        self._row.begin(Phase.SERVING)
        while still_wanted():
            self._row.tick()
            hooks.reach("sidecar.socket")
            for key, events in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._serve(key.data, events, poller)
            self._forward(poller)
            self._turns += 1

    # -- inside ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.setblocking(False)
        if _uid_of(accepted) != os.getuid():
            self._refuse(_Connection(accepted), "ForeignUser")
            return
        connection = _Connection(accepted)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._send(connection, self._hello)

    def _serve(self, connection: _Connection, events: int, poller: Poller) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                data = connection.socket.recv(_RECEIVE)
                if not data:
                    self._end(connection, "Closed")
                    return
                for body in connection.frames.feed(data):
                    self._command(connection, decode_command(body), poller)
        except FrameError as error:
            self._end(connection, "FrameError", str(error))
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(connection, "Broken", str(error))

    def _command(self, connection: _Connection, command: Command, poller: Poller) -> None:
        if self._leader is None:
            self._leader = connection
        if self._leader is not connection:
            raise FrameError("another leader is connected")
        if isinstance(command, Allow) and not self._allow_hooks:
            raise FrameError("hooks are not allowed")
        connection.pulled |= isinstance(command, Pull)
        poller.put(command)

    def _forward(self, poller: Poller) -> None:
        now = time.monotonic()
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        if self._leader is None:
            return
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            reports.append(Ticked(self._turns, poller.turns, poller.in_flight))
        if reports:
            self._send(self._leader, *(self._completed(report) for report in reports))

    def _completed(self, report: Report) -> Report:
        """Stats with what the poller does not know."""
        if not isinstance(report, Stats):
            return report
        more = {f"connection_{reason}": count for reason, count in self.refused.items()}
        more["tcp_bytes"] = tcp_bytes_received()
        return msgspec.structs.replace(report, counters=report.counters | more)

    def _send(self, connection: _Connection, *reports: Report) -> None:
        for report in reports:
            connection.unsent += encode_frame(report)
        if len(connection.unsent) > _MAX_UNSENT:
            self._end(connection, "Unread")
            return
        try:
            self._flush(connection)
        except OSError as error:
            self._end(connection, "Broken", str(error))

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, wanted, connection)

    def _end(self, connection: _Connection, reason: str, detail: str = "") -> None:
        if connection.pulled:
            self._end_process(f"Leader{reason}", detail)
        self._selector.unregister(connection.socket)
        self._refuse(connection, reason)
        if self._leader is connection:
            self._leader = None

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self.refused[reason] += 1
        connection.socket.close()


def _listen(path: Path) -> socket.socket:
    """Bound under another name and renamed into place, so that whoever finds the path can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    listener.bind(str(fresh))
    fresh.chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)
    fresh.rename(path)
    return listener


def _uid_of(accepted: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
