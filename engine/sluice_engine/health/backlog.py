"""Connections that wait at a listening socket: whoever does not accept any more is seen from outside, by the kernel's
own count, without asking him anything."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from sluice_engine.health.recorder import Row

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"
LOOK_S = 1.0


def waiting(ports: Iterable[int], tables: Iterable[Path] = TABLES) -> int:
    """Of all listening sockets at these ports of this network namespace. 0 where the kernel does not tell."""
    wanted = {f"{port:04X}" for port in ports}
    return sum(_waiting(path, wanted) for path in tables)


def _waiting(table: Path, ports: set[str]) -> int:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return 0
    found = 0
    for line in lines:
        _, local, _, state, queues, *_ = line.split()
        if state == _LISTEN and local.rpartition(":")[2] in ports:
            found += int(queues.partition(":")[2], 16)
    return found


class AcceptMarks:
    """A process's row about its listening sockets, written by its supervisor. Progress is a look that found nobody
    waiting, or fewer than the one before."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._last = 0
        self._progress = 0
        self._next_look = 0.0
        self.ports: tuple[int, ...] = ()

    def listen(self, *ports: int) -> None:
        """From now on the process accepts at these."""
        self._row.begin()
        self.ports = ports

    def look(self) -> None:
        """At most once in LOOK_S: the kernel's tables hold every connection of the machine."""
        now = time.monotonic()
        if not self.ports or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        count = waiting(self.ports)
        if count == 0 or count < self._last:
            self._progress += 1
        self._last = count
        self._row.progress(self._progress)
        self._row.pending(count)
        self._row.doing(f"{count} connections wait to be accepted" if count else "")
