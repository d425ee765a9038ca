"""A transport sidecar that is started again and hangs at its start: not ready meanwhile, and named in its budget."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from stack_double import RunningStack

from sluice_launch.process import eventually, stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def test_a_sidecar_that_hangs_at_its_second_start_is_named_and_nobody_is_sent_meanwhile():
    health = {"floor_s": 3.0, "start_s": 12.0, "quarantine_s": 0.0}
    with RunningStack(spec={"health": health}) as stack:
        (decode,) = stack.start("decode")
        os.kill(decode.pid("sidecar"), signal.SIGKILL)
        fresh = eventually(lambda: sidecar_pid(decode.supervisor, decode.pid("sidecar")), "the next one starts")
        stop_process(fresh)
        eventually(lambda: decode.probe("/readyz")[0] == 503, "it is not ready")
        assert decode.probe("/livez")[0] == 200
        assert decode.process.popen.wait(60) == 3
        incident = next(event for event in decode.process.events if event["event"] == "incident")
        assert (incident["reason"], incident["culprit"]) == ("TransferStalled", "sidecar")
        assert Path(next(event["path"] for event in decode.process.events if event["event"] == "evidence")).is_dir()


def sidecar_pid(supervisor: int, before: int) -> int:
    for child in psutil.Process(supervisor).children():
        if child.pid != before and "sluice_engine.transfer.sidecar" in child.cmdline():
            return child.pid
    return 0
