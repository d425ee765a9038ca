"""Connections that wait at a process's listening sockets. A process that does not accept any more is seen from outside,
in the kernel's own tables, without its help. Sockets of other processes at the same port number do not count."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sluice_runtime.health.layout import Phase
from sluice_runtime.health.recorder import Row

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LOOK_S = 1.0
_LISTEN = "0A"
# A connection that was not accepted has no inode and is in one of these (established, or its client has ended it);
# closed ones have none either, and are in others.
_QUEUED = ("01", "08")
_NO_INODE = "0"


@dataclass(frozen=True, slots=True)
class Door:
    """One look at a process's listening sockets. `waiting`: how many connections were not accepted yet, by the kernel's
    count. `queued`: those of them that the table names (not one that its client has reset). `taken`: inodes of accepted
    ones."""

    waiting: int = 0
    queued: frozenset[tuple[str, str]] = frozenset()
    taken: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Socket:
    local: str
    remote: str
    state: str
    waiting: int
    inode: str


def look_at_door(pid: int, ports: Iterable[int], tables: Iterable[Path] = TABLES) -> Door:
    """Of the sockets that process `pid` listens with at these ports of this network namespace. An empty one where the
    kernel does not tell, or where no connection waits: then nothing else is looked at."""
    wanted = {f"{port:04X}" for port in ports}
    doors = [_look(pid, _sockets(table, wanted)) for table in tables]
    return Door(
        sum(door.waiting for door in doors),
        frozenset().union(*(door.queued for door in doors)),
        frozenset().union(*(door.taken for door in doors)),
    )


def _look(pid: int, sockets: list[_Socket]) -> Door:
    listeners = [socket for socket in sockets if socket.state == _LISTEN]
    if not any(listener.waiting for listener in listeners):
        return Door()
    held = _inodes(pid)
    own = {listener.local for listener in listeners if listener.inode in held}
    others = {listener.local for listener in listeners} - own
    everywhere = {local.rpartition(":")[2] for local in own if not local.rpartition(":")[0].strip("0")}

    def is_ours(local: str) -> bool:
        return local in own or (local not in others and local.rpartition(":")[2] in everywhere)

    ours = [socket for socket in sockets if socket.state != _LISTEN and is_ours(socket.local)]
    return Door(
        sum(listener.waiting for listener in listeners if listener.inode in held),
        frozenset((s.local, s.remote) for s in ours if s.inode == _NO_INODE and s.state in _QUEUED),
        frozenset(s.inode for s in ours if s.inode in held),
    )


def _sockets(table: Path, ports: set[str]) -> list[_Socket]:
    """Those at these local ports; listening ones come first. Where no connection waits at one of these, only they: the
    kernel makes the table as it is read, and the rest of it, every connection of the machine, takes milliseconds."""
    found: list[_Socket] = []
    try:
        with table.open() as lines:
            for line in islice(lines, 1, None):
                fields = line.split()
                if fields[3] != _LISTEN and not any(socket.waiting for socket in found):
                    break
                _, local, remote, state, queues, _, _, _, _, inode, *_ = fields
                if local.rpartition(":")[2] in ports:
                    found.append(_Socket(local, remote, state, int(queues.partition(":")[2], 16), inode))
    except OSError:
        return []
    return found


def _inodes(pid: int) -> set[str]:
    """Of all sockets that the process holds; none of one that is gone or not ours to look at."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if told := re.match(r"socket:\[(\d+)\]", str(entry.readlink())):
                    found.add(told[1])
    return found


def has_accepted(looks: tuple[Door, Door, Door]) -> bool:
    """Of three looks in order. A full queue that is drained and filled again has the same length each time, so length
    alone proves nothing; these do:

    No connection waits, or fewer than before. A connection is held now that was not. Or more have come into the queue
    than it has grown by: all that came between the first two looks are in it at the third, but for those that were
    accepted (one that its client has reset stays in it, unnamed, until then). The kernel's count of a look is read
    before its names, so the growth is measured around them.
    """
    first, second, third = looks
    if third.waiting == 0 or third.waiting < second.waiting or third.taken - second.taken:
        return True
    return len(second.queued - first.queued) > third.waiting - first.waiting


class AcceptMarks:
    """A process's row about its listening sockets, written by its supervisor. Progress is a look that proves that
    a connection was accepted, or that none waits. `pid`: of the process; None while it does not live."""

    def __init__(self, row: Row, pid: Callable[[], int | None]) -> None:
        self._row = row
        self._pid = pid
        self._looks = (Door(), Door())
        self._progress = 0
        self._next_look = 0.0
        self.ports: tuple[int, ...] = ()

    def listen(self, *ports: int) -> None:
        """From now on the process accepts at these."""
        self._row.begin(Phase.IDLE)
        self.ports = ports

    def look(self) -> None:
        """At most once in LOOK_S: where a connection waits, the kernel's tables are read with every connection in
        them."""
        now = time.monotonic()
        if not self.ports or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        pid = self._pid()
        door = Door() if pid is None else look_at_door(pid, self.ports)
        if has_accepted((*self._looks, door)):
            self._progress += 1
        self._looks = (self._looks[1], door)
        self._row.progress(self._progress)
        self._row.pending(door.waiting)
        self._row.enter(Phase.ACCEPTING if door.waiting else Phase.IDLE)
        self._row.doing(f"{door.waiting} connections wait to be accepted" if door.waiting else "")
