"""What `sluice chaos` runs, and what it prints."""

from __future__ import annotations

from pathlib import Path

from sluice_harness.results import HEADER, Result, line_of, summary_of
from sluice_harness.rows import load_rows, select
from sluice_harness.runner import Scale, run_rows
from sluice_harness.storm import GOAL_S, run_storm


def show_rows(glob: str, *, ci: bool, unscaled: bool) -> int:
    for row in select(load_rows(), glob, ci=ci, unscaled=unscaled):
        expected = row.expected
        told = ": ".join(part for part in (expected.outcome.value, expected.reason, expected.culprit) if part)
        print(f"{row.id:58} {told:50} {row.why}")
    return 0


def matrix(glob: str, floor_s: float, *, ci: bool, unscaled: bool, repeat: int, results: Path | None) -> int:
    rows = select(load_rows(), glob, ci=ci, unscaled=unscaled)
    if not rows:
        print(f"no row is called {glob}")
        return 2
    scale = Scale.unscaled() if unscaled else Scale.of(floor_s)
    print(f"{len(rows)} rows, floor {scale.floor_s:g} s\n{HEADER}", flush=True)
    told = run_rows(rows, scale, repeat=repeat, results=results, say=_say)
    print()
    print("\n".join(summary_of(told)))
    return 0 if all(result.is_ok for result in told) else 1


def storm(sessions: int, rounds: int) -> int:
    told = run_storm(sessions, rounds, Scale.unscaled().health)
    print(f"unloaded: first token after {told.unloaded_s:.3f} s (median)")
    for number, one in enumerate(told.rounds, 1):
        phases = ", ".join(f"{count} {phase}" for phase, count in one.phases.items())
        print(f"round {number:3}: {one.first_token_s:.3f} s after {phases} were dropped")
    worst, middle = (value - told.unloaded_s for value in (told.worst_s, told.median_s))
    print(f"{sessions} sessions, {rounds} rounds: median +{middle:.3f} s, worst +{worst:.3f} s (goal +{GOAL_S:.1f} s)")
    for name, change in told.grown.items():
        print(f"not back to where it was: {name}: {change}")
    print("books exact after each round" + ("" if told.grown else "; threads and descriptors as before"))
    return 1 if told.grown or worst > GOAL_S else 0


def _say(result: Result) -> None:
    print(line_of(result), flush=True)
    for problem in result.problems:
        print(f"       {problem}", flush=True)
