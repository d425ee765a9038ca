"""Frames on a Unix stream socket between processes of one engine: 4 bytes of length, then the payload."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
# A step record that binds a prompt of 1M tokens takes about 5 MiB.
MAX_FRAME_BYTES = 64 * 1024 * 1024
_RECEIVE = 1 << 18


class FrameError(Exception):
    """The peer sent something that is no frame of ours."""


def pack(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def send_frame(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(pack(payload))


class FrameSocket:
    """Frames from a blocking socket, as many in one system call as are there. Nobody else may read from it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._ended = False
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()

    def wait(self, timeout_ms: int) -> bool:
        """Whether a frame or the end of the stream is there, within the time since the last byte came; signals that
        come meanwhile do not lengthen it, as they would a socket's own time-out. Raises FrameError."""
        while not self._frames and not self._ended:
            if not self._poll.poll(timeout_ms):
                return False
            self._read()
        return True

    def receive(self) -> bytes | None:
        """None at the end of the stream. Raises FrameError on a frame that is cut short or too long."""
        while not self._frames:
            if self._ended:
                return None
            self._read()
        return self._frames.popleft()

    def _read(self) -> None:
        data = self._sock.recv(_RECEIVE)
        if data:
            self._buffer += data
            self._frames.extend(split(self._buffer))
        elif self._buffer:
            raise FrameError(f"the stream ended after {len(self._buffer)} bytes of a frame")
        else:
            self._ended = True


def _check(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    return int(length)


def split(buffer: bytearray) -> Iterator[bytes]:
    """Yield the whole frames at the beginning of `buffer` and remove them from it."""
    while len(buffer) >= _LENGTH.size:
        length = _check(bytes(buffer[: _LENGTH.size]))
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        frame = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield frame
