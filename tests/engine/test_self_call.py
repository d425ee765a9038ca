"""A process that calls itself over gRPC, and what its row says when gRPC's threads stand still."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from pathlib import Path

from sluice_runtime.health.layout import State
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.rpc.self_call import SelfCall

NAME = "leader.grpc"


def row_of(recorder):
    return Copy(recorder.view).rows()[NAME]


async def calling(recorder, every_s=0.01):
    self_call = SelfCall(recorder.row(NAME), every_s)
    await self_call.open()
    await self_call.run()


async def until(is_so):
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - stored in shared memory
            await asyncio.sleep(0.01)


async def test_each_answer_is_progress_and_the_end_is_told(tmp_path: Path):
    recorder = Recorder.create(tmp_path / "recorder", RecorderNames((NAME,)))
    task = asyncio.create_task(calling(recorder))
    await until(lambda: row_of(recorder).progress > 5)
    assert row_of(recorder).state is State.RUNNING
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert row_of(recorder).state is State.ENDED


async def test_two_of_them_do_not_meet(tmp_path: Path):
    recorders = [Recorder.create(tmp_path / name, RecorderNames((NAME,))) for name in ("a", "b")]
    tasks = [asyncio.create_task(calling(recorder)) for recorder in recorders]
    await until(lambda: all(row_of(recorder).progress > 5 for recorder in recorders))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_a_descriptor_left_it_goes_on(tmp_path: Path):
    """It has its connection from the beginning: who accepts nobody any more is named for that, and does not die."""
    recorder = Recorder.create(tmp_path / "recorder", RecorderNames((NAME,)))
    task = asyncio.create_task(calling(recorder))
    await until(lambda: row_of(recorder).progress > 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    before = row_of(recorder).progress
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        await until(lambda: row_of(recorder).progress > before + 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


FROZEN = """
import asyncio, os, sys
from pathlib import Path
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.rpc.self_call import SelfCall
from sluice_faults import Action, Order, arm, place

NAME = "leader.grpc"

async def main():
    folder = Path(sys.argv[1])
    recorder = Recorder.create(folder / "recorder", RecorderNames((NAME,)))
    row = lambda: Copy(recorder.view).rows()[NAME]
    self_call = SelfCall(recorder.row(NAME), every_s=0.05)
    await self_call.open()
    calling = asyncio.create_task(self_call.run())
    while row().progress < 3:
        await asyncio.sleep(0.01)
    while row().pending:
        await asyncio.sleep(0.001)
    place(folder, "leader.turn", Order(Action.FREEZE_RPC))
    arm(str(folder)).reach("leader.turn")
    before, turns = row().progress, 0
    while turns < 100:
        await asyncio.sleep(0.01)
        turns += 1
    assert (row().pending, row().progress) == (1, before), row()
    os._exit(0)  # who stands still cannot be waited for

asyncio.run(main())
"""


def test_grpcs_threads_stand_still_and_the_loop_goes_on(tmp_path: Path):
    told = subprocess.run([sys.executable, "-c", FROZEN, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
