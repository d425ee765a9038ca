"""How revisions replace each other, and how roles grow and shrink: one pure step over counts.

A class is the revisions whose engines have equal fingerprints: only within one can prefill and decode be a pair. With
P, D the wanted prefill and decode engines, and p, d the useful ones of a class:

    capacity = sum over classes of min(p / P, d / D)
    allowed  = min((P - maxUnavailable) / P, (D - maxUnavailable) / D), at least 0

Invariants: no shrink takes capacity below `allowed` (or below what it is, if that is less already); only the target
grows; only older revisions shrink, and the target above its wish; the pods of a role stay within its wish + maxSurge.

Why it ends, with one older class and all pods useful: let the target have as much as maxSurge lets it. If neither
p - 1 nor d - 1 of the older class kept capacity, both would be the tighter one of min(p / P, d / D), and shrinking the
looser one keeps the sum. Several older classes (A -> B -> C) leave fragments that pair with nobody, so that all moves
may be barred; then, and only then, the target may have one pod per further class above maxSurge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from sluice_operator.names import ENGINE_ROLES, PodRole, Verdict
from sluice_operator.observed import Revision


@dataclass(frozen=True, slots=True)
class Group:
    """The pods of one Deployment. `useful`: those that take requests, never more than `replicas`."""

    role: PodRole
    revision: str
    klass: str
    replicas: int
    useful: int

    @property
    def idle(self) -> int:
        return self.replicas - self.useful


@dataclass(frozen=True, slots=True)
class RolloutView:
    """`routing_known` False: nobody knows whether a successor is routed to, so no useful pod may go."""

    wanted: Mapping[PodRole, int]
    max_surge: int
    max_unavailable: int
    target: str
    groups: tuple[Group, ...]
    routing_known: bool = True


@dataclass(frozen=True, slots=True)
class Grow:
    role: PodRole
    replicas: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """By one pod, through a drain."""

    role: PodRole
    revision: str


Move = Grow | Shrink


def capacity(groups: Iterable[Group], wanted: Mapping[PodRole, int]) -> Fraction:
    """Share of the wanted pairs that serve; above 1 while more pods serve than are wanted. 0 if none are wanted."""
    if not all(wanted[role] for role in ENGINE_ROLES):
        return Fraction(0)
    useful: dict[str, dict[PodRole, int]] = {}
    for group in groups:
        shares = useful.setdefault(group.klass, dict.fromkeys(ENGINE_ROLES, 0))
        shares[group.role] += group.useful
    return sum((min(Fraction(n[role], wanted[role]) for role in ENGINE_ROLES) for n in useful.values()), Fraction(0))


def allowed(wanted: Mapping[PodRole, int], max_unavailable: int) -> Fraction:
    if not all(wanted[role] for role in ENGINE_ROLES):
        return Fraction(0)
    return max(Fraction(0), min(Fraction(n - max_unavailable, n) for n in wanted.values()))


def is_rolling(view: RolloutView) -> bool:
    return any(group.replicas for group in view.groups if group.revision != view.target)


def is_complete(view: RolloutView) -> bool:
    """Nothing is left of older revisions, and the target has exactly what is wanted, useful."""
    target = {group.role: group for group in view.groups if group.revision == view.target}
    full = all(
        role in target and target[role].replicas == target[role].useful == view.wanted[role] for role in ENGINE_ROLES
    )
    return full and not is_rolling(view) and view.routing_known


def step(view: RolloutView) -> tuple[Move, ...]:
    """At most one shrink per Deployment and one growth per role; applying them all at once breaks no invariant."""
    shrinks = _shrinks(view)
    grows = tuple(grow for role in ENGINE_ROLES if (grow := _grow(view, role, 0)) is not None)
    if shrinks or grows or not _is_stuck(view):
        return (*grows, *shrinks)
    extra = len({group.klass for group in view.groups if _shrinkable(view, group)}) - 1
    return tuple(grow for role in ENGINE_ROLES if (grow := _grow(view, role, extra)) is not None)


def _is_stuck(view: RolloutView) -> bool:
    return is_rolling(view) and view.routing_known and not any(group.idle for group in view.groups)


def _grow(view: RolloutView, role: PodRole, extra: int) -> Grow | None:
    mine = next((g.replicas for g in view.groups if g.role is role and g.revision == view.target), 0)
    others = sum(g.replicas for g in view.groups if g.role is role and g.revision != view.target)
    wanted = view.wanted[role]
    limit = min(wanted, max(mine, wanted + view.max_surge + extra - others))
    return Grow(role, limit) if limit > mine else None


def _shrinkable(view: RolloutView, group: Group) -> bool:
    keep = view.wanted[group.role] if group.revision == view.target else 0
    return group.replicas > keep


def _shrinks(view: RolloutView) -> tuple[Shrink, ...]:
    """First pods that serve nobody (a victim in its drain among them), then as many others as capacity lets go."""
    groups = list(view.groups)
    floor = min(allowed(view.wanted, view.max_unavailable), capacity(groups, view.wanted))
    told: list[Shrink] = []
    for index, group in enumerate(groups):
        if group.idle and _shrinkable(view, group):
            groups[index] = replace(group, replicas=group.replicas - 1)
            told.append(Shrink(group.role, group.revision))
    while view.routing_known:
        best = _best_shrink(view, groups, {(shrink.role, shrink.revision) for shrink in told})
        if best is None or best[0] < floor:
            return tuple(told)
        index = best[1]
        told.append(Shrink(groups[index].role, groups[index].revision))
        groups[index] = _less(groups[index])
    return tuple(told)


def _best_shrink(view: RolloutView, groups: list[Group], busy: set[tuple[PodRole, str]]) -> tuple[Fraction, int] | None:
    """(capacity afterwards, index of the group): the one that costs least, the smallest group first."""
    free = [i for i, g in enumerate(groups) if _shrinkable(view, g) and (g.role, g.revision) not in busy]
    after = [(capacity([*groups[:i], _less(groups[i]), *groups[i + 1 :]], view.wanted), i) for i in free]
    return max(after, key=lambda told: (told[0], -groups[told[1]].useful, -told[1]), default=None)


def _less(group: Group) -> Group:
    return replace(group, replicas=group.replicas - 1, useful=group.useful - 1)


# -- which revision to go to ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """`revision`: a hash. `failed`: the wanted revision, when the target is another one because that one failed."""

    revision: str
    failed: Revision | None = None


def choose_target(wanted: str, revisions: Iterable[Revision], useful: Mapping[str, int]) -> Target:
    """The wanted revision, unless it is marked failed and a good one is there to hold on to.

    `useful`: pods per revision. Of several good ones that with most of them, then the newest.
    """
    known = {revision.hash: revision for revision in revisions}
    mine = known.get(wanted)
    if mine is None or mine.verdict is not Verdict.FAILED:
        return Target(wanted)
    good = [r for r in known.values() if r.verdict is Verdict.GOOD and r.hash != wanted]
    if not good:
        return Target(wanted)
    best = max(good, key=lambda revision: (useful.get(revision.hash, 0), revision.number))
    return Target(best.hash, mine)


def classes(revisions: Iterable[str], fingerprints: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Revision -> class. Two are one class only if the engines of both report one and the same fingerprint."""
    told: dict[str, str] = {}
    for revision in revisions:
        reported = fingerprints.get(revision, frozenset())
        told[revision] = f"fingerprint {next(iter(reported))}" if len(reported) == 1 else f"revision {revision}"
    return told
