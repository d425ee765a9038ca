"""The sidecar's end of the leader's socket: reports are sent by who has them, and none is lost or out of order."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from sluice_engine.transfer.messages import (
    AskStats,
    Command,
    FrameReader,
    LaneReport,
    PullFailed,
    Report,
    SidecarHello,
    Ticked,
    decode_report,
    encode_frame,
)
from sluice_engine.transfer.poller import Poller
from sluice_engine.transfer.serve import LeaderServer

LIMIT_S = 20.0
HELLO = SidecarHello("nixl", "me.1", "me", b"", (), 1, LaneReport("cma", "cma", 1.0))


class Inbox:
    """A poller's, as far as the server looks."""

    turns = in_flight = 0

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self.commands.put(command)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.ends: list[str] = []
        self.inbox, self.wanted = Inbox(), True
        self.path = folder / "sidecar.sock"
        self.server = LeaderServer(self.path, HELLO, lambda reason, _: self.ends.append(reason))
        self.loop = threading.Thread(target=self._run)
        self.loop.start()
        self.leader = socket.socket(socket.AF_UNIX)
        self.leader.settimeout(LIMIT_S)
        self.leader.connect(str(self.path))
        self.frames = FrameReader()
        assert self.read(1) == [HELLO]

    def _run(self) -> None:
        self.server.run(cast(Poller, self.inbox), lambda: self.wanted)

    def lead(self) -> None:
        self.leader.sendall(encode_frame(AskStats()))
        assert self.inbox.commands.get(timeout=LIMIT_S) == AskStats()

    def read(self, count: int) -> list[Report]:
        """So many, ticks not counted."""
        reports: list[Report] = []
        while len(reports) < count:
            bodies = self.frames.feed(self.leader.recv(1 << 20))
            reports += [told for body in bodies if not isinstance(told := decode_report(body), Ticked)]
        return reports

    def close(self) -> None:
        self.wanted = False
        self.loop.join(LIMIT_S)
        assert not self.loop.is_alive()
        # Its process's end closes all this.
        for key in list(self.server._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.server._selector.close()
        os.close(self.server._wake)
        self.leader.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def failed(number: int, nbytes: int = 0) -> PullFailed:
    return PullFailed(f"lease-{number}", "Reason", "." * nbytes)


@pytest.mark.timeout(60)
def test_what_is_reported_before_anybody_leads_is_nobodys(rig: Rig) -> None:
    rig.server.emit([failed(0)])
    rig.lead()
    rig.server.emit([failed(1), failed(2)])
    assert rig.read(2) == [failed(1), failed(2)]


@pytest.mark.timeout(60)
def test_reports_that_the_socket_does_not_take_at_once_come_whole_and_in_order(rig: Rig) -> None:
    """Nobody waits for the leader meanwhile: all are emitted before it reads the first."""
    rig.lead()
    told: list[Report] = [failed(number, 100_000) for number in range(40)]
    for report in told:
        rig.server.emit([report])
    rig.server.emit([failed(40)])
    assert rig.read(41) == [*told, failed(40)]
    rig.server.emit([failed(41)])
    assert rig.read(1) == [failed(41)]


@pytest.mark.timeout(60)
def test_several_threads_report_whole_frames(rig: Rig) -> None:
    rig.lead()

    def report(first: int) -> None:
        for number in range(first, first + 200):
            rig.server.emit([failed(number, 3000)])

    threads = [threading.Thread(target=report, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    told = [cast(PullFailed, report) for report in rig.read(600)]
    for thread in threads:
        thread.join()
    numbers = [int(report.lease_id.removeprefix("lease-")) for report in told]
    assert all(report == failed(number, 3000) for report, number in zip(told, numbers, strict=True))
    for first in (0, 1000, 2000):
        assert [number for number in numbers if first <= number < first + 200] == list(range(first, first + 200))


@pytest.mark.timeout(60)
def test_a_leader_that_hung_up_is_met_by_the_loop_and_not_by_who_reports(rig: Rig) -> None:
    rig.lead()
    rig.leader.shutdown(socket.SHUT_RDWR)
    for number in range(20):
        rig.server.emit([failed(number, 1000)])
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(LIMIT_S)
        other.connect(str(rig.path))
        assert decode_report(FrameReader().feed(other.recv(1 << 16))[0]) == HELLO
        other.sendall(encode_frame(AskStats()))
        assert rig.inbox.commands.get(timeout=LIMIT_S) == AskStats()  # it leads now
    assert not rig.ends  # the first had asked for no pull
