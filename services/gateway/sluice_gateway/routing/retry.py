"""What follows the end of a try: a pure decision."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_gateway.openai.errors import ApiError
from sluice_gateway.routing.reasons import DRAINING, FREE, PREEMPTED, Policy, client_error, policy_of
from sluice_gateway.routing.session import Lost, TryResult
from sluice_protocol.generate import Ended, EndReason, Refused

FREE_DELAY_S = 0.02
"""Pause before a try that costs nothing, so that a full engine is not asked in a tight loop."""


@dataclass(frozen=True, slots=True)
class Done:
    """The request is answered; `reason` is OpenAI's finish_reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """Another try, not before `delay_s`. `avoid`: prefer another pair. `spent`: faults so far, this one included.

    `source`: the fault points at the pair's prefill engine. `drains`: one of the pair takes nothing new any more.
    """

    delay_s: float
    avoid: bool
    spent: int
    source: bool = False
    drains: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    error: ApiError


def judge(
    result: TryResult,
    finished: str | None,
    tries: int,
    spent: int,
    budget: int,
    repeat: bool = False,
    victims: int = 0,
) -> Done | Again | GiveUp:
    """`finished`: the finish_reason if the tokens so far end the request already, whatever became of the try.

    `repeat`: the fault is one more sight of a death that was paid already (`faults.Faults`), and costs nothing.
    `victims`: engines' lives that ended while they had the request in work, this one included; two or more, and it is
    suspect.
    """
    if finished is not None:
        return Done(finished)
    if isinstance(result, Ended) and result.reason in (EndReason.STOP, EndReason.LENGTH):
        return Done(result.reason.value)
    reason, detail, policy, delay_s = classify(result)
    if not policy.retry:
        return GiveUp(client_error(reason, detail, tries))
    spent += policy.spends and not repeat
    if spent > budget:
        return GiveUp(client_error(reason, detail, tries, victims))
    drains = reason == DRAINING
    return Again(delay_s, policy.spends or drains or reason == PREEMPTED, spent, policy.source, drains)


def classify(result: TryResult) -> tuple[str, str, Policy, float]:
    """Its reason, the detail, what the reason means, and the shortest pause."""
    if isinstance(result, Lost):
        return result.reason, result.detail, policy_of(result.reason), 0.0
    if isinstance(result, Refused):
        if result.retry_after_ms > 0 and result.reason != DRAINING:
            return result.reason, result.detail, FREE, max(FREE_DELAY_S, result.retry_after_ms / 1000)
        return result.reason, result.detail, policy_of(result.reason), FREE_DELAY_S
    if result.reason is EndReason.PREEMPTED:
        return PREEMPTED, result.detail, policy_of(PREEMPTED), FREE_DELAY_S
    reason = result.error or "Failed"
    policy = policy_of(reason)
    return reason, result.detail, policy, 0.0 if policy.spends else FREE_DELAY_S
