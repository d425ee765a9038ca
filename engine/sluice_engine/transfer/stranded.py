"""Records in which a transfer that will not end may still land; capped per pool, so that they never eat it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sluice_engine.transfer.messages import FenceWanted, PeerRefused
from sluice_engine.transfer.plan import Shapes
from sluice_engine.transfer.pull import RecordAt


class Stranded:
    """Above the cap of a pool the source is refused; if it still is `fence_after` later, a fence is wanted."""

    def __init__(self, shapes: Shapes, cap: float, fence_after: float) -> None:
        self._caps = {kind: max(1, int(shape.num_records * cap)) for kind, shape in shapes.items()}
        self._fence_after = fence_after
        self._by: dict[RecordAt, str] = {}
        # Refused sources: when a fence is due, None once it was asked for.
        self._refused: dict[str, float | None] = {}

    @property
    def records(self) -> frozenset[RecordAt]:
        return frozenset(self._by)

    def is_refused(self, peer: str) -> bool:
        return peer in self._refused

    def add(self, peer: str, records: Iterable[RecordAt], now: float, *, slots_full: bool) -> PeerRefused | None:
        """The refusal, if this was one too many. `slots_full`: nothing more can be in flight from this source."""
        self._by.update(dict.fromkeys(records, peer))
        counts = Counter(kind for kind, _ in self._by)
        over = any(count > self._caps[kind] for kind, count in counts.items())
        if peer in self._refused or not (over or slots_full):
            return None
        self._refused[peer] = now + self._fence_after
        return PeerRefused(peer, len(self._by), sum(self._caps[kind] for kind in counts))

    def end(self, records: Iterable[RecordAt]) -> None:
        for record in records:
            self._by.pop(record, None)

    def due(self, now: float) -> list[FenceWanted]:
        """Fences wanted from now on, each once. A source on which nothing is stranded any more is welcome again."""
        wanted = []
        for peer, at in list(self._refused.items()):
            if peer not in self._by.values():
                del self._refused[peer]
            elif at is not None and now >= at:
                self._refused[peer] = None
                wanted.append(FenceWanted(peer, len(self._by)))
        return wanted
