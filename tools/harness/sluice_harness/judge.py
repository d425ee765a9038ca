"""What was seen against what the matrix expects. Pure but for reading a bundle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sluice_harness.bundle import problems_of
from sluice_harness.observe import Seen
from sluice_harness.rows import Expected, Outcome


def judge_verdict(expected: Expected, seen: Seen, detect_s: float, allowed_s: float | None) -> Iterable[str]:
    if seen.outcome is not expected.outcome:
        yield f"{seen.outcome} instead of {expected.outcome}: {seen.message}"
        return
    if seen.reason != expected.reason:
        yield f"the reason is {seen.reason!r}, not {expected.reason!r}: {seen.message}"
    if seen.culprit != expected.culprit:
        yield f"the culprit is {seen.culprit!r}, not {expected.culprit!r}: {seen.message}"
    if allowed_s is not None and detect_s > allowed_s:
        yield f"it was told after {detect_s:.1f} s; {allowed_s:.1f} s are allowed"


def judge_end(expected: Expected, status: int, left: list[str]) -> Iterable[str]:
    if expected.exit is not None and status != expected.exit:
        yield f"the exit status is {status}, not {expected.exit}"
    if left:
        yield f"left running: {', '.join(left)}"


def judge_evidence(expected: Expected, termination: Path, bundles: list[Path], key: str) -> Iterable[str]:
    """Of a service that ended itself. Where evidence cannot be had, the message says so (`budget` is the same)."""
    message = termination.read_text() if termination.exists() else ""
    if expected.reason not in message or expected.culprit not in message:
        yield f"the termination message is {message!r}"
    if "no evidence:" in message:
        yield from _without_evidence(message, bundles)
        return
    if not bundles:
        yield "there is no bundle"
        return
    if bundles[-1].name not in message:
        yield f"the termination message does not say where the bundle is: {message!r}"
    yield from (f"{bundles[-1].name}: {problem}" for problem in problems_of(bundles[-1], key, expected.reason))


def _without_evidence(message: str, bundles: list[Path]) -> Iterable[str]:
    if bundles:
        yield f"there is a bundle after all: {bundles[-1]}, {message}"


def is_self_told(outcome: Outcome) -> bool:
    """The service's own supervisor told it, with evidence."""
    return outcome in (Outcome.WEDGED, Outcome.DEAD)
