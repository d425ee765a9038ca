"""How much work a peer may ask for by saying that something is wrong. Peers may lie; no clock of its own."""

from __future__ import annotations

from collections import deque

# Records that one peer may have verified within the window.
MOST_RECORDS, WINDOW_S = 256, 10.0
# Peers that are remembered; what the one that was quiet for longest had asked for is forgotten first.
MOST_PEERS = 1024


class PeerBudget:
    def __init__(self) -> None:
        self._asked: dict[str, deque[tuple[float, int]]] = {}

    def admits(self, peer: str, records: int, now: float) -> bool:
        """Whether this peer may have so many more records verified; counts them if so."""
        asked = self._asked.pop(peer, None) or deque()
        self._asked[peer] = asked
        if len(self._asked) > MOST_PEERS:
            del self._asked[next(iter(self._asked))]
        while asked and asked[0][0] < now - WINDOW_S:
            asked.popleft()
        if sum(count for _, count in asked) + records > MOST_RECORDS:
            return False
        asked.append((now, records))
        return True
