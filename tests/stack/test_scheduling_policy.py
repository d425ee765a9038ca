"""Which threads of the real processes take the CPU when they are woken (docs/adr/0103)."""

from __future__ import annotations

import os

import psutil
import pytest
from stack_double import RunningStack

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def policies(pid: int) -> dict[int, int]:
    """By thread."""
    return {thread.id: os.sched_getscheduler(thread.id) for thread in psutil.Process(pid).threads()}


def test_only_supervisors_and_step_loops_take_it() -> None:
    with RunningStack() as stack:
        engines = stack.start("prefill", "decode")
        stack.start_gateway(health={"floor_s": 30.0})
        assert stack.chat("hello", max_tokens=4).text()
        for engine in engines:
            assert set(policies(engine.supervisor).values()) == {os.SCHED_OTHER}
            leader = policies(engine.pid("leader"))
            assert leader.pop(engine.pid("leader")) == os.SCHED_OTHER
            assert leader
            assert set(leader.values()) == {os.SCHED_BATCH}
            for what in ("rank", "sidecar"):
                assert set(policies(engine.pid(what)).values()) == {os.SCHED_BATCH}, what
        gateways = [p for p in psutil.Process().children(recursive=True) if "sluice_gateway" in p.cmdline()]
        assert [set(policies(p.pid).values()) for p in gateways] == [{os.SCHED_BATCH}]
