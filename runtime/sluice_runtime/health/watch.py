"""The supervisor's eye: reads the recorder again and again and keeps the verdict. Time is handed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sluice_runtime.health.layout import Phase, State
from sluice_runtime.health.proc import look_at_thread
from sluice_runtime.health.reading import Copy, Exit, Look, Reading, RowReading, carry, look_at_threads
from sluice_runtime.health.recorder import Recorder, RecorderError
from sluice_runtime.health.verdict import IDLE, Budgets, Kind, Verdict, describe_doing, verdict
from sluice_runtime.health.watched import Watched

PERIOD_S = 0.25
# A reader that did not run itself for longer than this has seen nothing of what the others did meanwhile.
MAX_GAP_S = 1.0
MAX_WINDOW_S = 3600.0
# The transport's start: NIXL, registered memory, and the measuring of a lane.
RESTART_S = 30.0


def _loaded(rows: Mapping[str, RowReading], begun: int, watched: Sequence[Watched]) -> int:
    """Grows while a start makes progress: by what the rows say they have loaded, and by threads that have `begun` for
    the first time: one that comes back is no progress."""
    loading = [(rows[thread.name], thread.loaded) for thread in watched if thread.name in rows]
    return begun + sum(int(getattr(row, number)) for row, numbers in loading for number in numbers)


def restart_budget_s(budgets: Budgets) -> float:
    """For a process that is started again beside others that serve: it loads no weights."""
    return max(budgets.floor_s, min(budgets.start_s, RESTART_S))


def _turns(row: RowReading) -> bool:
    return row.state is State.RUNNING and row.phase not in (Phase.STARTING, Phase.LOADING)


class Watch:
    """`clock`: monotonic seconds. `look`: the kernel's word on a thread. `pids`: of the processes that live now."""

    def __init__(
        self,
        recorder: Recorder,
        watched: Sequence[Watched],
        budgets: Budgets,
        clock: Callable[[], float],
        look: Look = look_at_thread,
        pids: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.budgets = budgets
        self.watched = tuple(watched)
        self.started = False
        self.loaded = 0
        self._begun: set[str] = set()
        self.verdict: Verdict = IDLE
        self._recorder = recorder
        self._clock = clock
        self._look = look
        self._pids = pids
        self._before: Reading | None = None
        self._exits: list[Exit] = []
        self._observed = 0.0
        self._looked_at = clock()
        self._window_ends = 0.0
        self.is_silent = False  # a loop without which no new work should come has not turned for too long
        self._away: dict[str, tuple[float, float]] = {}  # process -> since its first death, since its last one

    def exited(self, gone: Exit) -> None:
        self._exits.append(gone)

    def forgot(self, process: str) -> None:
        """It has ended as it may, and is being started again: this is a start that must come to its end."""
        first, _ = self._away.get(process, (self._observed, 0.0))
        self._away[process] = first, self._observed

    @property
    def away_s(self) -> float:
        """How long a process that is started again has not been there; 0 where none is."""
        return max((self._observed - first for first, _ in self._away.values()), default=0.0)

    def _look_for_those_away(self, rows: Mapping[str, RowReading]) -> Verdict | None:
        """A verdict on one that does not come up within its budget. While the first start is under way, what it loads
        is looked at instead."""
        if self.maintenance_s > 0 or not self.started:
            self._away = {process: (first, self._observed) for process, (first, _) in self._away.items()}
        budget = restart_budget_s(self.budgets)
        for process, (_, since) in list(self._away.items()):
            loops = [told for told in self.watched if told.process == process and told.ticks]
            if all(_turns(rows[told.name]) for told in loops):
                del self._away[process]
            elif (age := self._observed - since) > budget:
                late = next(told for told in loops if not _turns(rows[told.name]))
                doing = "starting again" if rows[late.name].state is State.ABSENT else describe_doing(rows[late.name])
                return Verdict(Kind.WEDGED, late.frozen, process, doing, age, budget)
        return None

    def maintain(self, seconds: float) -> float:
        """From now on nothing is called a wedge; expires by itself, at the latest after MAX_WINDOW_S. 0 ends it.
        Returns the seconds granted, which pass as this watch runs. A death is a death all the same."""
        granted = min(max(0.0, seconds), MAX_WINDOW_S)
        self._window_ends = self._observed + granted
        return granted

    def _silent_s(self, name: str) -> float:
        """Since when a loop has not turned; 0 where there is none."""
        row = None if self._before is None else self._before.rows.get(name)
        return 0.0 if row is None or row.state is not State.RUNNING else self._observed - row.ticked_s

    @property
    def maintenance_s(self) -> float:
        """What is left of the window."""
        return max(0.0, self._window_ends - self._observed)

    def _rows(self) -> dict[str, RowReading]:
        rows = Copy(self._recorder.view).rows()
        for told in self.watched:
            if told.name not in rows:
                raise RecorderError(f"row {told.name} has lost its name: it was written over")
        return rows

    def look(self) -> Verdict:
        """Read, compare, judge. What froze in a maintenance window gets its whole budget after it. Raises RecorderError
        for a recorder that is damaged: then nothing is watched any more."""
        now = self._clock()
        self._observed += min(max(0.0, now - self._looked_at), MAX_GAP_S)
        self._looked_at = now
        rows = look_at_threads(self._rows(), self._look, self._pids())
        self._begun |= {name for name, row in rows.items() if row.state is State.RUNNING}
        self.loaded = _loaded(rows, len(self._begun), self.watched)
        after = Reading(self._observed, rows, self.started, self.loaded, exits=tuple(self._exits))
        if self.maintenance_s > 0:
            self._before = None
        self._before = self._before or carry(None, after, self.watched)
        told = verdict(self._before, after, self.budgets, self.watched)
        late = self._look_for_those_away(rows)
        told = late if late is not None and not told.is_fatal else told
        self._before = carry(self._before, after, self.watched)
        self.is_silent = any(self._silent_s(thread.name) > thread.unready_after_s for thread in self.watched)
        self.verdict = told
        return told
