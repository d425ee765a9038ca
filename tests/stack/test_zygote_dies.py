"""An engine with a zygote of its own, as in a pod: when that dies, it is named, not the rank that went with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from stack_double import RunningStack

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"


@pytest.mark.parametrize(("dies", "reason"), [("zygote", "ZygoteDead"), ("rank0", "RankDead")])
def test_who_died_first_is_named(dies, reason):
    with RunningStack(model=str(MODEL), spec={"health": {"quarantine_s": 0.0, "start_s": 100.0}}) as stack:
        (engine,) = stack.start("unified")
        rank = engine.pid("rank")
        os.kill(rank if dies == "rank0" else psutil.Process(rank).ppid(), signal.SIGKILL)
        assert engine.process.popen.wait(60) == 1
        incident = next(event for event in engine.process.events if event["event"] == "incident")
        assert (incident["reason"], incident["culprit"]) == (reason, dies)
