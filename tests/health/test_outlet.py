"""What a supervisor says where nobody reads: it goes on, and tells how much was lost."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

from sluice_runtime.process.outlet import Outlet

LINE = b"x" * 999 + b"\n"
DEADLINE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def in_time(work) -> None:
    """A thread of its own: what is tested is that it comes back."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it waits for a reader"


def test_nobody_reads_and_nobody_waits_and_the_loss_is_told(pipe) -> None:
    reading, writing = pipe
    outlet = Outlet(writing, most=500_000)
    in_time(lambda: [outlet.write(LINE) for _ in range(1000)])
    assert not outlet.settle(0.1)
    assert outlet.dropped >= 400
    read, kept = b"", LINE * (1000 - outlet.dropped)
    while len(read) < len(kept):
        read += os.read(reading, 1 << 20)
    assert outlet.settle(DEADLINE_S)
    outlet.write(b"last\n")
    assert outlet.settle(DEADLINE_S)
    while not read.endswith(b"last\n"):  # the notice of the loss may have come with what was kept
        read += os.read(reading, 1 << 20)
    assert read[: len(kept)] == kept  # whole lines, in order
    told, last = read[len(kept) :].splitlines()
    assert json.loads(told) == {"event": "dropped", "writes": outlet.dropped}
    assert last == b"last"
    os.close(reading)


def test_a_reader_that_has_gone_is_no_error(pipe) -> None:
    reading, writing = pipe
    os.close(reading)
    outlet = Outlet(writing)
    outlet.write(LINE)
    assert outlet.settle(DEADLINE_S)
