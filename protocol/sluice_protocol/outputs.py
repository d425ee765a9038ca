"""When the output of a request is over: one rule, for the engine that computes it and the gateway that answers."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_protocol.generate import EndReason
from sluice_protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """`stops`: tokens that end the output. `most`: tokens that may still come."""

    stops: frozenset[int]
    most: int

    @classmethod
    def of(cls, sampling: Sampling, num_outputs: int = 0) -> OutputLimit:
        """`num_outputs`: output tokens that there are already, of earlier attempts."""
        return cls(frozenset(sampling.stop_token_ids), sampling.max_tokens - num_outputs)

    def end_after(self, token: int, count: int) -> EndReason | None:
        """Why the output is over with `token`, the `count`-th that came (from 1 on); None while it goes on."""
        if token in self.stops:
            return EndReason.STOP
        return EndReason.LENGTH if count >= self.most else None
