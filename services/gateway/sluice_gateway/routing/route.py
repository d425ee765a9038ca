"""Which pair a try goes to: a pure function over what is known of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from sluice_gateway.routing.fleet import DOWN, Engine, Pair, usable_groups
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Role

BlockKeys = Callable[[Fingerprint, tuple[int, ...], int], tuple[bytes, ...]]
"""(fingerprint, tokens, page tokens) to the keys of all full pages, in order."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A wholly cached prompt is worth `prefix`, a wholly busy engine costs `load`. Scores within `tie` are equal."""

    prefix: float = 1.0
    load: float = 0.75
    tie: float = 0.02


@dataclass(frozen=True, slots=True)
class Wanted:
    """A try that needs a pair. `avoid` are addresses of earlier failures: taken only if there is nothing else.

    `fingerprint` is set once tokens were produced: another model must not finish the sentence. `keys` remembers the
    block keys of `tokens`, which are worth computing once and only when some engine says what it has cached.
    """

    tokens: tuple[int, ...]
    fingerprint: Fingerprint | None = None
    avoid: frozenset[str] = frozenset()
    keys: dict[tuple[Fingerprint, int], tuple[bytes, ...]] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class NoRoute:
    """`reason`: NoPair (no pair could take it as things stand) or NoRoom (a pair can, later)."""

    reason: str
    detail: str


NO_PAIR, NO_ROOM = "NoPair", "NoRoom"


def no_keys(_fingerprint: Fingerprint, _tokens: tuple[int, ...], _page_tokens: int) -> tuple[bytes, ...]:
    return ()


def choose_pair(
    wanted: Wanted,
    engines: Sequence[Engine],
    seed: int,
    block_keys: BlockKeys = no_keys,
    weights: Weights = Weights(),
) -> Pair | NoRoute:
    """The pair with the best score; a pair's score is the sum of its engines', so each side is chosen on its own."""
    groups = usable_groups(engines)
    if wanted.fingerprint is not None:
        groups = [g for g in groups if _fingerprint(g) == wanted.fingerprint]
    if not groups:
        return NoRoute(NO_PAIR, _why_nobody(engines, wanted))
    random = Random(seed)
    scorer = _Scorer(wanted, block_keys, weights)
    candidates = [pair for group in groups for pair in _best_of_group(group, scorer, random)]
    if not candidates:
        return NoRoute(NO_ROOM, "every usable pair is full")
    if len(candidates) == 1:
        return candidates[0]
    return min(
        candidates,
        key=lambda pair: (pair.is_failing, scorer.shunned(pair.engines), -scorer.pair_score(pair), pair.addresses),
    )


def no_pair(engines: Sequence[Engine]) -> NoRoute | None:
    """Why no pair could take any work, at once or later; None when one could."""
    return None if usable_groups(engines) else NoRoute(NO_PAIR, _why_nobody(engines, Wanted(())))


def _fingerprint(group: tuple[tuple[Engine, ...], ...]) -> Fingerprint | None:
    return next(engine.hello.fingerprint for side in group for engine in side if engine.hello is not None)


def _why_nobody(engines: Sequence[Engine], wanted: Wanted) -> str:
    reasons = [f"{e.role or 'engine'} {e.member.address}: {_why(e)}" for e in engines if e.unusable]
    if reasons:
        return "; ".join(reasons[:8])
    if not engines:
        return "no engine is known"
    if wanted.fingerprint is not None:
        return "the model is gone"
    return "no prefill and decode engine with equal fingerprints" + _where_they_differ(engines)


def _why(engine: Engine) -> str:
    """Of one that is away only that: what it said at its end is not for clients."""
    return DOWN if engine.member.down else engine.unusable


def _where_they_differ(engines: Sequence[Engine]) -> str:
    """The facts that the nearest prefill and decode engines do not share."""
    told = [(e.role, e.hello.fingerprint) for e in engines if e.hello is not None]
    prefills = [fingerprint for role, fingerprint in told if role is Role.PREFILL]
    decodes = [fingerprint for role, fingerprint in told if role is Role.DECODE]
    differing = [one.differences(other) for one in prefills for other in decodes]
    nearest: tuple[str, ...] = min(differing, key=len, default=())
    return f": they differ in {', '.join(nearest)}" if nearest else ""


@dataclass(frozen=True, slots=True)
class _Scorer:
    wanted: Wanted
    block_keys: BlockKeys
    weights: Weights

    def shunned(self, engines: Sequence[Engine]) -> int:
        """Reasons to prefer others."""
        return sum((engine.member.address in self.wanted.avoid) + engine.suspect for engine in engines)

    def score(self, engine: Engine) -> float:
        return self.weights.prefix * self.cached(engine) - self.weights.load * engine.busy

    def pair_score(self, pair: Pair) -> float:
        """A unified engine stands for both sides."""
        return 2 * self.score(pair.decode) if pair.prefill is None else sum(map(self.score, pair.engines))

    def cached(self, engine: Engine) -> float:
        """Share of the tokens that the engine has cached, as far as its hints say."""
        assert engine.hello is not None
        assert engine.load is not None
        if not engine.load.block_keys:
            return 0.0
        page = engine.hello.page_tokens
        place = (engine.hello.fingerprint, page)
        keys = self.wanted.keys.get(place)
        if keys is None:
            keys = self.wanted.keys[place] = self.block_keys(engine.hello.fingerprint, self.wanted.tokens, page)
        held = frozenset(engine.load.block_keys)
        pages = next((i + 1 for i in reversed(range(len(keys))) if keys[i] in held), 0)
        return pages * page / max(1, len(self.wanted.tokens))


def _best_of_group(
    group: tuple[tuple[Engine, ...], tuple[Engine, ...], tuple[Engine, ...]], scorer: _Scorer, random: Random
) -> list[Pair]:
    prefill, decode, unified = (_best(side, scorer, random) for side in group)
    pairs = [] if unified is None else [Pair(unified)]
    if prefill is not None and decode is not None:
        best = Pair(decode, prefill)
        pairs += _that_work(group, scorer, best) if best.is_failing else [best]
    return pairs


def _that_work(
    group: tuple[tuple[Engine, ...], tuple[Engine, ...], tuple[Engine, ...]], scorer: _Scorer, failing: Pair
) -> list[Pair]:
    """The best pair between whose engines records move. None while those that there are have no room: that is waited
    for. Where there is none at all the failing one is tried, for it may be well again."""
    prefills, decodes, _ = group
    working = [pair for d in decodes for p in prefills if not (pair := Pair(d, p)).is_failing]
    roomy = [pair for pair in working if all(engine.room > 0 for engine in pair.engines)]
    if not roomy:
        return [] if working else [failing]
    engines = {engine.member.address: engine for pair in roomy for engine in pair.engines}
    scores = {address: scorer.score(engine) for address, engine in engines.items()}
    shunned = {address: scorer.shunned([engine]) for address, engine in engines.items()}

    def badness(pair: Pair) -> tuple[int, float, tuple[str, ...]]:
        return (
            sum(shunned[address] for address in pair.addresses),
            -sum(scores[address] for address in pair.addresses),
            pair.addresses,
        )

    return [min(roomy, key=badness)]


def _best(side: Sequence[Engine], scorer: _Scorer, random: Random) -> Engine | None:
    """Best score among those with room; between equals, the less busy of two drawn ones."""
    roomy = [engine for engine in side if engine.room > 0]
    if len(roomy) < 2:
        return roomy[0] if roomy else None
    fewest = min(scorer.shunned([engine]) for engine in roomy)
    scores = [(scorer.score(e), e) for e in roomy if scorer.shunned([e]) == fewest]
    top = max(score for score, _ in scores)
    ties = sorted((e for s, e in scores if s >= top - scorer.weights.tie), key=lambda e: e.member.address)
    drawn = random.sample(ties, min(2, len(ties)))
    return min(drawn, key=lambda engine: engine.busy)
