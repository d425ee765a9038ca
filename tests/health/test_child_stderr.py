"""Stderr of supervised children: whole lines in the log's form, and nobody waits for a reader."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import pytest

from sluice_protocol.service_spec import LogFormat
from sluice_runtime.process.child_stderr import MAX_LINE_BYTES, ChildStderr, passed_on
from sluice_runtime.process.processes import json_lines

pytestmark = pytest.mark.timeout(60)
DEADLINE_S = 30.0

TRACEBACK = """
import os, traceback
os.write(2, b'native code: no end of line')
os.write(2, b'\\n')
try:
    raise ValueError("one\\ntwo")
except ValueError:
    traceback.print_exc()
os.write(2, b'{"event": "already a record"}\\n' + b'the last, cut')
"""
FLOOD = """
import sys
from sluice_runtime.process.outlet import drop_what_nobody_reads
drop_what_nobody_reads()
for number in range(40_000):
    print("x" * 99, file=sys.stderr)
print("ready", flush=True)
sys.stdin.readline()
print("after", file=sys.stderr)
"""


async def start(code: str, said) -> tuple[asyncio.subprocess.Process, ChildStderr]:
    stderr = ChildStderr(said)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=pipe, stdout=pipe, stderr=stderr.child_fd
    )
    stderr.given()
    return process, stderr


@pytest.mark.process
@pytest.mark.parametrize("log_format", list(LogFormat))
async def test_every_line_of_a_traceback_comes_through_whole_and_in_json_it_parses(log_format, capfd):
    process, stderr = await start(TRACEBACK, passed_on(log_format, "decode-0", "rank0"))
    assert await process.wait() == 0
    stderr.close()
    lines = capfd.readouterr().err.splitlines()
    if log_format is LogFormat.JSON:
        records = [json.loads(line) for line in lines]
        assert records[-2] == {"event": "already a record"}
        ours = [record for record in records if "text" in record]
        assert {(r["process"], r["service"], r["level"], r["event"]) for r in ours} == {
            ("rank0", "decode-0", "warning", "stderr")
        }
        lines = [record.get("text", json.dumps(record)) for record in records]
    assert lines[:2] == ["native code: no end of line", "Traceback (most recent call last):"]
    assert lines[-4:] == ["ValueError: one", "two", '{"event": "already a record"}', "the last, cut"]


@pytest.mark.process
async def test_a_child_whose_supervisor_is_frozen_goes_on_and_says_what_it_lost():
    """The loop that would read the pipe is held up here, as a frozen supervisor's is."""
    said: list[bytes] = []
    process, stderr = await start(FLOOD, said.append)
    stderr._loop.remove_reader(stderr._fd)
    assert process.stdout is not None
    assert process.stdin is not None
    assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_S) == b"ready\n"
    assert not stderr._pass_on(DEADLINE_S)
    process.stdin.write(b"\n")
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    stderr.close()
    said = b"".join(said).splitlines(keepends=True)
    kept = [line for line in said if line == b"x" * 99 + b"\n"]
    told = [json.loads(line) for line in said if line.startswith(b"{")]
    assert said[-1] == b"after\n"
    assert told[-1]["event"] == "dropped"
    assert 0 < len(kept) < 40_000
    # A line that was cut counts as lost: its rest is.
    assert len(kept) + sum(record["writes"] for record in told) == 40_000


async def test_lines_that_come_one_after_another_are_passed_on_together_and_none_is_lost():
    said: list[bytes] = []
    stderr = ChildStderr(said.append)
    expected = b""
    for number in range(100):
        line = b"line %d\n" % number
        expected += line
        os.write(stderr.child_fd, line)
        await asyncio.sleep(0.001)
    async with asyncio.timeout(DEADLINE_S):
        while b"".join(said) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(said) < 50
    os.write(stderr.child_fd, b"and the last")
    stderr.close()
    assert said[-1] == b"and the last\n"


async def test_a_line_without_an_end_is_passed_on_in_pieces():
    said: list[bytes] = []
    stderr = ChildStderr(said.append)
    writing = stderr.child_fd
    for _ in range(3):
        os.write(writing, b"y" * MAX_LINE_BYTES)
        assert not stderr._pass_on(DEADLINE_S)
    stderr.close()
    assert b"".join(said).count(b"y") == 3 * MAX_LINE_BYTES
    assert max(map(len, b"".join(said).splitlines())) <= MAX_LINE_BYTES


class Turns:
    """The longest time that the loop had no turn for others."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.monotonic() - before)


def slowly(lines: bytes) -> None:
    """As a log's sink that is busy: a block of short lines would take seconds."""
    until = time.monotonic() + 0.0001 * lines.count(b"\n")
    while time.monotonic() < until:
        pass


async def test_who_writes_without_end_leaves_the_loop_to_others():
    """A library's error in a loop, and the supervisor answered no probe: the engine was killed for what it said."""
    stderr, turns = ChildStderr(slowly), Turns()
    os.write(stderr.child_fd, b"\n" * 60_000)
    others = asyncio.create_task(turns.run())
    await asyncio.sleep(0.5)
    others.cancel()
    assert 0.0 < turns.longest_s < 1.5  # 6 s for all of them
    began = time.monotonic()
    stderr.close()
    assert time.monotonic() - began < 5.0


async def test_what_a_child_said_last_is_passed_on_as_far_as_time_goes_and_the_rest_is_counted():
    said: list[bytes] = []

    def record(lines: bytes) -> None:
        said.append(lines)
        slowly(lines)

    stderr = ChildStderr(record)
    os.write(stderr.child_fd, b"\n" * 60_000 + b"cut")
    stderr.close()
    told = json.loads(said.pop())
    assert said
    assert (told["event"], told["bytes"] + len(b"".join(said))) == ("dropped", 60_003)


async def test_noise_on_stdout_leaves_the_loop_to_others_too():
    stream, turns = asyncio.StreamReader(), Turns()
    stream.feed_data(b"x\n" * 60_000)

    async def read() -> None:
        async for _ in json_lines(stream, slowly):
            pass

    others, reading = asyncio.create_task(turns.run()), asyncio.create_task(read())
    await asyncio.sleep(0.5)
    assert 0.0 < turns.longest_s < 1.5
    others.cancel()
    reading.cancel()
