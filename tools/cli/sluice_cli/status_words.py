"""Numbers of a view as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def seconds(value: float | None) -> str:
    """Empty for None."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def phase_of(thread: Mapping[str, Any]) -> str:
    """What it was last doing, and what is odd about it."""
    odd = [thread["thread"]] if thread["thread"] in ("stopped", "gone") else []
    odd += ["its loop has ended"] if thread["state"] == "failed" else []
    odd += [thread["doing"]] if thread["doing"] else []
    return str(thread["phase"]) + (f" ({'; '.join(odd)})" if odd else "")


def bar(states: Mapping[str, int], total: int, cells: int) -> list[tuple[str, int]]:
    """[(state, cells)], "" for what is free; `cells` together. A state with any record has a cell of its own."""
    there = [state for state, count in states.items() if state != "free" and count]
    share = cells - len(there)
    wide = {state: 1 + share * states[state] // total for state in there}
    left = cells - sum(wide.values())
    if there and not states.get("free"):
        wide[max(there, key=states.__getitem__)] += left
        left = 0
    return [*wide.items(), ("", left)]
