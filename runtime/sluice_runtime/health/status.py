"""What a supervisor tells over HTTP, as plain values from its last look at the recorder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice_runtime.health.layout import IDENTITY, State
from sluice_runtime.health.proc import look_at_thread
from sluice_runtime.health.reading import Copy, RowReading, look_at_threads
from sluice_runtime.health.stacks import collect_stacks
from sluice_runtime.probes import Answer, Query, Route, json_answer

if TYPE_CHECKING:
    from sluice_runtime.health.guard import Guard

STACKS_S = 2.0
# A golden prompt through every pair comes with its own issue; until then it is unknown, which counts as good.
CANARY = "unknown"
EVENTS_TOLD = 20


def probe_routes(guard: Guard) -> Mapping[str, Route]:
    """Reachable from the cluster: no prompts, no stacks."""

    def health(_: Query) -> Answer:
        return json_answer(200 if guard.is_live else 503, verdict_of(guard))

    def ready(_: Query) -> Answer:
        return json_answer(
            200 if guard.is_ready else 503, verdict_of(guard) | {"ready": guard.is_ready, "canary": CANARY}
        )

    def started(_: Query) -> Answer:
        done = guard.watch.started and not guard.watch.verdict.is_fatal
        return json_answer(200 if done else 503, verdict_of(guard) | {"loaded": guard.watch.loaded})

    return {
        "GET /livez": health,
        "GET /health": health,
        "GET /readyz": ready,
        "GET /startupz": started,
        "GET /status": lambda _: json_answer(200, status_of(guard)),
        "GET /metrics": lambda _: metrics_of(guard),
    }


def debug_routes(guard: Guard) -> Mapping[str, Route]:
    """Loopback only."""

    async def stacks(_: Query) -> Answer:
        pids = {**guard.service.pids(), **guard.service.others()}
        told = await asyncio.to_thread(collect_stacks, guard.service.run_dir, pids, STACKS_S)
        return Answer(200, "\n".join(f"=== {name}\n{text}" for name, text in told.items()).encode(), "text/plain")

    def maintain(query: Query) -> Answer:
        try:
            seconds = float(query.get("seconds", ""))
        except ValueError:
            return json_answer(400, {"error": "seconds: how long, a number; e.g. POST /debug/maintenance?seconds=300"})
        granted = guard.watch.maintain(seconds)
        guard.event(f"maintenance window of {granted:.0f} s")
        return json_answer(200, {"maintenance_s": granted})

    def mirror(name: str) -> Route:
        def told(_: Query) -> Answer:
            found = Copy(guard.recorder.view).mirror(name)
            age = (time.monotonic_ns() - found.at_ns) / 1e9 if found.at_ns else None
            return json_answer(200, {"age_s": age, "value": found.value})

        return told

    return {
        "GET /debug/verdict": lambda _: json_answer(200, verdict_of(guard)),
        "GET /debug/rows": lambda _: json_answer(200, rows_of(guard)),
        **{f"GET /debug/{path}": mirror(name) for path, name in guard.service.kind.debug.items()},
        "GET /debug/steps": lambda _: json_answer(200, steps_of(guard)),
        "GET /debug/events": lambda _: json_answer(200, events_of(guard)),
        "GET /debug/stacks": stacks,
        "POST /debug/maintenance": maintain,
    }


def verdict_of(guard: Guard) -> dict[str, Any]:
    watch = guard.watch
    return watch.verdict.as_dict() | {
        "name": guard.service.name,
        "role": guard.service.role,
        "started": watch.started,
        "draining": guard.draining,
        "collecting_evidence": guard.collecting,
        "quarantined": guard.quarantined,
        "maintenance_s": round(watch.maintenance_s, 3),
    }


def status_of(guard: Guard) -> dict[str, Any]:
    """One service, for `sluice status` and the status page: no prompts in it."""
    copy = Copy(guard.recorder.view)
    return verdict_of(guard) | {
        "ready": guard.is_ready,
        "message": str(guard.watch.verdict),
        "pids": dict(guard.service.pids()),
        "memory_bytes": {name: resident_bytes(pid) for name, pid in guard.service.pids().items()},
        "rows": rows_of(guard),
        **guard.service.kind.report(copy, time.monotonic_ns()),
        "certificate": certificate_of(copy.mirror(IDENTITY).value, time.time()),
        "events": events_of(guard)[-EVENTS_TOLD:],
        "debug_port": guard.debug_port,
    }


def rows_of(guard: Guard) -> list[dict[str, Any]]:
    """As they are now, which may be newer than what the last verdict saw."""
    now = time.monotonic_ns()
    rows = look_at_threads(Copy(guard.recorder.view).rows(), look_at_thread)
    return [describe_row(row, now) for row in rows.values()]


def describe_row(row: RowReading, now_ns: int) -> dict[str, Any]:
    """Ages are seconds."""
    return {
        "name": row.name,
        "state": row.state.name.lower(),
        "thread": row.thread.value,
        "pid": row.pid,
        "tid": row.tid,
        "ticks": row.ticks,
        "progress": row.progress,
        "pending": row.pending,
        "pending_s": age_s(row.pending_since_ns, now_ns),
        "step": row.step,
        "phase": row.phase.name.lower() if row.state is not State.ABSENT else "",
        "phase_s": age_s(row.phase_since_ns, now_ns),
        "expected_s": round(row.expected_ns / 1e9, 6),
        "count_a": row.count_a,
        "count_b": row.count_b,
        "doing": row.doing,
    }


def steps_of(guard: Guard) -> list[dict[str, Any]]:
    """The frames are in bundles; here are their sizes."""
    return [
        {key: value for key, value in asdict(step).items() if key != "frame"}
        for step in Copy(guard.recorder.view).steps()
    ]


def events_of(guard: Guard) -> list[dict[str, Any]]:
    now = time.monotonic_ns()
    return [
        {"writer": event.writer, "age_s": age_s(event.at_ns, now), "text": event.text}
        for event in Copy(guard.recorder.view).events()
    ]


def metrics_of(guard: Guard) -> Answer:
    from sluice_runtime.health.exposition import exposition

    text = exposition(guard.service.kind.metrics, status_of(guard))
    return Answer(200, text, "text/plain; version=0.0.4; charset=utf-8")


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError, ValueError):
        return 0


def certificate_of(told: Any, now: float) -> dict[str, Any] | None:
    """With what is left of its life now, in seconds, also when the process that has it stands still. None: no TLS."""
    return {**told, "left_s": round(told["not_after"] - now, 3)} if isinstance(told, dict) else None


def age_s(at_ns: int, now_ns: int) -> float | None:
    """Seconds from one time to another, both CLOCK_MONOTONIC in ns; None if the first never came."""
    return round((now_ns - at_ns) / 1e9, 3) if at_ns else None
