"""Records that a reader says are not what was granted, until a check here has shown which side is wrong.

No clock, no I/O. A reader may lie, so no peer may ask for more than a bounded number of checks, and nothing is dropped
on its word alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from sluice_engine.step import RecordRef, StepRecord

# Records that one peer may have verified within the window.
MOST_RECORDS, WINDOW_S = 256, 10.0
# Peers that are remembered; what the one that was quiet for longest had asked for is forgotten first.
MOST_PEERS = 1024


class PeerBudget:
    """How many records each peer has asked to have verified."""

    def __init__(self) -> None:
        self._asked: dict[str, deque[tuple[float, int]]] = {}

    def admits(self, peer: str, records: int, now: float) -> int:
        """How many of so many more records this peer may have verified; counts them."""
        asked = self._asked.pop(peer, None) or deque()
        self._asked[peer] = asked
        if len(self._asked) > MOST_PEERS:
            del self._asked[next(iter(self._asked))]
        while asked and asked[0][0] < now - WINDOW_S:
            asked.popleft()
        admitted = min(records, MOST_RECORDS - sum(count for _, count in asked))
        if admitted:
            asked.append((now, admitted))
        return admitted


class Suspicion:
    """`lanes`: by the reader's host, how many records were good here that had arrived otherwise there."""

    def __init__(self) -> None:
        # The host of the reader that complains, and the first step whose checks count.
        self._suspects: dict[RecordRef, tuple[str, int]] = {}
        self._budget = PeerBudget()
        self.lanes: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def cast(self, refs: Sequence[RecordRef], peer: str, first_step: int, now: float) -> Sequence[RecordRef]:
        """Those of them that are to be verified: none for a peer that has asked for too much. Checks of steps before
        `first_step` were planned before the peer complained and prove nothing."""
        admitted = refs[: self._budget.admits(peer, len(refs), now)]
        self._suspects.update(dict.fromkeys(admitted, (peer, first_step)))
        return admitted

    def rests_on(self, refs: Iterable[RecordRef]) -> bool:
        """Whether any of them is suspect."""
        return any(ref in self._suspects for ref in refs)

    def forget(self, ref: RecordRef) -> None:
        """Its generation has ended, so it is not granted any more."""
        self._suspects.pop(ref, None)

    def judge(self, record: StepRecord, bad: Collection[RecordRef]) -> list[str]:
        """Take what this step has verified as decided. Returns the hosts of readers, one for each record that is good
        here: it was changed on its way there."""
        suspect_lanes: list[str] = []
        for check in record.checks:
            peer, first_step = self._suspects.get(check.ref, ("", record.number + 1))
            if record.number < first_step:
                continue  # It is not suspect, or not since before this check was planned.
            del self._suspects[check.ref]
            if check.ref not in bad:
                suspect_lanes.append(peer)
        self.lanes.update(suspect_lanes)
        return suspect_lanes
