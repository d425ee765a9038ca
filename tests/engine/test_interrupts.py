"""Ctrl-C in a terminal goes to the whole group at once: who decides how an engine ends is its supervisor."""

from __future__ import annotations

import os
import signal

import pytest
from stack_double import RunningStack

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]


def test_an_interrupt_ends_no_rank_in_the_middle_of_a_drain() -> None:
    """The rank died of it, and what the drain should have finished was lost; status 0 all the same."""
    with RunningStack(scripted={"step_cost_us": 20_000}) as stack:
        (engine,) = stack.start("unified")
        stack.start_gateway()
        chat = stack.chat("a long story", 100)
        stream = iter(chat)
        next(stream)
        for process in ("rank", "leader"):
            os.kill(engine.pid(process), signal.SIGINT)
        os.kill(engine.supervisor, signal.SIGINT)
        assert sum(1 for _ in stream) >= 90
        assert engine.process.popen.wait(40) == 0
        assert stack.forget(engine.name) == 0
