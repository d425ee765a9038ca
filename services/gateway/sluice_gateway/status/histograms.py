"""How long requests and tokens took, counted in buckets since the start. On the path of every step of tokens, so an
observation is a bisection and two additions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

# Upper bounds as vLLM has them, in seconds and in tokens, so that its dashboards can be used.
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
GAP_S = (0.001, 0.0025, 0.005, *_GAP_S)  # some milliseconds are usual here
REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
             240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


class Histogram:
    """`counts` has one place more than `bounds`: for what is above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Latencies:
    """Of one gateway. The names are those under which its supervisor exports them."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.gap = Histogram(GAP_S)
        self.request = Histogram(REQUEST_S)
        self.queue = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)
        self.handoff = Histogram(FIRST_TOKEN_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)

    def report(self) -> dict[str, Any]:
        """For the mirror in the flight recorder."""
        return {
            name: {"bounds": kept.bounds, "counts": kept.counts, "total": round(kept.total, 6)}
            for name, kept in vars(self).items()
        }
