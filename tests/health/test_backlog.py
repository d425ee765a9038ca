"""Connections that nobody accepts are seen in the kernel's tables; those of a neighbour, and those that pass through a
full queue, accuse nobody."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice_runtime.health import backlog
from sluice_runtime.health.backlog import AcceptMarks, look_at_door
from sluice_runtime.health.reading import Copy, RowReading
from sluice_runtime.health.recorder import Recorder, RecorderNames

BACKLOG = 4
SERVER = f"""
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 0), family=family, backlog={BACKLOG}, dualstack_ipv6=":" in sys.argv[1])
print(server.getsockname()[1], flush=True)
for line in sys.stdin:
    taken = server.accept()[0]
    if line != "keep\\n":
        taken.close()
    print("accepted", flush=True)
"""


class Server:
    """A process that listens, and accepts when it is told to."""

    def __init__(self, host: str) -> None:
        argv = [sys.executable, "-c", SERVER, host]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def accept(self, keep: bool = False) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("keep\n" if keep else "close\n")
        self.process.stdin.flush()
        assert self._answer() == "accepted"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.end()


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for client in made:
        client.close()


class Watched:
    """What the recorder says of the server's row after each look."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.recorder = Recorder.create(folder / "recorder", RecorderNames(("leader.accept",)))
        self.marks = AcceptMarks(self.recorder.row("leader.accept"), lambda: server.process.pid)
        self.marks.listen(server.port)

    def look(self, times: int = 1) -> RowReading:
        for _ in range(times):
            self.marks.look()
        return Copy(self.recorder.view).rows()["leader.accept"]


@pytest.fixture
def watched(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(backlog, "LOOK_S", 0.0)
    return Watched(server, tmp_path)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def knock(port: int, clients: list[socket.socket], times: int) -> None:
    clients += [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(times)]


def test_who_waits_is_counted_and_who_is_accepted_is_not(server, watched, clients) -> None:
    knock(server.port, clients, 3)
    until(lambda: watched.look().pending == 3)
    before = watched.look()
    stuck = watched.look(5)
    assert (stuck.pending, stuck.progress) == (3, before.progress)
    for _ in range(3):
        server.accept()
    free = watched.look()
    assert (free.pending, free.progress) == (0, before.progress + 1)


@pytest.mark.parametrize("server", ["127.0.0.1"], indirect=True)
def test_who_waits_at_a_neighbour_of_the_same_port_is_not_ours(server, watched, clients) -> None:
    """Another process at another address of this machine. A connection that is made has arrived in its queue."""
    with socket.create_server(("127.0.0.2", server.port)) as neighbour:
        clients += [socket.create_connection(neighbour.getsockname(), timeout=10) for _ in range(2)]
        until(lambda: look_at_door(os.getpid(), [server.port]).waiting == 2)
        assert watched.look(3).pending == 0
        knock(server.port, clients, 1)
        until(lambda: watched.look().pending == 1)


def test_a_full_queue_that_is_drained_and_filled_again_moves(server, watched, clients) -> None:
    knock(server.port, clients, BACKLOG + 1)
    until(lambda: watched.look().pending == BACKLOG + 1)
    last = watched.look(2).progress
    for _ in range(3):
        server.accept()
        knock(server.port, clients, 1)
        until(lambda: watched.look().pending == BACKLOG + 1)
        now = watched.look(2).progress
        assert now > last
        last = now


def test_a_connection_that_is_held_says_that_it_was_accepted(server, watched, clients) -> None:
    """More came than were accepted: the queue has grown all the same."""
    knock(server.port, clients, 2)
    until(lambda: watched.look().pending == 2)
    last = watched.look(2).progress
    server.accept(keep=True)
    knock(server.port, clients, 2)
    until(lambda: watched.look().pending == 3)
    assert watched.look(2).progress > last


def test_a_full_queue_whose_clients_give_up_does_not_move(server, watched, clients) -> None:
    """Those that reset stay in the queue though the table of connections has lost them; others may come in no more."""
    knock(server.port, clients, BACKLOG + 1)
    until(lambda: watched.look().pending == BACKLOG + 1)
    last = watched.look(2).progress
    for client in clients[:3]:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    for _ in range(3):
        late = socket.socket()
        late.setblocking(False)
        late.connect_ex(("127.0.0.1", server.port))
        clients.append(late)
        told = watched.look(2)
        assert (told.pending, told.progress) == (BACKLOG + 1, last)


def test_a_queue_that_fills_up_does_not_move(server, watched, clients) -> None:
    knock(server.port, clients, 1)
    until(lambda: watched.look().pending == 1)
    last = watched.look(2).progress
    for waiting in range(2, BACKLOG + 2):
        knock(server.port, clients, 1)
        until(lambda expected=waiting: watched.look().pending == expected)
        assert watched.look(2).progress == last


def test_of_a_process_that_is_gone_nobody_waits(server, watched, clients) -> None:
    knock(server.port, clients, 1)
    until(lambda: watched.look().pending == 1)
    server.process.kill()
    server.process.wait(10)
    assert watched.look().pending == 0


def test_a_table_that_is_not_there_accuses_nobody(server) -> None:
    door = look_at_door(server.process.pid, [server.port], [Path("/proc/net/nothing-of-the-kind")])
    assert (door.waiting, door.queued, door.taken) == (0, frozenset(), frozenset())


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def listener(waiting: int) -> str:
    return f"   0: 0100007F:1F90 00000000:0000 0A 00000000:{waiting:08X} 00:00000000 00000000     0        0 7\n"


@pytest.mark.parametrize(("waiting", "is_read"), [(0, False), (1, True)])
def test_connections_are_read_only_where_somebody_waits(tmp_path, waiting, is_read) -> None:
    """The kernel makes a line as it is read: those of all connections of a busy machine are not for nothing."""
    table = tmp_path / "tcp"
    connection = "   1: a line that cannot be understood\n"
    table.write_text(HEAD + listener(waiting) + connection)
    if is_read:
        with pytest.raises(ValueError, match="unpack"):
            look_at_door(os.getpid(), [0x1F90], [table])
    else:
        assert look_at_door(os.getpid(), [0x1F90], [table]).waiting == 0


def test_the_row_is_never_told_as_starting(server, watched, clients) -> None:
    """It begins once its process has started."""
    assert watched.look().phase.name == "IDLE"
    knock(server.port, clients, 1)
    until(lambda: watched.look().phase.name == "ACCEPTING")
