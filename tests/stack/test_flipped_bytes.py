"""One bit changes in the cache of a real engine: the next answer is right, and the record is named and quarantined."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_memory import EngineMemory
from stack_double import ChatStream, EngineProcess, RunningStack

from sluice_launch.process import eventually, stop_process
from sluice_records import RecordKind

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"
MESSAGES = json.loads((MODEL / "sample.json").read_text())["messages"]
ANSWER = "The code of amber falcon is 4719."


@pytest.fixture
def stack() -> Iterator[RunningStack]:
    with RunningStack(model=str(MODEL)) as running:
        running.start("prefill", "decode")
        running.start_gateway()
        yield running


def ask(stack: RunningStack) -> ChatStream:
    return ChatStream(stack.connect(), MESSAGES, 40, {})


def counters(engine: EngineProcess) -> dict[str, Any]:
    return dict(engine.inspect()["counters"])


def quarantined(engine: EngineProcess) -> int:
    return sum(pool["quarantined"] for pool in engine.inspect()["ledger"].values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prefill-0", RecordKind.PAGE),
        ("prefill-0", RecordKind.SNAPSHOT),
        ("decode-0", RecordKind.PAGE),
    ],
)
def test_a_flipped_bit_in_a_cache_changes_no_answer(stack: RunningStack, name: str, kind: RecordKind) -> None:
    engine = stack.engines[name]
    assert ask(stack).text() == ANSWER
    engine.settled()
    assert quarantined(engine) == 0
    with EngineMemory(stack, engine) as memory:
        memory.flip(kind, memory.closed(kind)[0])
    again = ask(stack)
    assert again.text() == ANSWER
    eventually(lambda: quarantined(engine) == 1, "the record is quarantined")
    assert ask(stack).text() == ANSWER
    for each in stack.engines.values():
        each.settled()


def test_a_bit_that_flips_between_close_and_pull_is_named_at_its_source_and_the_answer_is_right(
    stack: RunningStack,
) -> None:
    """The reader's sidecar is stopped, so that the flip comes before the pull; the digest catches it there."""
    prefill, decode = stack.engines["prefill-0"], stack.engines["decode-0"]
    sidecar = decode.pid("sidecar")
    with EngineMemory(stack, prefill) as source:
        stop_process(sidecar)
        try:
            stream = ask(stack)
            pieces = iter(stream)
            text = next(pieces)
            eventually(lambda: decode.inspect()["sequences"].get("pulling"), "it pulls")
            for record in source.closed(RecordKind.STATE):
                source.flip(RecordKind.STATE, record)
        finally:
            os.kill(sidecar, signal.SIGCONT)
        text += "".join(pieces)
    assert text == ANSWER
    # By the reader's word, or by its own scrubber before.
    eventually(lambda: counters(prefill).get("records_corrupt"), "the source has found its own record bad")
    assert counters(prefill).get("lane_mismatches", 0) == 0
    assert decode.inspect()["cached"]["pages"] > 0
    for each in stack.engines.values():
        each.settled()
