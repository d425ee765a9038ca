"""What fails on the lease loop is that thread's end, and its row says so before its process is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.watched_rows import LEASE_THREAD, EngineReason, engine_rows, named_death
from sluice_protocol.generate import Role
from sluice_runtime.health.layout import State
from sluice_runtime.health.reading import Copy, Exit
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.verdict import Budgets
from sluice_runtime.health.watch import Watch


@pytest.mark.timeout(60)
async def test_a_callback_that_raises_is_named_as_the_lease_thread(tmp_path: Path) -> None:
    watched = engine_rows(Role.PREFILL, "stream")
    recorder = Recorder.create(tmp_path / "recorder", RecorderNames(tuple(row.name for row in watched)))
    loop = asyncio.get_running_loop()
    died: asyncio.Future[Exception] = loop.create_future()
    row = recorder.row(LEASE_THREAD.name)
    thread = LeaseThread(loop, Counter(), died.set_result, row)
    thread.start()
    thread.call(lambda: 1 // 0)
    assert isinstance(await asyncio.wait_for(died, 30), ZeroDivisionError)
    assert Copy(recorder.view).rows()[LEASE_THREAD.name].state is State.FAILED
    watch = Watch(recorder, watched, Budgets(), lambda: 0.0)
    watch.exited(named_death(Exit("leader", 1, "ZeroDivisionError", "integer division or modulo by zero")))
    told = watch.look()
    assert (told.reason, told.culprit) == (EngineReason.LEASE_THREAD_DEAD, LEASE_THREAD.name)
    assert "ZeroDivisionError" in told.detail
