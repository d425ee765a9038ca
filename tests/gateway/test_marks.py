"""What the gateway stores in the flight recorder, and what the verdict makes of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sluice_gateway.status.marks import GatewayMarks
from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_MIRROR, GATEWAY_ROWS, GatewayReason
from sluice_runtime.health.layout import State
from sluice_runtime.health.reading import Copy, Reading, carry
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.verdict import Budgets, Kind, Verdict, verdict
from sluice_runtime.health.watched import Reason

REPORT = {"queued": 0, "running": 0, "counters": {}, "engines": []}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.create(tmp_path / "recorder", GATEWAY_KIND.recorded)


class Eye:
    """Looks at the recorder at moments of a clock of its own, as if every loop but what is tested turned."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: Reading | None = None

    def look(self, at_s: float) -> Verdict:
        rows = Copy(self._recorder.view).rows()
        rows["gateway.loop"] = replace(rows["gateway.loop"], ticks=int(at_s * 1000))
        after = Reading(at_s, rows)
        told = verdict(self._before or after, after, Budgets(floor_s=30.0, factor=1.0), GATEWAY_ROWS)
        self._before = carry(self._before, after, GATEWAY_ROWS)
        return told


async def test_a_prompt_that_the_pool_never_finishes_is_a_stuck_tokenizer(recorder: Recorder) -> None:
    marks, eye, released = GatewayMarks(recorder), Eye(recorder), threading.Event()
    marks.begin()
    task = asyncio.create_task(marks.tokenize(20_000, released.wait))
    await asyncio.sleep(0)
    assert [eye.look(at).kind for at in (0.0, 10.0)] == [Kind.PROGRESSING] * 2
    stuck = eye.look(31.0)
    assert (stuck.kind, stuck.reason, stuck.culprit) == (
        Kind.WEDGED,
        GatewayReason.TOKENIZER_STUCK,
        "gateway.tokenizer",
    )
    assert stuck.doing == "encoding: 1 prompts of 20000 characters"
    released.set()
    assert await task
    assert eye.look(32.0).kind is Kind.IDLE


async def test_a_long_prompt_has_the_time_that_its_length_takes(recorder: Recorder) -> None:
    marks, eye, released = GatewayMarks(recorder), Eye(recorder), threading.Event()
    marks.begin()
    task = asyncio.create_task(marks.tokenize(10_000_000, released.wait))
    await asyncio.sleep(0)
    assert [eye.look(at).is_fatal for at in (0.0, 31.0, 99.0, 101.0)] == [False, False, False, True]
    released.set()
    await task


async def test_a_client_that_goes_away_does_not_hide_a_stuck_thread(recorder: Recorder) -> None:
    marks, released = GatewayMarks(recorder), threading.Event()
    marks.begin()
    task = asyncio.create_task(marks.tokenize(20_000, released.wait))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert Copy(recorder.view).rows()["gateway.tokenizer"].pending == 1
    released.set()
    while Copy(recorder.view).rows()["gateway.tokenizer"].pending:  # noqa: ASYNC110 - stored by a callback
        await asyncio.sleep(0.001)


async def test_an_error_in_the_pool_is_progress_all_the_same(recorder: Recorder) -> None:
    marks = GatewayMarks(recorder)
    marks.begin()

    def refuse() -> None:
        raise ValueError("not UTF-8")

    with pytest.raises(ValueError, match="not UTF-8"):
        await marks.tokenize(20_000, refuse)
    row = Copy(recorder.view).rows()["gateway.tokenizer"]
    assert (row.pending, row.progress) == (0, 2)  # the next one is the oldest


async def test_a_prompt_that_is_stuck_is_not_hidden_by_others_that_move(recorder: Recorder) -> None:
    marks, stuck = GatewayMarks(recorder), threading.Event()
    marks.begin()
    hanging = asyncio.create_task(marks.tokenize(20_000, lambda: stuck.wait(30)))
    await asyncio.sleep(0)
    try:
        told = set()
        for _ in range(5):
            await marks.tokenize(20_000, lambda: None)
            row = Copy(recorder.view).rows()["gateway.tokenizer"]
            told.add((row.pending, row.progress))
        assert told == {(1, 1)}
    finally:
        stuck.set()
        await hanging
    assert Copy(recorder.view).rows()["gateway.tokenizer"].progress == 7


def test_a_choice_that_could_go_and_does_not_is_a_starved_queue(recorder: Recorder) -> None:
    marks, eye = GatewayMarks(recorder), Eye(recorder)
    marks.begin()
    for at in (0.0, 15.0, 31.0):
        marks.turn(2, 7, lambda: REPORT)
        told = eye.look(at)
    assert (told.kind, told.reason, told.pending) == (Kind.WEDGED, Reason.QUEUE_STARVED, 2)
    marks.turn(2, 8, lambda: REPORT)
    assert not eye.look(32.0).is_fatal


def test_the_report_is_mirrored_and_changes_of_engines_are_told_once(recorder: Recorder) -> None:
    marks = GatewayMarks(recorder)
    engine = {"role": "decode", "address": "a:1", "trouble": "NotConnected"}
    for trouble in ("NotConnected", "", ""):
        marks.turn(0, 0, lambda trouble=trouble: REPORT | {"engines": [engine | {"trouble": trouble}]})  # type: ignore[misc]
    marks.turn(0, 0, lambda: REPORT)
    copy = Copy(recorder.view)
    assert copy.mirror(GATEWAY_MIRROR).value == REPORT
    assert [event.text for event in copy.events()] == [
        "decode a:1: NotConnected",
        "decode a:1: usable",
        "decode a:1: left the fleet",
    ]


def test_a_large_fleet_in_trouble_fits_into_the_mirror(recorder: Recorder) -> None:
    marks = GatewayMarks(recorder)
    load = {
        "running": 1 << 31,
        "waiting": 1 << 31,
        "max_running": 1 << 31,
        "free_pages": 1 << 31,
        "total_pages": 1 << 31,
    }
    engine = {"role": "prefill", "address": "10.0.0.1:65535", "health": "http://10.0.0.1:65535", "trouble": "x" * 5000}
    marks.turn(0, 0, lambda: REPORT | {"engines": [engine | {"load": load, "pid": 1 << 22}] * 1000})
    told = Copy(recorder.view).mirror(GATEWAY_MIRROR).value
    assert told["queued"] == 0
    assert len(told["engines"]) == 64


def test_a_turn_that_fails_is_the_death_of_the_loop(recorder: Recorder) -> None:
    marks = GatewayMarks(recorder)
    marks.begin()
    marks.end(failed="a turn")
    assert Copy(recorder.view).rows()["gateway.loop"].state is State.FAILED
    told = Eye(recorder).look(0.0)
    assert (told.kind, told.reason, told.culprit) == (Kind.DEAD, Reason.THREAD_DEAD, "gateway.loop")
