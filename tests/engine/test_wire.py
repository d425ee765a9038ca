"""Frames between processes: the time to wait is kept whatever else comes in between."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sluice_engine import wire


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.timeout(60)
def test_frames_of_any_length_come_whole_and_in_order_however_they_are_cut(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Several at once, one in many pieces, longer than what is received at once, none at all in it."""
    chance = random.Random(5)
    sizes = [0, 1, 3, 4, 5, *(chance.choice([0, 17, 900, 70_000]) for _ in range(200)), 700_000, 0, 300_000, 1, 262_144]
    sent = [chance.randbytes(size) for size in sizes]

    def send() -> None:
        stream = b"".join(map(wire.pack, sent))
        at = 0
        while at < len(stream):
            size = chance.choice([1, 3, 5, 1000, 400_000])
            pair[1].sendall(stream[at : at + size])
            at += size
        pair[1].close()

    sender = threading.Thread(target=send)
    sender.start()
    frames = wire.FrameSocket(pair[0])
    received = []
    while frames.wait(10_000) and (frame := frames.receive()) is not None:
        received.append(bytes(frame))
    sender.join()
    assert received == sent


def test_a_frame_that_is_cut_short_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(wire.pack(b"whole") + wire.pack(b"cut short")[:-1])
    pair[1].close()
    frames = wire.FrameSocket(pair[0])
    assert frames.receive() == b"whole"
    with pytest.raises(wire.FrameError, match="ended after 12 bytes"):
        frames.receive()


def test_a_frame_that_is_too_long_is_an_error_before_it_has_come(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(wire.FrameError, match="longer than"):
        wire.FrameSocket(pair[0]).receive()


def test_signals_do_not_lengthen_the_wait_for_a_frame() -> None:
    """A rank ticks when its wait is over: asked for its stacks again and again, it must go on ticking."""
    ours, theirs = socket.socketpair()
    frames = wire.FrameSocket(ours)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        began = time.monotonic()
        assert not frames.wait(300)
        assert time.monotonic() - began < 10  # with a time-out of the socket's own it would never end
        theirs.sendall(wire.pack(b"hello"))
        assert frames.wait(10_000)
        assert frames.receive() == b"hello"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        ours.close()
        theirs.close()
