"""The fault matrix as values: what is done to whom, in which phase, and what must come of it.

The rows are data, in `matrix/*.toml`. A table there may name several roles and phases: each pair of them is a row.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from itertools import product
from typing import Any

FOLDER = "matrix"


class MatrixError(Exception):
    """A file of rows that makes no sense; the message says where."""


class Phase(StrEnum):
    """What the service is in the middle of when the fault comes."""

    IDLE = "idle"
    LOADING = "loading"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    DECODING = "decoding"
    DRAINING = "draining"


class Outcome(StrEnum):
    HEALTHY = "healthy"  # nobody is killed, no incident, every request is answered right
    WEDGED = "wedged"
    DEAD = "dead"
    UNANSWERED = "unanswered"  # the supervisor answers no probe: whoever asks from outside ends it
    ENDED = "ended"  # the service itself is gone: whoever started it sees that


class Budget(StrEnum):
    """What the detection may take: the budget itself and `SLACK_S` beyond it."""

    DEATH = "death"
    FLOOR = "floor"
    START = "start"
    PROBES = "probes"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Expected:
    """`exit`: the service's status, None where it goes on. `culprit`: as the verdict names it."""

    outcome: Outcome
    reason: str = ""
    culprit: str = ""
    budget: Budget = Budget.NONE
    exit: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`stack`: which kind of service it needs (`profiles.py`). `fault`: see `inject.py`. `lost`: the requests in flight
    need not be answered, for their client's own connection is what the fault ends. `why`: one line for people."""

    id: str
    fault: Mapping[str, Any]
    phase: Phase
    role: str
    tp: int
    stack: str
    expected: Expected
    is_ci: bool
    unscaled: bool = False
    lost: bool = False
    why: str = ""

    @property
    def is_table(self) -> bool:
        """Judged on a virtual clock, without processes."""
        return "table" in self.fault


_DEFAULT_EXIT = {Outcome.WEDGED: 3, Outcome.DEAD: 1, Outcome.UNANSWERED: -9, Outcome.ENDED: -9, Outcome.HEALTHY: None}
_DEFAULT_BUDGET = {
    Outcome.WEDGED: Budget.FLOOR,
    Outcome.DEAD: Budget.DEATH,
    Outcome.UNANSWERED: Budget.PROBES,
    Outcome.ENDED: Budget.DEATH,
    Outcome.HEALTHY: Budget.NONE,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A table of a file: its keys and their defaults."""

    name: str
    fault: Mapping[str, Any]
    outcome: str
    roles: Sequence[str] = ("decode",)
    phases: Sequence[str] = ("decoding",)
    reason: str = ""
    culprit: str = ""
    budget: str = ""
    exit: int | None = None
    tp: int = 1
    stack: str = ""
    ci: Sequence[str] = field(default_factory=tuple)
    unscaled: str = ""
    lost: bool = False
    why: str = ""

    def rows(self) -> Iterable[Row]:
        outcome = Outcome(self.outcome)
        status = _DEFAULT_EXIT[outcome] if self.exit is None else self.exit
        budget = Budget(self.budget) if self.budget else _DEFAULT_BUDGET[outcome]
        expected = Expected(outcome, self.reason, self.culprit, budget, status)
        for role, phase in product(self.roles, self.phases):
            place = f"{role}/{phase}"
            yield Row(
                f"{self.name}/{place}",
                self.fault,
                Phase(phase),
                role,
                self.tp,
                self.stack or ("unified" if role == "unified" else "pair"),
                expected,
                place in self.ci,
                self.unscaled == place,
                self.lost,
                self.why,
            )


def parse_rows(text: str, where: str) -> list[Row]:
    """Raises MatrixError."""
    try:
        entries = [_Entry(**table) for table in tomllib.loads(text)["row"]]
        rows = [row for entry in entries for row in entry.rows()]
        marks = {f"{entry.name}/{place}" for entry in entries for place in (*entry.ci, entry.unscaled) if place}
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise MatrixError(f"{where}: {error}") from error
    if unknown := marks - {row.id for row in rows}:
        raise MatrixError(f"{where}: ci or unscaled names what is no row: {sorted(unknown)}")
    return rows


def load_rows() -> list[Row]:
    """All rows; those that need the same kind of service lie together. Raises MatrixError."""
    folder = files("sluice_harness") / FOLDER
    found = [
        row
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
        for row in parse_rows(file.read_text(), file.name)
    ]
    if len({row.id for row in found}) != len(found):
        raise MatrixError("two rows have one name")
    stacks = list(dict.fromkeys(row.stack for row in found))
    return sorted(found, key=lambda row: (stacks.index(row.stack), row.phase is Phase.LOADING))


def select(rows: Iterable[Row], glob: str = "*", *, ci: bool = False, unscaled: bool = False) -> list[Row]:
    return [
        row
        for row in rows
        if fnmatch.fnmatch(row.id, glob) and (row.is_ci or not ci) and (row.unscaled or not unscaled)
    ]
