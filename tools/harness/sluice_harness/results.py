"""Results as JSON lines: one per row and turn, appended as they come, so that a run can go on where it was left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Result:
    """`detect_s`: from the fault's effect to the verdict (or to the prober's kill); None where there is none.
    No `problems`: the row is as the matrix has it."""

    id: str
    turn: int
    floor_s: float
    problems: tuple[str, ...]
    outcome: str = ""
    reason: str = ""
    culprit: str = ""
    exit: int | None = None
    detect_s: float | None = None
    allowed_s: float | None = None
    wall_s: float = 0.0
    killed_healthy: bool = False
    is_virtual: bool = False

    @property
    def is_ok(self) -> bool:
        return not self.problems


def read_results(path: Path) -> list[Result]:
    """A line that was not written to its end is left out."""
    known = {field.name for field in fields(Result)}
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
            found.append(
                Result(**{key: told[key] for key in told.keys() & known} | {"problems": tuple(told["problems"])})
            )
        except (ValueError, TypeError, KeyError):
            continue
    return found


def append_result(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def line_of(result: Result) -> str:
    """One line of the table."""
    detect = "" if result.detect_s is None else f"{result.detect_s:.1f}"
    allowed = "" if result.allowed_s is None else f"{result.allowed_s:.1f}"
    verdict = ": ".join(part for part in (result.outcome, result.reason, result.culprit) if part)
    status = "" if result.exit is None else str(result.exit)
    mark = "ok  " if result.is_ok else "FAIL"
    return f"{mark} {result.id:58} {verdict:50} {status:>4} {detect:>6} {allowed:>6} {result.wall_s:6.1f}"


HEADER = f"     {'row':58} {'verdict':50} exit   s to  limit  row's s"


def summary_of(results: Sequence[Result]) -> list[str]:
    """Counts, and how long detection took for each reason: median and worst, over what it may take; not the seconds of
    a virtual clock."""
    by_reason: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.detect_s is not None and not result.is_virtual:
            by_reason[result.reason or result.outcome].append(result)
    lines = [f"{'reason':24} {'rows':>4} {'median s':>9} {'worst s':>8} {'limit s':>8}"]
    for reason, told in sorted(by_reason.items()):
        times = [r.detect_s for r in told if r.detect_s is not None]
        limit = min((r.allowed_s for r in told if r.allowed_s is not None), default=0.0)
        lines.append(f"{reason:24} {len(times):>4} {median(times):>9.2f} {max(times):>8.2f} {limit:>8.1f}")
    return [*lines, *_counts(results)]


def _counts(results: Iterable[Result]) -> list[str]:
    told = list(results)
    failed = [result for result in told if not result.is_ok]
    killed = sum(result.killed_healthy for result in told)
    healthy = sum(result.outcome == "healthy" or result.killed_healthy for result in told)
    return [
        f"{len(told)} rows, {len(failed)} failed; {healthy} healthy ones, of which {killed} were killed",
        *(f"FAIL {result.id}: {problem}" for result in failed for problem in result.problems),
    ]
