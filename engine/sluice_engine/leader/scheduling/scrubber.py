"""When the background scrubber may verify closed records, and how many bytes at once. No clock of its own.

It takes a bounded share of one core, measured: after a check that took t seconds the next one waits t / SHARE seconds.
So the rate follows the machine, and it never takes more than its share of the step loop either.
"""

from __future__ import annotations

# Of one core, of each rank.
SHARE = 0.02
# In one step: a third of a millisecond, so that decode rows hardly feel it.
SCRUB_BYTES = 1 << 20
# The least time between two scrubs: an idle engine is not woken more often than that.
LEAST_PAUSE_S = 1.0


class Scrubber:
    """`due` says how many bytes may be verified now; `measured` says what the checks of a step took."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def due(self, now: float) -> int:
        """0: nothing yet."""
        if now < self._next_s:
            return 0
        self._next_s = now + LEAST_PAUSE_S
        return SCRUB_BYTES

    def measured(self, check_ns: int, now: float) -> None:
        """Of a step that is done, whatever its checks were for: those that requests need are never held back, but they
        count."""
        if check_ns:
            self._next_s = max(self._next_s, now + check_ns / 1e9 / SHARE)
