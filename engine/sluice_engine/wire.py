"""Frames on a Unix stream socket between processes of one engine: 4 bytes of length, then the payload."""

from __future__ import annotations

import select
import socket
import struct
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
    """Frames from a blocking socket, as many in one system call as are there. It must be the only reader."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._wake: int | None = None
        self._ended = False
        # What has come and was not received yet is begin..end of it.
        self._buffer = memoryview(bytearray(_RECEIVE))
        self._begin = self._end = 0

    def wake_by(self, descriptor: int | None) -> None:
        """`wait` also returns when this descriptor is readable; None: no more."""
        if descriptor != self._wake:
            if self._wake is not None:
                self._poll.unregister(self._wake)
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
            self._wake = descriptor

    def wait(self, timeout_ms: int) -> bool:
        """Whether a frame or the end of the stream is there, within the time since the last byte came; signals that
        come meanwhile do not lengthen it, as they would a socket's own time-out. Raises FrameError."""
        while not self._ended and (missing := self._missing()) > 0:
            ready = [descriptor for descriptor, _ in self._poll.poll(timeout_ms)]
            if self._sock.fileno() not in ready:
                return False
            self._read(missing)
        return True

    def receive(self) -> memoryview | None:
        """The next frame, good until the next call of either; None at the end of the stream. Raises FrameError on one
        that is cut short or too long."""
        while (missing := self._missing()) > 0:
            if self._ended:
                return None
            self._read(missing)
        start = self._begin + _LENGTH.size
        self._begin = start + _check(self._buffer, self._begin)
        return self._buffer[start : self._begin]

    def _missing(self) -> int:
        """Bytes, at least, to the end of the first frame; 0 or less: it is there."""
        have = self._end - self._begin
        return _LENGTH.size - have + (_check(self._buffer, self._begin) if have >= _LENGTH.size else 0)

    def _read(self, missing: int) -> None:
        self._make_room(missing)
        count = self._sock.recv_into(self._buffer[self._end :])
        if count:
            self._end += count
        elif self._end > self._begin:
            raise FrameError(f"the stream ended after {self._end - self._begin} bytes of a frame")
        else:
            self._ended = True

    def _make_room(self, wanted: int) -> None:
        """For as many bytes behind what is there. A buffer that was made for a long frame is not kept."""
        left = self._buffer[self._begin : self._end]
        if not left and len(self._buffer) == _RECEIVE:
            self._begin = self._end = 0
        elif not left or len(self._buffer) - self._end < wanted:
            fresh = bytearray(max(_RECEIVE, len(left) + wanted))
            fresh[: len(left)] = left
            self._buffer, self._begin, self._end = memoryview(fresh), 0, len(left)


def _check(buffer: bytearray | memoryview, start: int) -> int:
    """The length of the frame that begins there."""
    (length,) = _LENGTH.unpack_from(buffer, start)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    return int(length)


def split(buffer: bytearray) -> Iterator[bytes]:
    """Yield the whole frames at the beginning of `buffer` and remove them from it."""
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _check(buffer, 0)
        if len(buffer) < end:
            return
        frame = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield frame
