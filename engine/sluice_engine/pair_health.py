"""Whether this reader can take records from each of its sources: failures in a row, of leases, Hellos and pings.

A pair can fail though both of its engines are well: the lane between them is cut, or one of them is not let in by the
other. Neither engine's own health shows that, so the reader keeps count and the gateways hear of it. No clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

# In a row, and the pair is called failing; the first success ends that.
MOST_FAILURES = 2
# Sources that are remembered; the one that was used longest ago is forgotten first.
MOST_SOURCES = 1024
# What ends a lease for a reason of the source's or of the lane to it. Others (a client that went) say nothing of it.
LANE_REASONS = frozenset(
    {
        "SourceLost",
        "SourceSilent",
        "TransferFailed",
        "Deadline",
        "PeerLost",
        "PeerRefused",
        "FingerprintMismatch",
        "DigestMismatch",
        "TrailerMismatch",
        "GenerationMismatch",
        "IdentityMismatch",
    }
)


@dataclass(slots=True)
class _Source:
    failures: int = 0
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PairTrouble:
    """A source that cannot be read from at the moment."""

    source: str
    failures: int
    reason: str
    detail: str


class PairHealth:
    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def succeeded(self, source: str) -> bool:
        """Whether it was failing until now."""
        known = self._of(source)
        was_failing = known.failures >= MOST_FAILURES
        known.failures, known.reason, known.detail = 0, "", ""
        return was_failing

    def failed(self, source: str, reason: str, detail: str) -> bool:
        """Whether it is failing from now on."""
        known = self._of(source)
        known.failures += 1
        known.reason, known.detail = reason, detail
        return known.failures == MOST_FAILURES

    def failures(self, source: str) -> int:
        known = self._sources.get(source)
        return 0 if known is None else known.failures

    def failing(self) -> tuple[PairTrouble, ...]:
        return tuple(
            PairTrouble(source, known.failures, known.reason, known.detail)
            for source, known in self._sources.items()
            if known.failures >= MOST_FAILURES
        )

    def forget(self, source: str) -> None:
        self._sources.pop(source, None)

    def _of(self, source: str) -> _Source:
        known = self._sources.pop(source, None) or _Source()
        self._sources[source] = known
        if len(self._sources) > MOST_SOURCES:
            del self._sources[next(iter(self._sources))]
        return known
