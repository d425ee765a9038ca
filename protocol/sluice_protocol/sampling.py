"""How a token is chosen, as a value that travels from the gateway to the rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Bound(NamedTuple):
    """A finite number in low..high. The wire's floats have 32 bits: what a sender may give is a little more there."""

    low: float
    high: float


# What each number may be, for clients, for a model's own defaults and for engines alike. Everything inside is safe with
# any finite logits: a repetition penalty divides or multiplies, and 1e-310 would be 0 on the wire.
BOUNDS: dict[str, Bound] = {
    "temperature": Bound(0.0, 2.0),
    "top_p": Bound(1e-9, 1.0),
    "min_p": Bound(0.0, 1.0),
    "repetition_penalty": Bound(0.01, 100.0),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
}
BIAS = Bound(-100.0, 100.0)
MAX_TOP_LOGPROBS = 20
MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Defaults are greedy decoding without any adjustment.

    `max_tokens` bounds the whole output, `output_ids` of an earlier try included. `seed` is always set by the gateway,
    so that a retry continues the same stream of random numbers: the draw for a position is a pure function of
    (seed, choice, position).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    top_logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the rank must know the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one sampled token: the chosen one and the best alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = field(default=())
    top_logprobs: tuple[float, ...] = field(default=())
