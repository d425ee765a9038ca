"""The prompt worker's jobs, as decisions: which begin next, and which of them a death of the worker is due to. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """PARSED: the worker has it, and it is not yet to be tokenised."""

    PARSE = "parse"
    PARSED = "parsed"
    ENCODE = "encode"


@dataclass(frozen=True, slots=True)
class Entry:
    """`runs`: the worker is at it. `alone`: it was in work when the worker died, so nothing else runs beside it."""

    job: int
    phase: Phase
    runs: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Blame:
    """`failed`: the jobs that the death is due to. `alone`: those that it may be due to."""

    failed: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()


def next_starts(entries: Sequence[Entry]) -> list[int]:
    """Jobs that may begin now: the oldest of each phase in which none runs. One that has to run alone begins when
    nothing runs, and nothing else begins until then."""
    running = [entry for entry in entries if entry.runs]
    waiting = [entry for entry in entries if not entry.runs and entry.phase is not Phase.PARSED]
    alone = next((entry for entry in waiting if entry.alone), None)
    if alone is not None:
        return [] if running else [alone.job]
    if any(entry.alone for entry in running):
        return []
    starts = []
    for phase in (Phase.PARSE, Phase.ENCODE):
        first = next((entry.job for entry in waiting if entry.phase is phase), None)
        if first is not None and all(entry.phase is not phase for entry in running):
            starts.append(first)
    return starts


def blame(entries: Iterable[Entry], status: int | None, overrun: int | None) -> Blame:
    """`status` is that of the worker's process, `overrun` the job for whose time it was ended.

    An abort is what the allocator does at the limit of memory. A worker that was ended by something else, such as the
    system for want of memory, may have been working on an innocent job: the job is tried once more.
    """
    running = [entry for entry in entries if entry.runs]
    if overrun is not None:
        return Blame(failed=frozenset({overrun}))
    jobs = frozenset(entry.job for entry in running)
    if len(running) == 1 and (running[0].alone or status == -signal.SIGABRT):
        return Blame(failed=jobs)
    return Blame(alone=jobs)
