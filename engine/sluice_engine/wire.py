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
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()

    def wait(self, timeout_ms: int) -> bool:
        """Whether `receive` would find something (the end of the stream too) within the time."""
        return bool(self._frames or self._poll.poll(timeout_ms))

    def receive(self) -> bytes | None:
        """None at the end of the stream. Raises FrameError on a frame that is cut short or too long."""
        while not self._frames:
            data = self._sock.recv(_RECEIVE)
            if not data:
                if self._buffer:
                    raise FrameError(f"the stream ended after {len(self._buffer)} bytes of a frame")
                return None
            self._buffer += data
            self._frames.extend(split(self._buffer))
        return self._frames.popleft()


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
