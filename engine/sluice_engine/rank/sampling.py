"""How a row's logits become a token: a pure function of logits, sampling, tokens so far and position of that row alone.

Order: token mask, logit bias, repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p.
The repetition penalty looks at all tokens so far, prompt included; presence and frequency penalties, as OpenAI has
them, at those that were chosen. The draw is one uniform number from hash(seed, choice, position), laid over the kept
tokens in order of id. Ties go to the lower id everywhere. Log-probabilities are those of the model: before mask, bias,
penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice_protocol.sampling import Sampling, TokenLogprobs

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]
# Which tokens a constrained output allows next, bool [vocabulary].
TokenMask = NDArray[np.bool_]
_MASK64 = (1 << 64) - 1


class BadLogits(ArithmeticError):
    """Logits that no token can be chosen from: not a number, or everything masked. Never turned into text.

    A fault of one row: it is handed on as a value, and the rows beside it go on.
    """


@dataclass(frozen=True, slots=True)
class Occurrences:
    """How often each token occurred, int32 [vocabulary]: `seen` in prompt and output, `chosen` in the output."""

    seen: NDArray[np.int32]
    chosen: NDArray[np.int32]

    @staticmethod
    def of(history: Sequence[int], prompt_tokens: int, vocab_size: int) -> Occurrences:
        """The first `prompt_tokens` of `history` are the prompt."""
        tokens = np.asarray(history, dtype=np.int64)
        seen, chosen = (np.bincount(part, minlength=vocab_size) for part in (tokens, tokens[prompt_tokens:]))
        return Occurrences(seen.astype(np.int32), chosen.astype(np.int32))

    def add(self, token: int) -> None:
        self.seen[token] += 1
        self.chosen[token] += 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What one row needs for one token. `occurred` is None if no penalty needs it."""

    sampling: Sampling
    position: int
    occurred: Occurrences | None = None
    mask: TokenMask | None = None

    @property
    def plain(self) -> bool:
        """Whether this is nothing but an argmax."""
        s = self.sampling
        return s.temperature == 0.0 and not s.logit_bias and not s.needs_history and self.mask is None


def choose_tokens(logits: Logits, choices: Sequence[Choice]) -> tuple[int | BadLogits, ...]:
    """One token a row of fp32 [rows, vocabulary], or why that row has none."""
    best = logits.argmax(axis=1).tolist() if len(choices) else []
    return tuple(_token(logits[row], best[row], choice) for row, choice in enumerate(choices))


def _token(logits: Logits, best: int, choice: Choice) -> int | BadLogits:
    if not (0 <= best < len(logits) and np.isfinite(logits[best])):
        return BadLogits(f"logits at position {choice.position} are not finite")
    if choice.plain:
        return best
    try:
        return _choose(logits, choice)
    except BadLogits as fault:
        return fault


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Of fp32 [vocabulary]; `top` alternatives, best first, the chosen one among them if it is good enough."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = _best_first(wide, top)
    return TokenLogprobs(float(logprobs[token]), tuple(int(i) for i in best), tuple(float(logprobs[i]) for i in best))


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), 53 bits: SplitMix64 absorbs the three numbers one after the other."""
    state = 0
    for word in (seed, choice, position):
        state = _mix((state ^ (word & _MASK64)) + 0x9E3779B97F4A7C15)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _choose(logits: Logits, choice: Choice) -> int:
    adjusted = _adjust(logits.astype(np.float64), choice)
    best = int(adjusted.argmax())
    if not np.isfinite(adjusted[best]):
        raise BadLogits(f"no token is allowed at position {choice.position}")
    s = choice.sampling
    if s.temperature == 0.0:
        return best
    weights = np.exp((adjusted - adjusted[best]) / s.temperature)
    weights = _truncate(weights, s)
    total = np.cumsum(weights)
    drawn = int(np.searchsorted(total, uniform(s.seed, s.choice, choice.position) * total[-1], side="right"))
    return min(drawn, int(np.flatnonzero(weights)[-1]))


def _adjust(logits: Floats, choice: Choice) -> Floats:
    s = choice.sampling
    if choice.mask is not None:
        logits[~choice.mask] = -np.inf
    for token, bias in s.logit_bias:
        logits[token] += bias
    if choice.occurred is not None and s.needs_history:
        seen, chosen = np.flatnonzero(choice.occurred.seen), np.flatnonzero(choice.occurred.chosen)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        logits[chosen] -= s.presence_penalty + s.frequency_penalty * choice.occurred.chosen[chosen]
    return logits


def _truncate(weights: Floats, s: Sampling) -> Floats:
    """Weights (the best is 1) with everything outside top-k, then top-p, then min-p set to 0."""
    if 0 < s.top_k < len(weights):
        weights = _only(weights, _best_first(weights, s.top_k))
    if s.top_p < 1.0:
        order = _best_first(weights, len(weights))
        before = np.cumsum(weights[order]) - weights[order]
        kept = int((before < s.top_p * weights.sum()).sum())
        weights = _only(weights, order[: max(kept, 1)])
    if s.min_p > 0.0:
        weights = np.where(weights >= s.min_p, weights, 0.0)
    return weights


def _best_first(values: Floats, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest, of equal ones the lower first."""
    if count <= 0:
        return np.empty(0, dtype=np.intp)
    if count < len(values) // 8:
        least = np.partition(values, -count)[-count]
        candidates = np.flatnonzero(values >= least)
        return candidates[np.argsort(-values[candidates], kind="stable")][:count]
    return np.argsort(-values, kind="stable")[:count]


def _only(weights: Floats, kept: NDArray[np.intp]) -> Floats:
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result
