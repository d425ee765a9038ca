"""Times between tokens, as they came in lately: a window with a bound on its size."""

from __future__ import annotations

from collections import deque

WINDOW_S, MOST = 30.0, 4096


class Gaps:
    """`recent` has (when, gap in seconds), and grows with every token batch; `p95_ms` is for callers that ask now and
    then."""

    def __init__(self) -> None:
        self.recent: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, now: float, gap_s: float) -> None:
        self.recent.append((now, gap_s))

    def p95_ms(self, now: float) -> float:
        """Of the last WINDOW_S seconds; 0 if no token followed another one in them."""
        gaps = self.recent
        while gaps and now - gaps[0][0] > WINDOW_S:
            gaps.popleft()
        if not gaps:
            return 0.0
        times = sorted(gap for _, gap in gaps)
        return times[min(int(len(times) * 0.95), len(times) - 1)] * 1e3
