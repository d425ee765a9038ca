"""The verdict: a pure function over two readings of the flight recorder.

Frozen with work pending is a wedge; idle is healthy, slow is healthy. A thread that is named was given more time than
its work should take: a step's budget is a factor over what the measured throughput says for it, and never below a
floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from sluice_runtime.health.layout import Phase, State
from sluice_runtime.health.reading import Reading, RowReading, Thread, expected_ns
from sluice_runtime.health.watched import Excuse, Reason, Watched


class Kind(StrEnum):
    IDLE = "idle"
    PROGRESSING = "progressing"
    SLOW = "slow"
    WEDGED = "wedged"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`culprit`: a row or a process. `doing`: its last phase and words. `age_s`: frozen (or slow) for so long, of
    `budget_s`. `pending`: what waits for it."""

    kind: Kind
    reason: str = ""
    culprit: str = ""
    doing: str = ""
    age_s: float = 0.0
    budget_s: float = 0.0
    pending: int = 0
    detail: str = ""

    @property
    def is_fatal(self) -> bool:
        return self.kind in (Kind.WEDGED, Kind.DEAD)

    def as_dict(self) -> dict[str, object]:
        told = asdict(self)
        return {"verdict": told.pop("kind"), **told, "age_s": round(self.age_s, 3), "budget_s": round(self.budget_s, 3)}

    def __str__(self) -> str:
        """One line, for a termination message."""
        if not self.is_fatal:
            return self.kind.value
        told = f"{self.kind.value.capitalize()}: {self.reason}: {self.culprit}"
        if self.kind is Kind.WEDGED:
            told += f" was {self.doing or 'idle'} for {self.age_s:.1f} s of {self.budget_s:.1f} s"
            told += f" with {self.pending} pending" if self.pending else ""
        return told + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds. `factor` times the expected time of the work in hand is its budget, and never less than `floor_s`.
    `start_s`: a start that loads nothing further. `slow`: share of the budget from which on it is called slow."""

    floor_s: float = 30.0
    factor: float = 20.0
    start_s: float = 120.0
    slow: float = 0.5

    def of(self, expected_ns: int) -> float:
        return max(self.floor_s, self.factor * expected_ns / 1e9)


IDLE = Verdict(Kind.IDLE)


def verdict(before: Reading, after: Reading, budgets: Budgets, watched: Sequence[Watched]) -> Verdict:
    """`before` comes from `carry`. The first check that has something fatal to say says it; else the slowest."""
    checks: tuple[Callable[[], Iterable[Verdict]], ...] = (
        lambda: _dead_processes(after, watched),
        lambda: _dead_threads(before, after, watched),
        lambda: _frozen_loops(before, after, budgets, watched),
        lambda: _frozen_work(before, after, budgets, watched),
        lambda: _stalled_start(before, after, budgets, watched),
    )
    slowest = IDLE
    for check in checks:
        found = list(check())
        fatal = [told for told in found if told.is_fatal]
        if fatal:
            return max(fatal, key=lambda told: told.age_s)  # the first that froze holds up the others
        slowest = max([slowest, *found], key=lambda told: (told.kind is Kind.SLOW, told.age_s))
    if slowest.kind is Kind.SLOW:
        return slowest
    idle = {thread.name for thread in watched if not thread.is_work}
    works = any(row.pending for row in after.rows.values() if row.name not in idle)
    holds = any(after.rows[thread.name].count_b for thread in watched if thread.holds and thread.name in after.rows)
    return Verdict(Kind.PROGRESSING) if works or holds else IDLE


# A loop turns at least so often: which of two that froze within less was first cannot be told from their ticks.
TURN_S = 1.0
# Of its frozen time, in CPU: below it a thread was not what kept the others waiting.
MIN_SHARE = 0.05


def _dead_processes(after: Reading, watched: Sequence[Watched]) -> Iterable[Verdict]:
    """Where a thread's end has brought its process's about, that thread is named."""
    for gone in after.exits:
        rows = [row for row in after.rows.values() if row.name.startswith(f"{gone.process}.")]
        failed = min(
            (row for row in rows if row.state is State.FAILED), key=lambda row: row.phase_since_ns, default=None
        )
        status = "" if gone.status is None else f"ended with {gone.status}"
        detail = ": ".join(part for part in (status, gone.detail) if part)
        if failed is not None:
            yield Verdict(
                Kind.DEAD, _reason_of_end(failed.name, watched), failed.name, describe_doing(failed), detail=detail
            )
            continue
        yield Verdict(Kind.DEAD, gone.reason, gone.process, describe_doing(rows[0]) if rows else "", detail=detail)


def _dead_threads(before: Reading, after: Reading, watched: Sequence[Watched]) -> Iterable[Verdict]:
    """A thread whose loop has ended while its process lives on. Its process's own death is told before.

    The threads of a process that ends go one by one: one that is only gone must be so at two looks.
    """
    for thread in watched:
        old, row = before.rows.get(thread.name), after.rows.get(thread.name)
        if row is None:
            continue
        was_gone = old is not None and old.life == row.life and old.thread is Thread.GONE
        if row.state is State.FAILED or (row.state is State.RUNNING and row.thread is Thread.GONE and was_gone):
            yield Verdict(Kind.DEAD, _reason_of_end(row.name, watched), row.name, describe_doing(row), detail=row.doing)


def _reason_of_end(name: str, watched: Sequence[Watched]) -> str:
    """Of a thread."""
    return next((thread.ended for thread in watched if thread.name == name), Reason.THREAD_DEAD)


def _frozen_loops(before: Reading, after: Reading, budgets: Budgets, watched: Sequence[Watched]) -> Iterable[Verdict]:
    """A loop that turns by itself at least once a second, and does not."""
    frozen = []
    for thread in watched:
        old, row = before.rows.get(thread.name), after.rows.get(thread.name)
        # While it loads it has no turns; `_stalled_start` looks after it.
        if row is not None and row.phase in (Phase.STARTING, Phase.LOADING):
            continue
        if not thread.ticks or old is None or row is None or not _same_life(old, row) or old.ticks != row.ticks:
            continue
        budget = budgets.of(max(old.ticked_expected_ns, expected_ns(row, after.rows, thread.paced_by)))
        frozen.append((thread, row, after.at_s - old.ticked_s, budget, row.cpu_s - old.cpu_ticked_s))
    overdue = [loop for loop in frozen if loop[2] > loop[3]]
    if overdue:
        first = max(overdue, key=lambda loop: loop[2])
        together = [loop for loop in frozen if loop[2] > first[2] - TURN_S]
        # Of a process whose threads wait for the interpreter, the one that has it has the CPU: by far more than those
        # that wake to ask for it.
        computing = [loop for loop in together if loop[4] > MIN_SHARE * loop[2]]
        thread, row, age, budget, _ = max(computing, key=lambda loop: loop[4], default=together[0])
        detail = _stopped(row)
        if age <= budget:  # It holds up another loop, which has no time left though this one has.
            age, budget = first[2], first[3]
            detail = "; ".join(filter(None, (detail, f"{first[1].name} has waited that long for it")))
        reason, culprit = _reason_of_frozen(thread, row)
        yield Verdict(Kind.WEDGED, reason, culprit, describe_doing(row), age, budget, row.pending, detail)
    for thread, row, age, budget, _ in frozen:
        yield from _judge_slow(age, budget, budgets.slow, _reason_of_frozen(thread, row), row, is_due=True)


def _reason_of_frozen(thread: Watched, row: RowReading) -> tuple[str, str]:
    """(reason, culprit): where it was last says more than that it does not turn."""
    if row.thread is Thread.STOPPED:
        return thread.frozen, row.name
    return thread.frozen_in.get(row.phase, (thread.frozen, row.name))


def _frozen_work(before: Reading, after: Reading, budgets: Budgets, watched: Sequence[Watched]) -> Iterable[Verdict]:
    """Something is pending, and the counter that should move stands."""
    for thread in watched:
        old, row = before.rows.get(thread.name), after.rows.get(thread.name)
        if old is None or row is None or not _same_life(old, row):
            continue
        if not (old.pending and row.pending and old.progress == row.progress):
            continue
        age = after.at_s - old.progressed_s
        budget = budgets.of(max(old.progressed_expected_ns, expected_ns(row, after.rows, thread.paced_by)))
        if _is_excused(thread, before, after, budgets.slow * budget):
            continue
        yield from _judge(age, budget, budgets.slow, _reason_of_stalled(thread, row, after, watched), row)


def _is_excused(thread: Watched, before: Reading, after: Reading, seconds: float) -> bool:
    """True if the loop that this row waits for explains the standstill, as `thread.excuse` says."""
    old, row = before.rows.get(thread.behind), after.rows.get(thread.behind)
    if thread.excuse is Excuse.NONE or old is None or row is None:
        return False
    is_silent = old.ticks == row.ticks and after.at_s - old.ticked_s > seconds
    if thread.excuse is Excuse.LOOP:
        return is_silent
    has_moved = not (old.pending and row.pending and old.progress == row.progress)
    stands = not has_moved and after.at_s - old.progressed_s > seconds
    return is_silent or (stands and (thread.excuse is Excuse.ANY_STEP or row.progress < row.step))


def _reason_of_stalled(thread: Watched, row: RowReading, after: Reading, watched: Sequence[Watched]) -> tuple[str, str]:
    """A step that does not come back is not the fault of the loop that sent it: the loop that has not answered is
    named, or what that loop's thread was last in."""
    workers = [other for other in watched if other.ticks and other.paced_by == thread.name and other.name in after.rows]
    if not workers or row.phase is Phase.PLANNING:
        return thread.stalled, row.name
    for worker in workers:
        loop = after.rows[worker.name]
        if loop.progress < row.step:
            reason, name = worker.frozen_in.get(Phase.DEVICE, ("", ""))
            is_stuck = name in after.rows and after.rows[name].pending and loop.thread is not Thread.STOPPED
            return (reason, name) if is_stuck else (worker.frozen, worker.name)
    # All have answered.
    return (thread.frozen if row.progress < row.step else thread.stalled), row.name


def _stalled_start(before: Reading, after: Reading, budgets: Budgets, watched: Sequence[Watched]) -> Iterable[Verdict]:
    if after.started or before.started or before.loaded != after.loaded:
        return
    age = after.at_s - before.loaded_s
    row = _last_to_start(after, watched)
    budget = max(budgets.start_s, budgets.floor_s)
    yield from _judge(age, budget, budgets.slow, (Reason.START_STALLED, row.name), row)


def _last_to_start(after: Reading, watched: Sequence[Watched]) -> RowReading:
    """The first of these that there is: a stopped one; a loop that loads and that the others begin after; a process of
    which nothing has begun; a loop that has begun and does not turn yet, the leading one last, since it waits for all;
    one that has not begun; one that loads; the one that did something last. Threads without a loop may never begin."""
    rows = list(after.rows.values())
    loops = [after.rows[thread.name] for thread in watched if thread.ticks and thread.name in after.rows]
    loading = [row for row in rows if row.state is State.RUNNING and row.phase is Phase.LOADING]
    leading = {thread.name for thread in watched if thread.leads_start}
    first = [row for row in loading if row.name in leading]
    absent = [row for row in loops if row.state is State.ABSENT]
    begun = {row.name.partition(".")[0] for row in rows if row.state is not State.ABSENT}
    missing = [row for row in absent if row.name.partition(".")[0] not in begun]
    starting = [row for row in loops if row.state is State.RUNNING and row.phase is Phase.STARTING]
    others = [row for row in starting if row.name not in leading]
    stopped = [row for row in loops if row.thread is Thread.STOPPED]
    latest = max(rows, key=lambda row: row.phase_since_ns, default=RowReading("supervisor"))
    return next(iter([*stopped, *first, *missing, *others, *absent, *loading, latest]))


def _judge(age: float, budget: float, slow: float, blame: tuple[str, str], row: RowReading) -> Iterable[Verdict]:
    reason, culprit = blame
    if age > budget:
        yield Verdict(Kind.WEDGED, reason, culprit, describe_doing(row), age, budget, row.pending, _stopped(row))
    else:
        yield from _judge_slow(age, budget, slow, blame, row)


def _judge_slow(
    age: float, budget: float, slow: float, blame: tuple[str, str], row: RowReading, is_due: bool = False
) -> Iterable[Verdict]:
    """`is_due`: whatever is pending, something should have happened by now."""
    if (is_due or row.pending) and slow * budget < age <= budget:
        yield Verdict(Kind.SLOW, *blame, describe_doing(row), age, budget, row.pending)


def _same_life(old: RowReading, row: RowReading) -> bool:
    return old.life == row.life and old.state is State.RUNNING and row.state is State.RUNNING


def describe_doing(row: RowReading) -> str:
    """Its last phase and words."""
    phase = row.phase.name.lower()
    return f"{phase}: {row.doing}" if row.doing else phase


def _stopped(row: RowReading) -> str:
    return "its process is stopped by a signal" if row.thread is Thread.STOPPED else ""
