"""A decode engine whose transport is being started again says so at once, and its requests wait instead of failing."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from stack_double import RunningStack

from sluice_launch.process import eventually, stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def test_a_request_outlasts_a_transport_that_takes_long_to_come_back():
    """Longer than readiness lasts: the next sidecar is stopped while it starts."""
    with RunningStack() as stack:
        decode = stack.start("prefill", "decode")[1]
        stack.start_gateway()
        os.kill(decode.pid("sidecar"), signal.SIGKILL)
        fresh = eventually(lambda: sidecar_pid(stack, decode.supervisor, decode.pid("sidecar")), "the next one starts")
        stop_process(fresh)
        waiting = stack.chat("are you there?", max_tokens=5)
        before = counted(decode)
        eventually(lambda: counted(decode) > before, "it was refused")
        # From then on the gateway sends nobody, and the request waits for a pair.
        eventually(lambda: decode.probe("/readyz")[0] == 503, "it is away for longer than a moment")
        assert decode.probe("/livez")[0] == 200
        os.kill(fresh, signal.SIGCONT)
        assert len(waiting.text()) == 5
        for engine in stack.engines.values():
            engine.settled()


def counted(decode) -> int:
    return int(decode.inspect()["counters"].get("transport_away", 0))


def sidecar_pid(stack, supervisor: int, before: int) -> int:
    for child in psutil.Process(supervisor).children():
        if child.pid != before and "sluice_engine.transfer.sidecar" in child.cmdline():
            return child.pid
    return 0
