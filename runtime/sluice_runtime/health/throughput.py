"""How long a step should take, from those that were measured: a fixed part and a part per token."""

from __future__ import annotations

SMALL_STEP_TOKENS = 64
WEIGHT = 0.1  # of the newest step in the moving averages
# A step counts as at most so many times what was expected of it: one pause of the whole machine must not be what all
# budgets follow from then on, and what has become slow for good gets there in a few steps.
SURPRISE = 4.0


class Throughput:
    """Times are ns. `cold_ns`: expected of a step until one was measured (kernels are compiled at the first)."""

    def __init__(self, cold_ns: int) -> None:
        self._cold = cold_ns
        self._base = 0.0
        self._per_token = 0.0
        self._most_tokens = 0  # of a small step
        self._bound = 0.0

    def measured(self, tokens: int, ns: int) -> None:
        """The averages follow slower steps at once and faster ones slowly: a budget should rather be too long."""
        if self._base:
            ns = min(ns, int(SURPRISE * self.expected(tokens)))
        if tokens <= SMALL_STEP_TOKENS or not self._base:
            self._base = follow(self._base, ns)
            if tokens >= self._most_tokens:
                self._bound = follow(self._bound if tokens == self._most_tokens else 0.0, ns / max(1, tokens))
                self._most_tokens = tokens
        if tokens > SMALL_STEP_TOKENS:
            self._per_token = follow(self._per_token, max(0.0, ns - self._base) / tokens)

    def expected(self, tokens: int) -> int:
        """Of a step with so many tokens in. Until a large step was seen, a token's part is at most what the largest of
        the small ones took for each of its tokens, its fixed part included."""
        if not self._base:
            return self._cold
        return int(self._base + (self._per_token or self._bound) * tokens)


def follow(average: float, value: float) -> float:
    """A moving average that goes up at once and down slowly."""
    return value if value > average else (1 - WEIGHT) * average + WEIGHT * value
