"""The workers of the operator: a ModelDeployment that cannot be looked at to the end holds up no other, nor itself."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from sluice_operator.reconcile import Reconciler
from sluice_operator.work import Work

HUNG, WELL = ("ns", "hung"), ("ns", "well")


class Cluster:
    """Every ModelDeployment is gone but HUNG, about which the answer never comes."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def find(self, path: str) -> Any:
        self.asked.append(path.rpartition("/")[2])
        if self.asked[-1] == HUNG[1]:
            await asyncio.get_running_loop().create_future()


async def test_a_look_that_never_ends_is_cut_off_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    cluster: Any = Cluster()
    nobody: Any = None
    work = Work(asyncio.get_running_loop().time)
    reconciler = Reconciler(cluster, nobody, nobody, nobody, work, bound_s=0.1)
    working = asyncio.create_task(reconciler.run())
    try:
        work.add(HUNG, 0)
        async with asyncio.timeout(30):
            while reconciler.counts.failures["Stuck"] < 2:
                work.add(WELL, 0)
                await asyncio.sleep(0.02)
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    assert cluster.asked.count("hung") >= 2
    assert cluster.asked.count("well") > 5
    assert set(reconciler.counts.failures) == {"Stuck"}
    assert "ns/hung: a reconcile that takes longer than 0 s is cut off" in caplog.text
    assert "in find" in caplog.text  # where it stood
