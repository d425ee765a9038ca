"""From evidence to findings: plain values, no words yet. Ages are seconds before the recorder was copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sluice_cli.advice import advice_on
from sluice_cli.evidence import Evidence
from sluice_cli.shapes import read_mirrors
from sluice_cli.step_words import step_counts, step_tokens
from sluice_engine.watched_rows import EngineMirror, engine_rows_named
from sluice_gateway.status.watched_rows import GATEWAY_MIRROR, GATEWAY_ROWS
from sluice_runtime.health.layout import Phase, State
from sluice_runtime.health.reading import Copy, Mirror, Reading, RowReading
from sluice_runtime.health.status import describe_row
from sluice_runtime.health.verdict import Budgets, verdict
from sluice_runtime.health.watched import Watched

STEPS, EVENTS = 10, 20
Rows = Mapping[str, RowReading]


def diagnose(evidence: Evidence, show_tokens: bool = False) -> dict[str, Any]:
    copy, rows = evidence.copy, evidence.copy.rows()
    mirrors, damaged = read_mirrors(copy)
    now = taken_at(copy, mirrors)
    told = evidence.verdict or guess(rows, now)
    about = evidence.about or {}
    spec = about.get("spec") or {}
    books, gateway = mirrors[EngineMirror.BOOKS], mirrors[GATEWAY_MIRROR]
    culprit = row_of(str(told["culprit"]), rows)
    advice = advice_on(str(told["reason"]))
    return {
        "source": str(evidence.path),
        "kind": "recorder" if evidence.verdict is None else "bundle",
        "written_s": evidence.written_s,
        "damaged": [*evidence.damaged, *damaged],
        "service": spec.get("name") or ("gateway" if "gateway.loop" in rows else "engine"),
        "role": spec.get("role") or ("gateway" if "gateway.loop" in rows else ""),
        "verdict": told,
        "meaning": advice.meaning if advice else "",
        "remedy": advice.remedy if advice else "",
        "culprit": None if culprit is None else describe_row(culprit, now),
        "waits": waits(rows, now, gateway.value),
        "deaths": deaths(rows, evidence),
        "threads": [describe_row(row, now) for row in rows.values() if row.state is not State.ABSENT],
        "absent": [row.name for row in rows.values() if row.state is State.ABSENT],
        "books": books.value,
        "books_age_s": _age(books.at_ns, now),
        "rooms": mirrors[EngineMirror.LEASES].value or [],
        "transfers": mirrors[EngineMirror.TRANSFERS].value,
        "gateway": gateway.value,
        "steps": [_step(step, now, show_tokens) for step in copy.steps()[-STEPS:]],
        "events": [
            {"writer": event.writer, "age_s": _age(event.at_ns, now), "text": event.text}
            for event in copy.events()[-EVENTS:]
        ],
        "stack": stack_of(str(told["culprit"]), culprit, evidence.stacks),
        "process": process_state(str(told["culprit"]).partition(".")[0], evidence.processes),
    }


def taken_at(copy: Copy, mirrors: Mapping[str, Mirror]) -> int:
    """CLOCK_MONOTONIC of the newest mark in it, ns: a copy does not know when it was made."""
    marks = [0]
    for row in copy.rows().values():
        marks += [row.phase_since_ns, row.pending_since_ns]
    marks += [mirror.at_ns for mirror in mirrors.values()]
    marks += [event.at_ns for event in copy.events()]
    for step in copy.steps():
        marks += [step.sent_at_ns, step.done_at_ns]
    return max(marks)


def guess(rows: Rows, now_ns: int) -> dict[str, object]:
    """A verdict from one copy. Work that is pending says since when; whether an idle loop turns takes two looks, so a
    loop is not suspected here."""
    before = {
        name: replace(row, ticked_s=now_ns / 1e9, progressed_s=(row.pending_since_ns or now_ns) / 1e9)
        for name, row in rows.items()
    }
    after = Reading(now_ns / 1e9, rows)
    return verdict(Reading(0.0, before), after, Budgets(), _watched(rows)).as_dict()


def _watched(names: Iterable[str]) -> tuple[Watched, ...]:
    names = tuple(names)
    return (*engine_rows_named(names), *(row for row in GATEWAY_ROWS if row.name in names))


def row_of(culprit: str, rows: Rows) -> RowReading | None:
    """Its row; of a process, the one that was busy last. A row that nobody wrote: its loop's."""
    found = rows.get(culprit)
    if found is not None and found.state is not State.ABSENT:
        return found
    process = culprit.partition(".")[0]
    own = [row for row in rows.values() if row.name.partition(".")[0] == process and row.state is not State.ABSENT]
    return max(own, key=lambda row: (bool(row.pending), row.phase_since_ns), default=found)


def waits(rows: Rows, now: int, gateway: Any) -> list[dict[str, Any]]:
    """[{who, on, why, for_s}]: each arrow that the numbers prove."""
    found = [*_step_waits(rows, now), *_transfer_waits(rows, now)]
    leader = rows.get("leader.loop")
    if leader is not None and leader.pending and leader.progress >= leader.step:
        why = f"{leader.pending} sequences wait though there is room for them"
        found.append(_wait("sequences", "leader.loop", why, leader.pending_since_ns, now))
    for name, what in (("gateway.loop", "choices that could be placed"), ("gateway.tokenizer", "prompts in the pool")):
        row = rows.get(name)
        if row is not None and row.pending:
            found.append(_wait("requests", name, f"{row.pending} {what}", row.pending_since_ns, now))
    if isinstance(gateway, dict) and gateway.get("queued") and gateway.get("reason"):
        found.append(_wait("requests", "engines", f"{gateway['queued']} queued; {gateway['reason']}", 0, now))
    return found


def _step_waits(rows: Rows, now: int) -> list[dict[str, Any]]:
    leader = rows.get("leader.loop")
    if leader is None or not leader.pending or leader.progress >= leader.step:
        return []
    found = []
    for name, rank in rows.items():
        if not re.fullmatch(r"rank\d+\.loop", name) or rank.progress >= leader.step:
            continue
        why = f"step {leader.step - 1} was sent, this rank has answered {_answered(rank)}"
        found.append(_wait("leader.loop", name, why, leader.pending_since_ns, now))
        device = rows.get(name.replace(".loop", ".device"))
        if device is not None and device.pending:
            found.append(_wait(name, device.name, "the model runs", device.pending_since_ns, now))
        elif rank.phase is Phase.COLLECTIVE:
            on = name.replace(".loop", ".collective")
            found.append(_wait(name, on, "it is in a collective", rank.phase_since_ns, now))
    if not found:
        why = f"all ranks have answered step {leader.step - 1}"
        found.append(_wait("sequences", "leader.loop", why, leader.pending_since_ns, now))
    return found


def _answered(rank: RowReading) -> str:
    return f"up to step {rank.progress - 1}" if rank.progress else "none"


def _transfer_waits(rows: Rows, now: int) -> list[dict[str, Any]]:
    poller = rows.get("sidecar.poller")
    if poller is None or not poller.pending:
        return []
    return [_wait("leader.lease", poller.name, f"{poller.pending} pulls owe records", poller.pending_since_ns, now)]


def _wait(who: str, on: str, why: str, since_ns: int, now: int) -> dict[str, Any]:
    return {"who": who, "on": on, "why": why, "for_s": _age(since_ns, now)}


def deaths(rows: Rows, evidence: Evidence) -> list[str]:
    """Loops that have ended, and processes that were said to have."""
    found = [f"{row.name}: its loop has ended: {row.doing or row.phase.name.lower()}" for row in rows.values()
             if row.state is State.FAILED]  # fmt: skip
    said = [event.text for event in evidence.copy.events() if re.search(r" (ended|died) with |^died: ", event.text)]
    return found + said


def stack_of(culprit: str, row: RowReading | None, stacks: Mapping[str, str]) -> dict[str, Any]:
    """{process, lines, why}: of the culprit's thread, innermost call first, as faulthandler prints it."""
    process = culprit.partition(".")[0]
    text = stacks.get(process, "")
    threads = re.split(r"\n\n(?=(?:Current t|T)hread 0x)", text.strip())
    if not any("thread 0x" in thread.lower() for thread in threads):
        return {"process": process, "lines": [], "why": text.strip() or "there are no stacks of it here"}
    chosen = [thread for thread in threads if row is not None and _is_of(thread, row)]
    why = "" if chosen else "which of its threads it was is not known; these are all"
    return {"process": process, "lines": "\n\n".join(chosen or threads).splitlines(), "why": why}


def _is_of(thread: str, row: RowReading) -> bool:
    if row.name == "gateway.tokenizer":  # its work is in the threads of a pool
        return "marks.py" in thread and "guarded" in thread
    if row.ident:
        return re.search(rf"hread 0x0*{row.ident:x}\b", thread) is not None
    return row.tid == row.pid and thread.startswith("Current thread")


def process_state(process: str, processes: Mapping[str, str]) -> str:
    """The kernel's word on it, e.g. "T (stopped)"; empty where it is not told."""
    found = re.search(r"^State:\s*(.+)$", processes.get(process, ""), re.MULTILINE)
    return found[1] if found else ""


def _step(step: Any, now: int, show_tokens: bool) -> dict[str, Any]:
    told = {
        "number": step.number,
        "sent_s": _age(step.sent_at_ns, now),
        "answered_after_s": round((step.done_at_ns - step.sent_at_ns) / 1e9, 6) if step.done_at_ns else None,
        "expected_s": round(step.expected_ns / 1e9, 6),
        "tokens": step.tokens,
        "rows": step.rows,
        "bytes": step.frame_bytes,
        "counts": step_counts(step.frame, step.frame_bytes),
    }
    return told | ({"record": step_tokens(step.frame, step.frame_bytes)} if show_tokens else {})


def _age(at_ns: int, now: int) -> float | None:
    return round((now - at_ns) / 1e9, 3) if at_ns else None


def stuck_first(threads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with work behind them, longest first; then the rest as they came."""
    return sorted(threads, key=lambda row: -(row["pending_s"] or 0.0) if row["pending"] else 1.0)
