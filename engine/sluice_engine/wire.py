"""Frames on a Unix stream socket between processes of one engine: 4 bytes of length, then the payload."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
# A step record that binds a prompt of 1M tokens takes about 5 MiB.
MAX_FRAME_BYTES = 64 * 1024 * 1024


class FrameError(Exception):
    """The peer sent something that is no frame of ours."""


def pack(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def send_frame(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(pack(payload))


def receive_frame(sock: socket.socket) -> bytes | None:
    """None at the end of the stream. Raises FrameError on a frame that is cut short or too long."""
    head = _receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    payload = _receive_exactly(sock, _check(head))
    if payload is None:
        raise FrameError("the stream ended inside a frame")
    return payload


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        size = sock.recv_into(view[got:])
        if size == 0:
            if got:
                raise FrameError(f"the stream ended after {got} of {count} bytes")
            return None
        got += size
    return bytes(data)


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
