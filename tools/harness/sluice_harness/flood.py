"""Floods: of connections that say nothing, or half of something, for a moment, and come again; of lines."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

HELD_S = 0.3
CONNECT_S = 2.0
HALF_A_REQUEST = b"GET /livez HTTP/1.1\r\nHost: "


class Flood:
    """`number` connections to one port at a time, until it is over. `opened`: so many in all."""

    def __init__(self, host: str, port: int, number: int) -> None:
        self.opened = 0
        self._address, self._number = (host, port), number
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"flood-{port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.is_set():
            held = [self._open(at) for at in range(self._number)]
            self._over.wait(HELD_S)
            for sock in held:
                sock.close()

    def _open(self, at: int) -> socket.socket:
        """One whose place in the queue is taken by others is part of the flood too."""
        sock = socket.socket()
        sock.settimeout(CONNECT_S)
        with contextlib.suppress(OSError):
            sock.connect(self._address)
            self.opened += 1
            if at % 2:
                sock.sendall(HALF_A_REQUEST)
        return sock


# Standard streams by their names.
OUTLETS = {"stdout": 1, "stderr": 2}
LINES = b"\n" * 65536


class Babble:
    """The shortest lines into a process's stdout or stderr, as fast as they are taken, as a library in it would."""

    def __init__(self, pid: int, outlet: int) -> None:
        self.written = 0
        self._fd = os.open(f"/proc/{pid}/fd/{outlet}", os.O_WRONLY | os.O_NONBLOCK)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"babble-{pid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)
        os.close(self._fd)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.written += os.write(self._fd, LINES)
            except BlockingIOError:
                self._over.wait(0.001)
            except BrokenPipeError:
                return
