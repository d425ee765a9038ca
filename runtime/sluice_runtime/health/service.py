"""What is guarded: one service, and what all services of its kind have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_runtime.health.layout import IDENTITY
from sluice_runtime.health.metrics import MetricSpec
from sluice_runtime.health.reading import Copy, Exit
from sluice_runtime.health.recorder import RecorderNames
from sluice_runtime.health.watched import Watched


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """What is known of a kind of service before it starts.

    `watched`: its threads. `named_death`: the death of one of its processes, with one of its reasons. `mirrors` and
    `writers`: what its processes write to the recorder beside their rows. `report`: what GET /status has beside health,
    from a recorder and the time (CLOCK_MONOTONIC, ns). `debug`: mirrors that GET /debug/NAME answers with. `metrics`:
    what is exported beside health.
    """

    watched: tuple[Watched, ...]
    named_death: Callable[[Exit], Exit]
    mirrors: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    report: Callable[[Copy, int], Mapping[str, Any]] = lambda copy, now_ns: {}
    debug: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[MetricSpec, ...] = ()

    @property
    def recorded(self) -> RecorderNames:
        """What its recorder has."""
        return RecorderNames(tuple(row.name for row in self.watched), (*self.mirrors, IDENTITY), self.writers)


@dataclass(slots=True)
class Service:
    """`pids`: of the processes that live now. `about`: config without secrets, for a bundle. `others`: pids of
    processes that it shares with other services; their stacks belong to the evidence all the same."""

    name: str
    role: str
    run_dir: Path
    kind: ServiceKind
    pids: Callable[[], Mapping[str, int]]
    about: Callable[[], Mapping[str, object]]
    others: Callable[[], Mapping[str, int]] = dict
