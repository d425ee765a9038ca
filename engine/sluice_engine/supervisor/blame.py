"""Which process caused it when several processes of an engine died together."""

from __future__ import annotations

import re

from sluice_engine.watched_rows import EngineReason
from sluice_runtime.health.reading import Exit


def first_cause(exits: list[Exit]) -> list[Exit]:
    """Of deaths that came together, the one that brought the others about comes first.

    A leader that gives a reason knows it: its own, or a rank's. One that only lost a rank's connection does not, and a
    process that ended with 0 has followed another one.
    """

    def rank_of(gone: Exit) -> int:
        if gone.process == "leader" and gone.reason and gone.reason != EngineReason.RANK_DEAD:
            return 0
        if gone.status == 0:
            return 3
        return 2 if gone.process == "leader" else 1

    ordered = sorted(exits, key=rank_of)
    return [blamed(gone) for gone in ordered]


def blamed(gone: Exit) -> Exit:
    """The leader's last words about a rank are that rank's."""
    found = re.match(r"rank (\d+): ", gone.detail) if gone.process == "leader" else None
    return gone if found is None else Exit(f"rank{found[1]}", None, gone.reason, gone.detail[found.end() :])
