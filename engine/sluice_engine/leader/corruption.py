"""Records whose bytes changed after they were closed: the names of it, and how many are too many."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_engine.errors import EngineError
from sluice_engine.step import RecordRef

# A sequence that read a bad record and has published nothing since: it can be tried again.
RECORD_CORRUPT = "RecordCorrupt"
# One that has published tokens: they may be wrong, and cannot be taken back.
TOKENS_SUSPECT = "TokensSuspect"
# So many bad records within the window, and the engine or its memory is not to be trusted.
MOST_RECORDS, WINDOW_S = 3, 600.0


class MemoryCorrupt(EngineError):
    """Closed records of this engine keep changing by themselves: bad memory, or a process that writes into it."""


class Corruption:
    """The bad records of the last WINDOW_S seconds, each counted once however many checks have met it."""

    def __init__(self) -> None:
        self._seen: dict[RecordRef, float] = {}

    def counts(self, records: Iterable[RecordRef], now: float) -> bool:
        """Whether these are too many."""
        for ref in records:
            self._seen.setdefault(ref, now)
        self._seen = {ref: at for ref, at in self._seen.items() if at >= now - WINDOW_S}
        return len(self._seen) >= MOST_RECORDS

    def describe(self) -> str:
        return f"{len(self._seen)} closed records changed by themselves within {WINDOW_S:.0f} s"
