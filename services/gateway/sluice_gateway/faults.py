"""What a fault costs a choice, and how long the choice pauses after it. Pure; chance is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice_gateway.routing.fleet import Pair
from sluice_gateway.routing.reasons import ENGINE_LOST
from sluice_gateway.routing.retry import classify
from sluice_gateway.routing.session import Lost, TryResult
from sluice_protocol.generate import Refused

DELAYS_S = (0.1, 0.5, 1.0, 2.0)
"""Pause after the first, second, ... fault in a row; the last one for all that follow."""
JITTER = 0.25
"""A pause is up to this share shorter or longer, so that the victims of one death do not come back as one."""
FREE_REPEATS = 4
"""Faults that one death costs nothing for after the one that was paid: some 4 s, more than a restart takes."""
LOST_HERE = frozenset({ENGINE_LOST, "TransportLost"})


@dataclass(frozen=True, slots=True)
class Culprit:
    """One life of one engine: what a loss is put down to."""

    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Faults:
    """What a choice went through: faults since its last token, and how often it ran into which death. `computed`: the
    lives that may have ended over it, for they had it in work."""

    in_a_row: int = 0
    losses: Mapping[Culprit, int] = field(default_factory=dict)
    computed: frozenset[Culprit] = frozenset()

    def repeats(self, culprit: Culprit | None) -> bool:
        """Whether the next fault is only one more sight of a death that was paid already."""
        return culprit is not None and 1 <= self.losses.get(culprit, 0) <= FREE_REPEATS

    def with_fault(self, culprit: Culprit | None, had_it: bool = True) -> Faults:
        """`had_it`: see `had_in_work`."""
        if culprit is None:
            return replace(self, in_a_row=self.in_a_row + 1)
        losses = {**self.losses, culprit: self.losses.get(culprit, 0) + 1}
        return Faults(self.in_a_row + 1, losses, self.computed | {culprit} if had_it else self.computed)

    @property
    def victims(self) -> int:
        """Engines' lives that ended while they had it in work."""
        return len(self.computed)

    def with_progress(self) -> Faults:
        return replace(self, in_a_row=0)


def culprit_of(result: TryResult, pair: Pair) -> Culprit | None:
    """Whose loss ended the try; None if it ended otherwise."""
    reason, _detail, policy, _delay_s = classify(result)
    if not policy.spends or not (policy.source or reason in LOST_HERE):
        return None
    engine = pair.prefill if policy.source and pair.prefill is not None else pair.decode
    return Culprit(engine.member.address, "" if engine.hello is None else engine.hello.incarnation)


def had_in_work(result: TryResult, pair: Pair, culprit: Culprit | None, num_tokens: int) -> bool:
    """Whether the culprit may have died over this try, of which `num_tokens` tokens came.

    Up to the first token the prefill engine computes, and the decode engine waits for it; from then on the decode
    engine computes, and the prefill engine only keeps records for it. A refused try was not computed, nor was one
    that went to an engine of which nothing had been heard since another try broke there: it was dead already.
    """
    if culprit is None or isinstance(result, Refused) or (isinstance(result, Lost) and not result.has_begun):
        return False
    is_prefilled = num_tokens > 0
    is_decodes = culprit.address == pair.decode.member.address
    was_dead = any(engine.suspect for engine in pair.engines if engine.member.address == culprit.address)
    if was_dead and not is_prefilled:
        return False
    return pair.prefill is None or is_prefilled == is_decodes


def fault_delay(in_a_row: int, draw: float, left_s: float) -> float:
    """Seconds before the next try of the engines at fault. `draw` in [0, 1); at most half of the patience `left_s`."""
    pause = DELAYS_S[min(in_a_row, len(DELAYS_S)) - 1]
    return max(0.0, min(pause * (1 + JITTER * (2 * draw - 1)), left_s / 2))
