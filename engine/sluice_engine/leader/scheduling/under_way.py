"""Steps that the ranks have and have not all reported: one in lockstep, two in overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.step import StepResult


@dataclass(slots=True)
class SentStep:
    """`sent_at`: by the leader's clock. `results`: by rank, None until it has reported."""

    planned: Plan
    sent_at: float
    results: dict[int, StepResult | None]

    @property
    def number(self) -> int:
        return self.planned.record.number

    @property
    def is_done(self) -> bool:
        return None not in self.results.values()


class UnderWay:
    """Oldest first. Ranks carry steps out in order, so the oldest is what they are at."""

    def __init__(self, *, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._steps: deque[SentStep] = deque()
        self._done_at = float("-inf")

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> SentStep | None:
        return self._steps[0] if self._steps else None

    def may_plan(self, state: SchedulerState) -> bool:
        """Whether all results are in that the next plan sees; in lockstep, whether all are. Both make equal plans."""
        return not self._steps or (not self._lockstep and not state.sees(self._steps[0].number))

    def add(self, planned: Plan, ranks: Iterable[int], now: float) -> None:
        self._steps.append(SentStep(planned, now, dict.fromkeys(ranks)))

    def awaiting(self, number: int, rank: int) -> SentStep | None:
        """The step of that number, if that rank still owes its result."""
        for step in self._steps:
            if step.number == number and step.results.get(rank, step) is None:
                return step
        return None

    def take_done(self, now: float) -> tuple[SentStep, float] | None:
        """The oldest, once all ranks have reported it, and the seconds that they had it alone; None before."""
        if not self._steps or not self._steps[0].is_done:
            return None
        step = self._steps.popleft()
        elapsed, self._done_at = now - max(step.sent_at, self._done_at), now
        return step, elapsed
