"""What a person sees of a stack, as plain values: one entry per service, from what its supervisor tells or does not.

`sluice status` and the gateway's status page show the same. No prompts in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Status = Mapping[str, Any]
EVENTS_SHOWN = 30
NO_ANSWER = "no answer"
# In this order: an engine with a trouble of its own shows that rather than "not ready".
_STATES = (
    ("quarantined", "quarantined"),
    ("collecting_evidence", "collecting evidence"),
    ("draining", "draining"),
)


@dataclass(frozen=True, slots=True)
class Told:
    """`status`: the body of a supervisor's /status; None when it did not answer, and `trouble` says why. `link`: what a
    gateway's own connection to the engine lacks."""

    name: str
    role: str
    url: str
    status: Status | None = None
    trouble: str = ""
    link: str = ""


def stack_view(told: Sequence[Told]) -> dict[str, Any]:
    """{services, events}; ages are seconds, memory is bytes."""
    services = [service_view(one) for one in told]
    events = [
        {"service": service["name"], **event}
        for service, one in zip(services, told)
        for event in (one.status or {}).get("events", ())
    ]
    events.reverse()  # of two of one moment the later one comes first: each service tells them in order
    events.sort(key=lambda event: event["age_s"])
    return {"services": services, "events": events[:EVENTS_SHOWN]}


def service_view(told: Told) -> dict[str, Any]:
    known = {"name": told.name, "role": told.role, "url": told.url, "link": told.link}
    status = told.status
    if status is None:
        return {**known, "answers": False, "state": NO_ANSWER, "message": told.trouble}
    return {
        **known,
        "name": status["name"],
        "role": status["role"],
        "answers": True,
        "debug_port": status.get("debug_port", 0),
        "state": _state(status),
        **{key: status[key] for key in ("verdict", "reason", "culprit", "doing", "age_s", "budget_s", "pending")},
        "message": _message(status),
        "ready": status["ready"],
        "maintenance_s": status["maintenance_s"],
        "processes": _processes(status),
        "memory_bytes": sum(status["memory_bytes"].values()),
        **_books(status.get("books") or {}),
        "books_age_s": status.get("books_age_s"),
        "transfers": _pick(status.get("transfers"), "leases", "in_flight", "stranded"),
        "gateway": _pick(status.get("gateway"), "queued", "running", "counters", "ready", "reason"),
    }


def _state(status: Status) -> str:
    if status["verdict"] in ("wedged", "dead") and not status["quarantined"] and not status["collecting_evidence"]:
        return str(status["verdict"])
    told = next((word for key, word in _STATES if status[key]), "")
    return told or ("starting" if not status["started"] else "ready" if status["ready"] else "not ready")


def _message(status: Status) -> str:
    """In one line, what is wrong or slow; empty when nothing is."""
    if status["verdict"] in ("wedged", "dead"):
        return str(status["message"])
    if status["verdict"] == "slow":
        told = f"{status['culprit']} is {status['doing']} for {status['age_s']:.1f} s of {status['budget_s']:.1f} s"
        return f"slow: {told} ({status['reason']} if it stays so)"
    pairs = (status.get("books") or {}).get("pairs", ())
    return "; ".join(f"no records from {pair['source']}: {pair['reason']}: {pair['detail']}" for pair in pairs)


def _processes(status: Status) -> list[dict[str, Any]]:
    """Every process that lives or has left something in its threads' rows, with these."""
    threads: dict[str, list[dict[str, Any]]] = {name: [] for name in status["pids"]}
    for row in status["rows"]:
        if row["state"] == "absent":
            continue
        process = row["name"].partition(".")[0]
        threads.setdefault(process, []).append(
            _pick(
                row, "name", "state", "thread", "phase", "phase_s", "pending", "pending_s", "step", "progress", "doing"
            )
        )
    return [
        {
            "name": name,
            "pid": status["pids"].get(name),
            "memory_bytes": status["memory_bytes"].get(name, 0),
            "threads": rows,
        }
        for name, rows in threads.items()
    ]


def _books(books: Status) -> dict[str, Any]:
    """Of an engine; zeros where nothing was mirrored yet."""
    sequences: Mapping[str, int] = books.get("sequences", {})
    waiting = books.get("waiting", 0)
    return {
        "queue": {
            "waiting": waiting,
            "running": max(0, sum(sequences.values()) - waiting),
            "max_running": books.get("max_running", 0),
            "oldest_s": books.get("oldest_waiting_s", 0.0),
        },
        "sequences": dict(sequences),
        "rooms": dict(books.get("rooms", {})),
        "transport": dict(books.get("transport", {})),
        "pairs": list(books.get("pairs", ())),
        "pools": [
            {"name": name, "total": sum(states.values()), "states": dict(states)}
            for name, states in books.get("ledger", {}).items()
        ],
        "step": books.get("step", 0),
    }


def _pick(value: Any, *keys: str) -> dict[str, Any]:
    return {key: value[key] for key in keys if key in value} if isinstance(value, Mapping) else {}
