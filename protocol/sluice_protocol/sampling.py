"""How a token is chosen, as a value that travels from the gateway to the rank."""

from __future__ import annotations

from dataclasses import dataclass, field


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
