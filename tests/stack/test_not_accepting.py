"""Green while nobody gets in: a process without descriptors serves who is there and nobody else, and must be named."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest
from stack_double import RunningStack, send_signal

from sluice_launch.process import eventually, stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def close_the_door(pid: int) -> None:
    """No descriptor is left for another connection."""
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))


def test_a_leader_that_accepts_nobody_is_named_though_its_loops_turn() -> None:
    with RunningStack(spec={"health": {"floor_s": 3.0, "quarantine_s": 0}}) as stack:
        (engine,) = stack.start("unified")
        close_the_door(engine.pid("leader"))
        host, _, port = engine.address.rpartition(":")
        knocking = [socket.create_connection((host, int(port)), timeout=10) for _ in range(2)]
        incident = engine.process.wait_for("incident")
        assert (incident["reason"], incident["culprit"]) == ("NotAccepting", "leader.accept")
        assert engine.process.popen.wait(30) == 3
        for client in knocking:
            client.close()
        assert stack.forget(engine.name) == 3


def test_what_hangs_in_its_drain_is_told_whatever_the_floor_is() -> None:
    """With the budgets of production (30 s) the drain ends before any verdict would come."""
    with RunningStack(spec={"health": {"quarantine_s": 0}}) as stack:
        (engine,) = stack.start("unified")
        stop_process(engine.pid("leader"))
        send_signal(engine.supervisor, 15)
        incident = engine.process.wait_for("incident")
        assert (incident["reason"], incident["culprit"]) == ("DrainStalled", "leader.loop")
        eventually(lambda: engine.process.popen.poll() is not None, "it ends", 60.0)
        assert stack.forget(engine.name) == 3
