"""Whether this reader can take records from each of its sources: failures in a row, of leases, Hellos and pings.

A pair can fail though both of its engines are well: the lane between them is cut, or one of them is not let in by the
other. Neither engine's own health shows that, so the reader keeps count and the gateways hear of it. No clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# In a row, and the pair is called failing; the first success of the same kind ends that, a lease's that of looks too.
MOST_FAILURES = 2
# Failures of leases say nothing any more after so long: a pair that is avoided gets none that could show it well again.
LEASE_S = 30.0
MAX_DETAIL, MOST_TOLD = 200, 32
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
class _Count:
    """Of one kind: leases, or looks (Hellos and pings)."""

    failures: int = 0
    reason: str = ""
    detail: str = ""
    at_s: float = 0.0


@dataclass(slots=True)
class _Source:
    leases: _Count = field(default_factory=_Count)
    looks: _Count = field(default_factory=_Count)

    def worst(self, now: float) -> _Count:
        if self.leases.failures and now - self.leases.at_s > LEASE_S:
            self.leases = _Count()
        return max(self.leases, self.looks, key=lambda count: count.failures)


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

    def succeeded(self, source: str, now: float, *, by_lease: bool) -> bool:
        """Whether it was failing until now. A look takes back no failures of leases: a lane may carry little and not
        much, or carry it wrongly."""
        known = self._of(source)
        was_failing = known.worst(now).failures >= MOST_FAILURES
        known.looks = _Count()
        if by_lease:
            known.leases = _Count()
        return was_failing and known.worst(now).failures < MOST_FAILURES

    def failed(self, source: str, reason: str, detail: str, now: float, *, by_lease: bool) -> bool:
        """Whether it is failing from now on."""
        known = self._of(source)
        was_failing = known.worst(now).failures >= MOST_FAILURES
        count = known.leases if by_lease else known.looks
        count.failures, count.reason, count.detail, count.at_s = count.failures + 1, reason, detail[:MAX_DETAIL], now
        return not was_failing and count.failures >= MOST_FAILURES

    def failing(self, now: float) -> tuple[PairTrouble, ...]:
        worst = [(source, known.worst(now)) for source, known in self._sources.items()]
        return tuple(
            PairTrouble(source, count.failures, count.reason, count.detail)
            for source, count in worst
            if count.failures >= MOST_FAILURES
        )[:MOST_TOLD]

    def forget(self, source: str) -> None:
        self._sources.pop(source, None)

    def _of(self, source: str) -> _Source:
        known = self._sources.pop(source, None) or _Source()
        self._sources[source] = known
        if len(self._sources) > MOST_SOURCES:
            del self._sources[next(iter(self._sources))]
        return known
