"""How fast replicas may change: `behavior` as in autoscaling/v2 means it, over remembered wishes and changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice_operator.api.enums import PolicyType, SelectPolicy
from sluice_operator.api.spec import BehaviorSpec, ScalingPolicy, ScalingRules
from sluice_operator.decide.observed import Memory, Wish

UP_WINDOW_S, DOWN_WINDOW_S = 0, 300
UP_POLICIES = (ScalingPolicy(PolicyType.PERCENT, 100, 15), ScalingPolicy(PolicyType.PODS, 4, 15))
DOWN_POLICIES = (ScalingPolicy(PolicyType.PERCENT, 100, 15),)
MAX_REMEMBERED_S = 3600


@dataclass(frozen=True, slots=True)
class Bound:
    """What the rules make of a wish. `why`: empty when they let it pass."""

    replicas: int
    why: str = ""


def remember(memory: Memory, wish: Wish) -> tuple[Wish, ...]:
    """Wishes that a window may still ask for; of equal ones in a row the first and the last."""
    kept = [told for told in memory.wishes if wish.at - told.at <= MAX_REMEMBERED_S]
    if len(kept) >= 2 and kept[-1].replicas == kept[-2].replicas == wish.replicas:
        kept.pop()
    return (*kept, wish)


def window_s(rules: ScalingRules, default: int) -> int:
    return default if rules.stabilization_window_seconds is None else rules.stabilization_window_seconds


def bound(now_replicas: int, wish: int, behavior: BehaviorSpec, memory: Memory, now: float) -> Bound:
    """`memory.wishes` ends with `wish`. A window that began before this operator did is not known: nothing shrinks."""
    down_s, up_s = window_s(behavior.scale_down, DOWN_WINDOW_S), window_s(behavior.scale_up, UP_WINDOW_S)
    if wish < now_replicas:
        if now - memory.since < down_s:
            return Bound(now_replicas, f"the stabilization window of {down_s} s is not over yet")
        steady = min(now_replicas, max(_within(memory.wishes, now, down_s), default=wish))
        least = steady if steady == now_replicas else max(steady, _least(now_replicas, behavior, memory, now))
        return Bound(least, "" if least == wish else "stabilization window or scaleDown policy")
    if wish > now_replicas:
        steady = max(now_replicas, min(_within(memory.wishes, now, up_s), default=wish))
        most = steady if steady == now_replicas else min(steady, _most(now_replicas, behavior, memory, now))
        return Bound(max(most, now_replicas), "" if most == wish else "stabilization window or scaleUp policy")
    return Bound(wish)


def _within(wishes: Sequence[Wish], now: float, window: float) -> list[int]:
    """Wishes of the window, and the one that held when it began."""
    inside = [told.replicas for told in wishes if now - told.at <= window]
    before = [told.replicas for told in wishes if now - told.at > window]
    return (before[-1:] if window else []) + inside


def _most(replicas: int, behavior: BehaviorSpec, memory: Memory, now: float) -> int:
    rules = behavior.scale_up
    if rules.select_policy is SelectPolicy.DISABLED:
        return replicas
    limits = [
        base + (p.value if p.type is PolicyType.PODS else math.ceil(base * p.value / 100))
        for p in rules.policies or UP_POLICIES
        for base in [_base(replicas, memory.changes, now - p.period_seconds)]
    ]
    # From zero a percentage leads nowhere.
    return max(_select(rules, limits, largest=True), 1)


def _least(replicas: int, behavior: BehaviorSpec, memory: Memory, now: float) -> int:
    rules = behavior.scale_down
    if rules.select_policy is SelectPolicy.DISABLED:
        return replicas
    limits = [
        base - (p.value if p.type is PolicyType.PODS else math.ceil(base * p.value / 100))
        for p in rules.policies or DOWN_POLICIES
        for base in [_base(replicas, memory.changes, now - p.period_seconds)]
    ]
    return max(0, min(replicas, _select(rules, limits, largest=False)))


def _base(replicas: int, changes: Sequence[Wish], since: float) -> int:
    """Replicas at `since`. `changes` holds what was there *before* each change, and when it was made."""
    later = [change.replicas for change in changes if change.at > since]
    return later[0] if later else replicas


def _select(rules: ScalingRules, limits: Iterable[int], *, largest: bool) -> int:
    """Max is the policy that changes most."""
    changes_most = rules.select_policy is SelectPolicy.MAX
    return max(limits) if changes_most == largest else min(limits)
