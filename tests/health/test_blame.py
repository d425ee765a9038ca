"""Who is named where several rows froze or failed together: the one that brought it about."""

from __future__ import annotations

import pytest

from sluice_engine.watched_rows import EngineReason, engine_rows, named_death
from sluice_protocol.generate import Role
from sluice_runtime.health.layout import Phase, State
from sluice_runtime.health.reading import Exit, Reading, RowReading, Thread, carry
from sluice_runtime.health.verdict import Budgets, Kind, Verdict, verdict
from sluice_runtime.health.watched import Reason

WATCHED = engine_rows(Role.DECODE, "nixl")
BUDGETS = Budgets(floor_s=10.0)


def row(name: str, ticked_s: float = 0.0, **fields: object) -> RowReading:
    told = {"state": State.RUNNING, "pid": 1, "tid": 1, "ticks": 5, "thread": Thread.ALIVE, "ticked_s": ticked_s}
    return RowReading(name, **(told | fields))  # type: ignore[arg-type]


def judge(*rows: RowReading, at_s: float = 10.5, started: bool = True, exits: tuple[Exit, ...] = ()) -> Verdict:
    """All of them stand since their `ticked_s`."""
    told = {one.name: one for one in rows}
    before = Reading(0.0, told, started)
    return verdict(before, Reading(at_s, told, started, exits=exits), BUDGETS, WATCHED)


@pytest.mark.parametrize(("loop", "lease"), [(0.0, 0.2), (0.4, 0.0)])
def test_of_a_process_that_stopped_as_a_whole_its_loop_is_named(loop, lease):
    """Whichever ticked last: within a turn that says nothing."""
    told = judge(
        row("leader.loop", loop, thread=Thread.STOPPED, phase=Phase.SERVING),
        row("leader.lease", lease, thread=Thread.STOPPED),
    )
    assert (told.reason, told.culprit) == (EngineReason.SCHEDULER_FROZEN, "leader.loop")
    assert "stopped by a signal" in told.detail


def test_of_those_who_wait_for_the_interpreter_the_one_that_computes_is_named():
    waits = row("leader.loop", phase=Phase.SERVING, cpu_s=10.6, cpu_ticked_s=10.0)
    told = judge(waits, row("leader.lease", 0.4, cpu_s=4.0, cpu_ticked_s=2.0))
    assert (told.reason, told.culprit) == (EngineReason.LEASE_THREAD_DEAD, "leader.lease")


def test_who_froze_long_before_is_named_whoever_computes():
    told = judge(row("leader.loop", phase=Phase.PLANNING), row("leader.lease", 5.0, cpu_s=4.0))
    assert (told.reason, told.culprit) == (EngineReason.SCHEDULER_FROZEN, "leader.loop")


def test_a_rank_that_is_stopped_in_a_step_is_not_its_device():
    told = judge(row("rank0.loop", phase=Phase.DEVICE, thread=Thread.STOPPED), row("leader.loop", 10.0))
    assert (told.reason, told.culprit) == (EngineReason.RANK_FROZEN, "rank0.loop")


def test_a_death_that_a_thread_brought_about_is_that_threads():
    exits = (named_death(Exit("sidecar", 5, "PollerDied", "SystemExit('x')")),)
    rows = [
        row("sidecar.socket", 10.0),
        row("sidecar.poller", 10.0, state=State.FAILED, phase_since_ns=7),
        row("sidecar.verifier", 10.0, state=State.FAILED, phase_since_ns=3),
    ]
    told = judge(*rows, exits=exits)
    assert (told.kind, told.reason, told.culprit) == (Kind.DEAD, Reason.THREAD_DEAD, "sidecar.verifier")
    assert "PollerDied" in told.detail


def test_last_words_that_are_no_reason_of_ours_are_detail():
    told = judge(row("leader.loop", 10.0), exits=(named_death(Exit("leader", 1, "MemoryError", "in plan")),))
    assert (told.reason, told.culprit) == (EngineReason.LEADER_DEAD, "leader")
    assert told.detail == "ended with 1: MemoryError: in plan"


def test_a_thread_of_a_process_that_just_ends_is_not_blamed_for_it():
    there, gone = row("leader.lease", 10.0), row("leader.lease", 10.0, thread=Thread.GONE)
    first, second = Reading(10.0, {gone.name: gone}), Reading(10.25, {gone.name: gone})
    assert not verdict(Reading(9.75, {there.name: there}), first, BUDGETS, WATCHED).is_fatal
    told = verdict(first, second, BUDGETS, WATCHED)
    assert (told.reason, told.culprit) == (EngineReason.LEASE_THREAD_DEAD, "leader.lease")


@pytest.mark.parametrize(
    ("rank", "culprit"),
    [({"phase": Phase.LOADING}, "rank0.loop"), ({"state": State.ABSENT}, "rank0.loop")],
    ids=["it loads", "it has not begun"],
)
def test_a_start_that_stands_is_blamed_on_a_loop_and_not_on_threads_that_never_begin(rank, culprit):
    rows = [
        row("leader.loop", 10.0, phase=Phase.STARTING),
        row("rank0.loop", 10.0, **rank),
        row("rank0.collective", state=State.ABSENT),
    ]
    told = {one.name: one for one in rows}
    before = carry(None, Reading(0.0, told, False), WATCHED)
    verdict_ = verdict(before, Reading(BUDGETS.start_s + 1, told, False), BUDGETS, WATCHED)
    assert (verdict_.reason, verdict_.culprit) == (Reason.START_STALLED, culprit)
