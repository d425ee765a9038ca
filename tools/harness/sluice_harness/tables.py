"""Rows that no process can act out here: a recorder, marks written as the threads would write them, a virtual clock."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sluice_engine.watched_rows import HICACHE_CLIENT, LEADER_LOOP, LEASE_THREAD, TIER_COPIER, rank_rows
from sluice_harness.results import Result
from sluice_harness.rows import Outcome, Row
from sluice_runtime.health.layout import Phase as Doing
from sluice_runtime.health.reading import Thread
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.recorder import Row as Marks
from sluice_runtime.health.verdict import IDLE, Budgets, Verdict
from sluice_runtime.health.watch import PERIOD_S, Watch
from sluice_runtime.health.watched import Watched

FLOOR_S = 30.0
# A frozen thread is told of so long after its budget at the latest: two looks.
LATE_S = 2 * PERIOD_S


@dataclass
class World:
    """`marks` by row name. `at`: what the supervisor's clock shows."""

    watch: Watch
    marks: dict[str, Marks]
    at: list[float]
    frozen: set[str] = field(default_factory=set)
    verdict: Verdict = IDLE

    def live(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Virtual seconds; threads that are not frozen turn. Ends at a fatal verdict."""
        for _ in range(round(seconds / PERIOD_S)):
            self.at[0] += PERIOD_S
            for name, marks in self.marks.items():
                if name not in self.frozen:
                    marks.tick()
            each()
            self.verdict = self.watch.look()
            if self.verdict.is_fatal:
                return


@contextmanager
def world(ranks: int) -> Iterator[World]:
    watched: list[Watched] = [LEADER_LOOP, LEASE_THREAD, TIER_COPIER, HICACHE_CLIENT]
    for rank in range(ranks):
        watched += rank_rows(rank)
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder.create(Path(directory) / "recorder", RecorderNames(tuple(row.name for row in watched)))
        at = [1000.0]
        watch = Watch(recorder, watched, Budgets(FLOOR_S), lambda: at[0], lambda pid, tid: (Thread.ALIVE, 0.0))
        watch.started = True
        marks = {row.name: recorder.row(row.name) for row in watched}
        for row in marks.values():
            row.begin(Doing.IDLE)
        yield World(watch, marks, at)


def run_table(row: Row, turn: int) -> Result:
    began = time.monotonic()
    with world(max(1, row.tp)) as told:
        since = told.at[0]
        limit = SCENES[str(row.fault["table"])](told)
    expected, problems = row.expected, []
    verdict = told.verdict
    outcome = verdict.kind.value if verdict.is_fatal else Outcome.HEALTHY.value
    if (outcome, verdict.reason if verdict.is_fatal else "") != (expected.outcome.value, expected.reason):
        problems.append(f"{verdict} instead of {expected.outcome}: {expected.reason}")
    if verdict.is_fatal and verdict.culprit != expected.culprit:
        problems.append(f"the culprit is {verdict.culprit!r}, not {expected.culprit!r}")
    detect = told.at[0] - since if verdict.is_fatal else None
    if detect is not None and detect > limit:
        problems.append(f"told after {detect:.1f} virtual s; {limit:.1f} s are allowed")
    return Result(
        row.id, turn, FLOOR_S, tuple(problems), outcome,
        verdict.reason if verdict.is_fatal else "", verdict.culprit if verdict.is_fatal else "", None,
        detect, limit if detect is not None else None, round(time.monotonic() - began, 2), is_virtual=True,
    )  # fmt: skip


def _idle(told: World) -> float:
    told.live(600.0)
    return 0.0


def _jump(seconds: float) -> Callable[[World], float]:
    """The clock of the reader jumps while a step is under way that comes back in time."""

    def scene(told: World) -> float:
        step = [0]

        def work() -> None:
            step[0] += 1
            for name in ("leader.loop", "rank0.loop"):
                told.marks[name].pending(1)
                told.marks[name].progress(step[0] // 40)

        told.live(20.0, work)
        told.at[0] += seconds
        told.live(60.0, work)
        return 0.0

    return scene


def _reader_asleep(told: World) -> float:
    """The supervisor itself gets no turn for an hour: it has seen nothing, and may blame nobody for it."""
    told.marks["leader.loop"].pending(1)
    told.live(1.0)
    told.at[0] += 3600.0
    told.live(20.0)
    return 0.0


def _frozen(name: str, phase: Doing, pending: int = 1) -> Callable[[World], float]:
    def scene(told: World) -> float:
        told.live(5.0)
        told.marks[name].enter(phase)
        told.marks[name].pending(pending)
        told.frozen.add(name)
        told.live(FLOOR_S + 30.0)
        return FLOOR_S + 5.0 + LATE_S

    return scene


def _stalled(name: str) -> Callable[[World], float]:
    """It turns, and its counter stands though something waits."""

    def scene(told: World) -> float:
        told.live(5.0)
        told.marks[name].pending(3)
        told.live(FLOOR_S + 30.0)
        return FLOOR_S + 5.0 + LATE_S

    return scene


def _maintained(told: World) -> float:
    """Frozen in a maintenance window, which expires by itself."""
    told.watch.maintain(300.0)
    told.frozen.add("leader.loop")
    told.live(290.0)
    if told.verdict.is_fatal:
        return 0.0
    told.live(60.0)
    return 300.0 + FLOOR_S + 1.0 + LATE_S


SCENES: dict[str, Callable[[World], float]] = {
    "idle for 10 minutes": _idle,
    "clock an hour ahead": _jump(3600.0),
    "clock an hour back": _jump(-3600.0),
    "supervisor asleep for an hour": _reader_asleep,
    "a rank in a collective": _frozen("rank1.loop", Doing.COLLECTIVE),
    "a collective's counter stands": _stalled("rank1.collective"),
    "tier copier frozen": _frozen("leader.tier", Doing.IDLE),
    "tier copier stalled": _stalled("leader.tier"),
    "hicache client frozen": _frozen("leader.hicache", Doing.RECEIVING),
    "hicache client stalled": _stalled("leader.hicache"),
    "maintenance window": _maintained,
}
