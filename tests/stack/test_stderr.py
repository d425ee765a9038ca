"""Logs go to somebody who may stall, such as a runtime whose disk is full: nobody who serves waits for him."""

from __future__ import annotations

import fcntl
import json
import os
import select
from pathlib import Path

import pytest
from stack_double import RunningStack

from sluice_faults import Action, Order, place

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PIPE_BYTES = 4096
# Each of them is some hundred bytes of log in the gateway and in the leader.
REQUESTS = 60


def test_requests_are_served_while_nobody_reads_what_any_of_the_processes_says() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with RunningStack(stderr=writing, spec={"health": {"floor_s": 5.0, "quarantine_s": 0}}) as stack:
        (engine,) = stack.start("unified")
        stack.start_gateway(health={"floor_s": 5.0, "quarantine_s": 0})
        for number in range(REQUESTS):
            assert len(stack.chat(f"{number}: hello", 3).text()) == 3
        assert not select.select([], [writing], [], 0)[1], "the pipe is not full: the test tests nothing"
        assert engine.process.popen.poll() is None
        assert not [event for event in engine.process.events if event["event"] == "incident"]
    os.close(reading)
    os.close(writing)


def test_every_line_is_json_where_that_is_asked_for_also_a_traceback_of_a_rank(tmp_path: Path) -> None:
    place(tmp_path, "rank.device", Order(Action.RAISE, error="ValueError", text="one\ntwo"))
    log = tmp_path / "stderr"
    with log.open("wb") as file, RunningStack(stderr=file.fileno()) as stack:
        more = {"log": "json", "faults": str(tmp_path), "health": {"quarantine_s": 0}}
        process = stack.spawn("unified", "unified-0", more)
        assert process.popen.wait(60) == 1
        process.end()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    said = [record["text"] for record in records if record.get("process") == "rank0"]
    begins = said.index("Traceback (most recent call last):")
    assert said[begins + 1].startswith("  File ")
    assert said[-2:] == ["ValueError: one", "two"]
    assert {record["service"] for record in records if "process" in record} == {"unified-0"}
