"""Findings as a text that a person reads from top to bottom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice_cli.diagnosis import stuck_first
from sluice_cli.status_words import phase_of, seconds

Findings = Mapping[str, Any]
NOTICE = "It may hold prompts and answers (step records carry tokens): treat it as you treat your users' data."
MAX_STACK_LINES = 60
# From one copy, which is less than a supervisor sees.
_LOOKS = {"wedged": "looks wedged", "slow": "looks slow", "dead": "has a dead thread"}


def render(findings: Findings) -> str:
    """Every line is ours: what a terminal would obey, or what would begin a line of its own, is told in letters."""
    findings = _in_letters(findings)
    parts = [
        _head(findings),
        _section("Who waited for whom", _waits(findings["waits"])),
        _section("Deaths", findings["deaths"]),
        _section(_stack_title(findings["stack"]), _stack(findings)),
        _section("Threads", _threads(findings)),
        _section("Work", _work(findings)),
        _section("Rooms", _rooms(findings["rooms"])),
        _section("Transfers", _transfers(findings["transfers"])),
        _section("Last steps", _steps(findings["steps"])),
        _section("Last events", [f"{_ago(e['age_s']):>12}  {e['writer']}: {e['text']}" for e in findings["events"]]),
        NOTICE,
    ]
    return "\n\n".join(part for part in parts if part)


def _in_letters(value: Any) -> Any:
    """The same plain value with the characters of its texts that cannot be printed escaped as Python escapes them."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, Mapping):
        return {_in_letters(key): _in_letters(item) for key, item in value.items()}
    return [_in_letters(item) for item in value] if isinstance(value, (list, tuple)) else value


def _section(title: str, lines: Sequence[str] | Iterator[str]) -> str:
    """Nothing where there is nothing to say."""
    told = list(lines)
    return "\n".join([title, *(f"  {line}" for line in told)]) if told else ""


def _ago(age_s: float | None) -> str:
    return "" if age_s is None else f"-{seconds(age_s)}"


def _head(findings: Findings) -> str:
    verdict = findings["verdict"]
    role = f" ({findings['role']})" if findings["role"] and findings["role"] != findings["service"] else ""
    lines = [f"{findings['service']}{role}: {_headline(verdict, findings['kind'])}"]
    lines += [f"  {line}" for line in _blame(findings)]
    if findings["meaning"]:
        lines += [f"  That means: {findings['meaning']}.", f"  What to do: {findings['remedy']}"]
    if findings["damaged"]:
        lines.append(f"  Damaged, and left out: {', '.join(findings['damaged'])}.")
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(findings["written_s"]))
    lines.append(
        f"  From {findings['source']}, written {written} (this machine's clock); ages below count back from then."
    )
    return "\n".join(lines)


def _headline(verdict: Mapping[str, Any], kind: str) -> str:
    name = str(verdict["verdict"])
    if kind == "recorder":
        told = _LOOKS.get(name, "nothing is over its budget")
        return told + (f": {verdict['reason']}" if verdict["reason"] else "")
    return f"{name.upper()}: {verdict['reason']}" if verdict["reason"] else name


def _blame(findings: Findings) -> Iterator[str]:
    verdict, row = findings["verdict"], findings["culprit"]
    culprit = verdict["culprit"]
    if not culprit:
        yield "One copy does not tell whether an idle loop still turns: a bundle does, or `sluice status`."
        return
    if verdict["verdict"] == "dead":
        yield f"{culprit} has died{': ' + verdict['detail'] if verdict['detail'] else ''}."
        if verdict["doing"]:
            yield f"It was last {verdict['doing']}."
    else:
        budget = f" (its budget: {verdict['budget_s']:.1f} s)" if verdict["budget_s"] else ""
        yield f"{culprit} had been {verdict['doing'] or 'idle'} without progress for {verdict['age_s']:.1f} s{budget}."
        if verdict["detail"]:
            yield f"{verdict['detail'][0].upper()}{verdict['detail'][1:]}."
    if verdict["pending"]:
        since = f" for {seconds(row['pending_s'])}" if row is not None and row["pending_s"] is not None else ""
        yield f"{verdict['pending']} pending{since}."
    elif verdict["verdict"] == "wedged":
        yield "Nothing was pending there: its loop, which turns at least once a second, did not turn."
    if row is not None:
        process = f", the kernel says {findings['process']}" if findings["process"] else ""
        yield f"Process {row['pid']}, thread {row['tid']}{process}."


def _waits(waits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for wait in waits:
        since = f", for {seconds(wait['for_s'])}" if wait["for_s"] is not None else ""
        yield f"{wait['who']} -> {wait['on']}: {wait['why']}{since}"


def _stack_title(stack: Mapping[str, Any]) -> str:
    return f"Stack of the culprit in {stack['process']} (innermost call first)"


def _stack(findings: Findings) -> Iterator[str]:
    stack = findings["stack"]
    if not stack["process"]:
        return
    if stack["why"]:
        yield f"({stack['why']})"
    yield from stack["lines"][:MAX_STACK_LINES]
    if len(stack["lines"]) > MAX_STACK_LINES:
        yield f"({len(stack['lines']) - MAX_STACK_LINES} more lines in {stack['process']}.stacks)"


def _threads(findings: Findings) -> Iterator[str]:
    for row in stuck_first(findings["threads"]):
        mark = "* " if row["name"] == findings["verdict"]["culprit"] else "  "
        pending = f"; {row['pending']} pending for {seconds(row['pending_s'])}" if row["pending"] else ""
        yield f"{mark}{row['name']:<18} {phase_of(row)} for {seconds(row['phase_s'])}{pending}"
    if findings["absent"]:
        yield f"  never started: {', '.join(findings['absent'])}"


def _work(findings: Findings) -> Iterator[str]:
    books, gateway = findings["books"], findings["gateway"]
    if books:
        yield f"as the leader wrote it {_ago(findings['books_age_s'])}:"
        phases = ", ".join(f"{count} {phase}" for phase, count in books["sequences"].items()) or "none"
        oldest = seconds(books["oldest_waiting_s"])
        waiting = f"; {books['waiting']} of them wait, the oldest for {oldest}" if books["waiting"] else ""
        yield f"sequences: {phases}{waiting}"
        for pool, states in books["ledger"].items():
            used = ", ".join(f"{count} {state}" for state, count in states.items() if count)
            yield f"{pool} records: {used}"
    if gateway:
        yield f"gateway: {gateway['queued']} queued, {gateway['running']} running"
        for engine in gateway["engines"]:
            yield f"{engine['role']} {engine['address']}: {engine['trouble'] or 'usable'}"


def _rooms(rooms: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for room in rooms if isinstance(rooms, list) else ():
        told = ", ".join(f"{key} {value}" for key, value in room.items() if key not in ("side", "sequence"))
        yield f"{room.get('side')} of sequence {room.get('sequence')}: {told}"


def _transfers(transfers: Mapping[str, Any] | None) -> Iterator[str]:
    if not transfers:
        return
    told = f"{transfers['leases']} leases, {transfers['in_flight']} READs in flight, {transfers['stranded']} stranded"
    yield told
    for pull in transfers.get("pulls", ()):
        yield ", ".join(f"{key} {value}" for key, value in pull.items())


def _steps(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        answer = step["answered_after_s"]
        ended = "NOT ANSWERED" if answer is None else f"answered after {1000 * answer:.1f} ms"
        counts = ", ".join(f"{count} {name}" for name, count in step["counts"].items())
        what = f"{step['tokens']} tokens in {step['rows']} rows: {ended} ({counts or 'kept in part only'})"
        yield f"{step['number']:>8}  sent {_ago(step['sent_s'])}, {what}"
        if step.get("record") is not None:
            yield f"          {json.dumps(step['record'])}"
