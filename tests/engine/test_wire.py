"""Frames on a stream socket: whatever the pieces it comes in, the same frames come out."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sluice_engine.wire import MAX_FRAME_BYTES, FrameError, FrameSocket, pack


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        yield left, right


Pair = tuple[socket.socket, socket.socket]


def test_frames_that_came_together_come_out_one_by_one(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(pack(b"one") + pack(b"") + pack(b"three"))
    theirs.close()
    frames = FrameSocket(ours)
    assert [frames.receive() for _ in range(4)] == [b"one", b"", b"three", None]


def test_a_frame_that_comes_byte_by_byte_is_one_frame(pair: Pair) -> None:
    ours, theirs = pair
    frames = FrameSocket(ours)
    wire = pack(b"slow") + pack(b"next")
    for byte in wire[:-1]:
        theirs.sendall(bytes([byte]))
    assert frames.receive() == b"slow"
    theirs.sendall(wire[-1:])
    assert frames.receive() == b"next"


def test_a_stream_that_ends_inside_a_frame_is_an_error(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(pack(b"whole") + pack(b"cut short")[:-1])
    theirs.close()
    frames = FrameSocket(ours)
    assert frames.receive() == b"whole"
    with pytest.raises(FrameError, match="ended"):
        frames.receive()


def test_a_length_that_no_frame_has_is_an_error(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(FrameError, match="longer"):
        FrameSocket(ours).receive()


def test_waiting_ends_with_the_time_or_with_a_whole_frame(pair: Pair) -> None:
    ours, theirs = pair
    ours.settimeout(None)
    frames = FrameSocket(ours)
    assert not frames.wait(10)
    wire = pack(b"late")
    theirs.sendall(wire[:-1])
    assert not frames.wait(10)
    theirs.sendall(wire[-1:])
    assert frames.wait(10_000)
    assert frames.receive() == b"late"
    theirs.close()
    assert frames.wait(10_000)
    assert frames.receive() is None
