"""An engine as its supervisor guards it: which threads are watched, and what is reported beside their health."""

from __future__ import annotations

from typing import Any

from sluice_engine.supervisor.engine_metrics import ENGINE_METRICS
from sluice_engine.watched_rows import EngineMirror, EngineWriter, engine_rows, named_death
from sluice_protocol.generate import Role
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.service import ServiceKind
from sluice_runtime.health.status import age_s

_DEBUG = {"ledger": EngineMirror.BOOKS, "leases": EngineMirror.LEASES, "transfers": EngineMirror.TRANSFERS}


def engine_kind(role: Role, transport: str, ranks: int = 1) -> ServiceKind:
    """Of an engine in this role; `transport`: as in its spec."""
    rows = engine_rows(role, transport, ranks)
    return ServiceKind(rows, named_death, tuple(EngineMirror), tuple(EngineWriter), report_of, _DEBUG, ENGINE_METRICS)


def report_of(copy: Copy, now_ns: int) -> dict[str, Any]:
    """What GET /status has of an engine beside its health; None for what was not written yet."""
    books, transfers = copy.mirror(EngineMirror.BOOKS), copy.mirror(EngineMirror.TRANSFERS)
    return {
        "books": books.value,
        "books_age_s": age_s(books.at_ns, now_ns),
        "transfers": _without_pulls(transfers.value),
    }


def _without_pulls(transfers: Any) -> Any:
    return {key: value for key, value in transfers.items() if key != "pulls"} if isinstance(transfers, dict) else None
