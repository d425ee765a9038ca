"""What a supervisor has to know of a thread to judge it. Each service names its own threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import inf

from sluice_runtime.health.layout import Phase


class Reason(StrEnum):
    """Why a service of any kind was ended. Each service has reasons of its own beside these."""

    EVENT_LOOP_BLOCKED = "EventLoopBlocked"
    QUEUE_STARVED = "QueueStarved"
    NOT_ACCEPTING = "NotAccepting"
    RPC_FROZEN = "RpcFrozen"
    DRAIN_STALLED = "DrainStalled"
    START_STALLED = "StartStalled"
    START_FAILED = "StartFailed"
    SUPERVISOR_FAILED = "SupervisorFailed"
    THREAD_DEAD = "ThreadDead"


class Excuse(Enum):
    """What explains that the work of a row stands, so that something else is at fault."""

    NONE = "none"
    LOOP = "loop"  # the loop named by `behind` does not turn
    STEP = "step"  # or the step that it waits for has not come back
    ANY_STEP = "any step"  # or it makes no step at all


@dataclass(frozen=True, slots=True)
class Watched:
    """A row of the recorder.

    `ticks`: its loop turns at least once a second, whatever there is to do. `frozen`: the reason if it does not.
    `stalled`: the reason if it turns but its counter stands while work is pending. `ended`: the reason if its thread is
    over while its process lives.

    `frozen_in`: for a loop that froze in one of these phases, (reason, row) to blame instead of `frozen` and the loop.
    `behind`: the loop that this row's work waits for, and `excuse`: what of that loop explains a standstill here.
    `paced_by`: the loop whose steps this row carries out or waits for; that loop knows how long a step should take.
    `is_work`: what is pending here is work of the service. `holds`: COUNT_B is what it keeps for others, which is work.
    `leads_start`: others begin only after it has loaded. `loaded`: numbers of its row that grow while it loads.
    `unready_after_s`: its service gets no new work if this loop has not turned for so long.
    """

    name: str
    process: str
    ticks: bool
    frozen: str
    stalled: str
    ended: str = Reason.THREAD_DEAD
    frozen_in: Mapping[Phase, tuple[str, str]] = field(default_factory=dict)
    behind: str = ""
    excuse: Excuse = Excuse.NONE
    paced_by: str = ""
    is_work: bool = True
    holds: bool = False
    leads_start: bool = False
    loaded: tuple[str, ...] = ()
    unready_after_s: float = inf
    accepts: bool = False
