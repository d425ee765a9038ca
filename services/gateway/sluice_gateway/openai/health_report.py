"""What `/health` and `/version` say to callers that may not see where engines are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def _version() -> str:
    try:
        return version("sluice-serve")
    except PackageNotFoundError:  # it runs from a folder
        return "unknown"


VERSION = _version()
OPEN = ("model", "ready", "queued", "running", "counters")


def without_addresses(report: Mapping[str, Any]) -> dict[str, Any]:
    """Of an engine its role, and the first word of its trouble: what follows may name an address."""
    engines = [
        {"role": engine["role"], "trouble": str(engine["trouble"]).partition(":")[0]} for engine in report["engines"]
    ]
    told = {name: report[name] for name in OPEN}
    return told | {"reason": "" if report["ready"] else "no usable pair of engines", "engines": engines}
