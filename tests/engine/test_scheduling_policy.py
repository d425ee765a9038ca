"""Who takes the CPU from whom: docs/adr/0103."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from sluice_runtime.process.processes import give_way, go_first


def in_a_thread(run: Callable[[], None]) -> int:
    """The policy that a thread has after `run`. The test's own stays."""
    policies: list[int] = []

    def body() -> None:
        run()
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    return policies[0]


def test_a_thread_gives_way_and_goes_first_again() -> None:
    assert in_a_thread(give_way) == os.SCHED_BATCH
    assert in_a_thread(lambda: (give_way(), go_first())) == os.SCHED_OTHER  # type: ignore[arg-type,return-value]


def test_threads_that_it_starts_give_way_too() -> None:
    inherited: list[int] = []

    def run() -> None:
        give_way()
        inherited.append(in_a_thread_of_another(lambda: None))

    def in_a_thread_of_another(body: Callable[[], None]) -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: (body(), found.append(os.sched_getscheduler(0))))
        thread.start()
        thread.join(30)
        return found[0]

    in_a_thread(run)
    assert inherited == [os.SCHED_BATCH]


def test_what_somebody_else_chose_stays() -> None:
    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        give_way()
        go_first()

    assert in_a_thread(idle) == os.SCHED_IDLE


def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert in_a_thread(give_way) == os.SCHED_OTHER
