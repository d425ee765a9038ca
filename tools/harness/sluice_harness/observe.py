"""What came of a fault, as seen from outside: who was named, how long it took, how the service ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sluice_harness.rows import Budget, Outcome, Row
from sluice_harness.service import Service
from sluice_harness.stack import Stack
from sluice_launch.process import Event, Late, eventually

SLACK_S, DEATH_S = 10.0, 5.0
# After what it may take: so long it is waited for all the same, to tell a late verdict from none.
PATIENCE_S = 15.0
EXIT_S = 30.0
# A healthy row is watched for so many floors.
HEALTHY_FLOORS = 1.6


@dataclass(frozen=True, slots=True)
class Seen:
    """`at`: when it was told, monotonic seconds; `message`: the incident's one line."""

    outcome: Outcome
    at: float
    reason: str = ""
    culprit: str = ""
    message: str = ""


def allowed_s(row: Row, stack: Stack) -> float | None:
    """From the fault to its detection, at most."""
    budgets = {
        Budget.DEATH: DEATH_S,
        Budget.FLOOR: stack.health["floor_s"] + SLACK_S,
        Budget.START: stack.health["start_s"] + SLACK_S,
        Budget.PROBES: stack.probing.budget_s + SLACK_S,
    }
    return budgets.get(row.expected.budget)


def wait_for_end(stack: Stack, engine: Service, timeout_s: float) -> Seen:
    """An incident, a kill by the prober, or the end of the service, whichever comes first. Raises Late."""
    return eventually(lambda: look(stack, engine), f"something is told of {engine.name}", timeout_s)


def look(stack: Stack, engine: Service) -> Seen | None:
    incident = engine.process.seen("incident")
    if incident is not None:
        return seen_of(incident)
    for kill in stack.prober.kills:
        if kill.pid == engine.process.pid:
            return Seen(Outcome.UNANSWERED, kill.at, message=kill.why)
    if engine.process.popen.poll() is not None and engine.process.seen("incident") is None:
        return Seen(Outcome.ENDED, time.monotonic(), message=str([dict(event) for event in engine.process.events[-2:]]))
    return None


def seen_of(incident: Event) -> Seen:
    told = incident
    return Seen(Outcome(told["verdict"]), incident.at, str(told["reason"]), str(told["culprit"]), str(told["message"]))


def watch_healthy(stack: Stack, until: Callable[[], bool], at_least_s: float, at_most_s: float = 150.0) -> Seen | None:
    """None when nothing was told of anybody until `until` came true and `at_least_s` were over. Raises Late."""
    began = time.monotonic()
    while True:
        for engine in stack.services.values():
            if (seen := look(stack, engine)) is not None:
                return seen
        passed = time.monotonic() - began
        if passed >= at_least_s and until():
            return None
        if passed > at_most_s:
            raise Late(f"it is not over within {at_most_s:.0f} s")
        time.sleep(0.05)
