"""Frames between processes: the time to wait is kept whatever else comes in between."""

from __future__ import annotations

import signal
import socket
import time

from sluice_engine import wire


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
