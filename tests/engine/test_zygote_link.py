"""A supervisor's connection to a zygote: whether it ended because the zygote has gone."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sluice_engine.supervisor.zygote_link import ZygoteLink

DOUBLE = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
connection.recv(65536)
connection.sendall(b'{"pid": 4')
time.sleep(0.1)
connection.sendall(b'2}\\n' + sys.argv[2].encode())
if sys.argv[3] == "closes":
    connection.close()
time.sleep(600)
"""


@asynccontextmanager
async def zygote(path: Path, last: str, then: str) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = ("-c", DOUBLE, str(path), last, then)
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("last", "status"), [('{"exit": -9}\n', -9), ("", None)])
async def test_the_end_of_a_rank_is_not_that_of_its_zygote(tmp_path: Path, last: str, status: int | None) -> None:
    pids: list[int] = []
    async with zygote(tmp_path / "z", last, "closes") as process:
        link = await ZygoteLink.connect(str(tmp_path / "z"))
        assert link.pid == process.pid
        assert await link.run_rank(Path("/spec"), 0, 0, pids.append) == status
        assert not await link.has_died(0.2)
        link.close()
    assert pids == [42]


@pytest.mark.timeout(60)
async def test_a_zygote_that_is_killed_has_died(tmp_path: Path) -> None:
    heard = asyncio.Event()
    async with zygote(tmp_path / "z", "", "stays") as process:
        link = await ZygoteLink.connect(str(tmp_path / "z"))
        running = asyncio.create_task(link.run_rank(Path("/spec"), 0, 0, lambda pid: heard.set()))
        await heard.wait()
        process.kill()
        assert await running is None
        assert await link.has_died(20)
        link.close()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    async def once() -> None:
        async with zygote(tmp_path / "z", "", "closes"):
            link = await ZygoteLink.connect(str(tmp_path / "z"))
            gc.collect()  # what other tests left is not closed between the two counts
            before = descriptors()
            link.close()
            assert descriptors() == before - 2

    asyncio.run(once())
