"""Whether a `Sampling` can be carried out at all: an ordered list of checks, each saying what is wrong. No torch.

What passes here cannot make a rank fail on finite logits, whatever client or gateway sent it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sluice_protocol.sampling import BIAS, BOUNDS, MAX_INT, MAX_TOP_LOGPROBS, Bound, Sampling

# The wire rounds to 32 bits.
ROUNDING = 1e-6

SamplingCheck = Callable[[Sampling, int], str | None]


def numbers_in_bounds(sampling: Sampling, vocab_size: int) -> str | None:
    for name, bound in BOUNDS.items():
        value: float = getattr(sampling, name)
        if not _holds(bound, value):
            return f"{name} is {value:g}; it must be at least {bound.low:g} and at most {bound.high:g}"
    return None


def counts_in_bounds(sampling: Sampling, vocab_size: int) -> str | None:
    if not 0 <= sampling.top_k <= MAX_INT:
        return f"top_k is {sampling.top_k}; it must be between 0 and {MAX_INT}"
    if not 0 <= sampling.max_tokens <= MAX_INT:
        return f"max_tokens is {sampling.max_tokens}; it must be between 0 and {MAX_INT}"
    return None


def biased_tokens_exist(sampling: Sampling, vocab_size: int) -> str | None:
    for token, _ in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            return f"logit_bias names token id {token}, which is not below the vocabulary size {vocab_size}"
    return None


def biases_in_bounds(sampling: Sampling, vocab_size: int) -> str | None:
    for token, bias in sampling.logit_bias:
        if not _holds(BIAS, bias):
            return f"logit_bias of token id {token} is {bias:g}; it must be within {BIAS.low:g}..{BIAS.high:g}"
    return None


def logprobs_in_bounds(sampling: Sampling, vocab_size: int) -> str | None:
    top = sampling.top_logprobs
    if top is None or 0 <= top <= MAX_TOP_LOGPROBS:
        return None
    return f"top_logprobs is {top}; it must be between 0 and {MAX_TOP_LOGPROBS}"


# Stop token ids may be anything: they are only compared. Seed and choice are taken modulo 2**64.
CHECKS: tuple[SamplingCheck, ...] = (
    numbers_in_bounds,
    counts_in_bounds,
    biased_tokens_exist,
    biases_in_bounds,
    logprobs_in_bounds,
)


def fault_of(sampling: Sampling, vocab_size: int) -> str | None:
    """What the first failing check says, the field first; None if `sampling` is fine."""
    for check in CHECKS:
        fault = check(sampling, vocab_size)
        if fault is not None:
            return fault
    return None


def _holds(bound: Bound, value: float) -> bool:
    slack = ROUNDING * abs(bound.low), ROUNDING * abs(bound.high)
    return math.isfinite(value) and bound.low - slack[0] <= value <= bound.high + slack[1]
