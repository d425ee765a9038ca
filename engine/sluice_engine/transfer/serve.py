"""The sidecar's end of the leader's socket: one loop over non-blocking connections, one of which is the leader.

A connection that says something that is no command is closed and counted; others do not notice. But a leader relies on
this: when *its* connection ends, nothing can land any more. So once a connection has asked for a pull, its end, for
whatever reason, is the end of this process, and the socket is closed by the process's death and by nothing else.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

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
from sluice_runtime import fault_points
from sluice_runtime.health.layout import Phase
from sluice_runtime.health.recorder import Row, unrecorded

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
        self._leader: _Connection | None = None
        # Guards what is unsent and the leader's connection; no thread waits while it holds this lock.
        self._sending = threading.Lock()
        self._turns, self._next_tick = 0, 0.0
        self.refused: Counter[str] = Counter()

    def emit(self, reports: Sequence[Report]) -> None:
        """From any thread, which sends them itself: to wake the loop would cost more. The loop is woken for what the
        socket does not take at once."""
        frames = b"".join([encode_frame(self._completed(report)) for report in reports])
        with self._sending:
            if self._leader is None:
                return
            self._leader.unsent += frames
            try:
                is_sent = _send_some(self._leader)
            except OSError:  # the loop meets it too, and knows what follows from it
                is_sent = False
        if not is_sent:
            os.eventfd_write(self._wake, 1)

    def run(self, poller: Poller, still_wanted: Callable[[], bool]) -> None:
        """Serve until the process ends, or `still_wanted` says no."""
        self._row.begin(Phase.SERVING)
        while still_wanted():
            self._row.tick()
            fault_points.reach("sidecar.socket")
            for key, events in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._serve(key.data, events, poller)
            self._tell(poller)
            if self._leader is not None and self._leader.unsent:
                self._flush(self._leader)
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
        connection.unsent += encode_frame(self._hello)
        self._flush(connection)

    def _serve(self, connection: _Connection, events: int, poller: Poller) -> None:
        if events & selectors.EVENT_WRITE and not self._flush(connection):
            return
        try:
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

    def _tell(self, poller: Poller) -> None:
        """The leader, a few times a second, that both loops turn."""
        now = time.monotonic()
        if self._leader is not None and now >= self._next_tick:
            self._next_tick = now + TICK_S
            self.emit([Ticked(self._turns, poller.turns, poller.in_flight)])

    def _completed(self, report: Report) -> Report:
        """Stats with what the poller does not know."""
        if not isinstance(report, Stats):
            return report
        more = {f"connection_{reason}": count for reason, count in dict(self.refused).items()}
        more["tcp_bytes"] = tcp_bytes_received()
        return msgspec.structs.replace(report, counters=report.counters | more)

    def _flush(self, connection: _Connection) -> bool:
        """False: the connection has ended instead."""
        try:
            with self._sending:
                is_sent, waiting = _send_some(connection), len(connection.unsent)
        except OSError as error:
            self._end(connection, "Broken", str(error))
            return False
        if waiting > _MAX_UNSENT:
            self._end(connection, "Unread")
            return False
        wanted = selectors.EVENT_READ | (0 if is_sent else selectors.EVENT_WRITE)
        self._selector.modify(connection.socket, wanted, connection)
        return True

    def _end(self, connection: _Connection, reason: str, detail: str = "") -> None:
        if connection.pulled:
            self._end_process(f"Leader{reason}", detail)
        with self._sending:
            if self._leader is connection:
                self._leader = None
        self._selector.unregister(connection.socket)
        self._refuse(connection, reason)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self.refused[reason] += 1
        connection.socket.close()


def _send_some(connection: _Connection) -> bool:
    """What its socket takes at once. Was that all?"""
    try:
        while connection.unsent:
            sent = connection.socket.send(connection.unsent)
            del connection.unsent[:sent]
    except BlockingIOError:
        return False
    return True


def _listen(path: Path) -> socket.socket:
    """Bind under another name and rename it into place, so that a process that finds the path can connect."""
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
