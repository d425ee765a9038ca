"""How many records fit. Asks the layouts; restates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_records.layout import Layouts, RecordKind


class BudgetError(ValueError):
    """The memory does not hold what was asked; says how much would."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Records per pool."""

    pages: int
    states: int
    snapshots: int

    def __getitem__(self, kind: RecordKind) -> int:
        return {RecordKind.PAGE: self.pages, RecordKind.STATE: self.states, RecordKind.SNAPSHOT: self.snapshots}[kind]

    def nbytes(self, layouts: Layouts) -> int:
        """Bytes that pools of these sizes allocate."""
        return sum(self[kind] * layouts[kind].stride for kind in RecordKind)


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Bytes that one sequence needs: its pages, its state, one snapshot at its end."""

    pages: int
    page_bytes: int
    state_bytes: int
    snapshot_bytes: int

    @property
    def total(self) -> int:
        return self.page_bytes + self.state_bytes + self.snapshot_bytes


def plan_pools(layouts: Layouts, memory_bytes: int, *, states: int, snapshots: int) -> PoolPlan:
    """States and snapshots as asked, pages from what is left of `memory_bytes`. Raises BudgetError below one page."""
    fixed = PoolPlan(0, states, snapshots).nbytes(layouts)
    pages = (memory_bytes - fixed) // layouts.page.stride
    if pages < 1:
        raise BudgetError(
            f"memory_bytes is {memory_bytes}; {states} states and {snapshots} snapshots take {fixed} and a page"
            f" {layouts.page.stride}: give at least {fixed + layouts.page.stride}, or fewer states or snapshots"
        )
    return PoolPlan(pages, states, snapshots)


def sequence_cost(layouts: Layouts, tokens: int) -> SequenceCost:
    """For a sequence of `tokens` tokens, page rounding and padding included."""
    pages = -(-tokens // layouts.page_tokens)
    return SequenceCost(pages, pages * layouts.page.stride, layouts.state.stride, layouts.snapshot.stride)
