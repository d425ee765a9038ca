"""How revisions replace each other, and how roles grow and shrink: one pure step over counts (see groups).

Invariants:

- A ready pod goes only if, without it, what serves and what is promised both stay at what is allowed (or as they are,
  if that is less already), and enough pods of its role stay available, as with a Deployment's rolling update.
- An older pod that is not ready keeps its place, for a new one will stand there, unless the Deployment controller would
  remove it too. One that has failed for good also yields to a pod of the target that finds no node.
- Only the target grows, and, while too little is promised, the last good revision back to what is allowed.
- Only older revisions shrink, and the target above its wish; the pods of a role stay within its wish + maxSurge.

Why it ends, with one older class and all pods of the target useful: let the target have as much as maxSurge lets it.
Then the pods of each role are more than must be available. If neither p - 1 nor d - 1 of the older class kept what is
promised, both would be the tighter one of min(p / P, d / D), and shrinking the looser one keeps the sum. What serves
is then either as it was, or as promised. Several older classes (A -> B -> C) leave fragments that pair with nobody, so
that all moves may be barred; then, and only then, the target may have one pod per further class above maxSurge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from sluice_operator.decide.groups import (
    Count,
    Group,
    RolloutView,
    allowed,
    available,
    capacity,
    clean_up_budget,
    expected,
    promised,
    serving,
    shares,
)
from sluice_operator.decide.observed import Revision, Workload
from sluice_operator.names import ENGINE_ROLES, PodRole, Verdict


@dataclass(frozen=True, slots=True)
class Grow:
    """Of the target."""

    role: PodRole
    replicas: int


@dataclass(frozen=True, slots=True)
class Regrow:
    """Of the last good revision, which has lost pods before the target could replace them."""

    role: PodRole
    revision: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """By one pod, through a drain."""

    role: PodRole
    revision: str


Move = Grow | Regrow | Shrink


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
    needs = {role: _needed(view, role) for role in ENGINE_ROLES}
    grows = tuple(grow for role in ENGINE_ROLES if (grow := _grow(view, role, 0, needs[role])) is not None)
    regrows = () if shrinks else tuple(_regrows(view, grows, needs))
    if shrinks or grows or regrows or not _is_stuck(view):
        return (*grows, *regrows, *shrinks)
    extra = len({group.klass for group in view.groups if _shrinkable(view, group)}) - 1
    return tuple(grow for role in ENGINE_ROLES if (grow := _grow(view, role, extra, 0)) is not None)


def _is_stuck(view: RolloutView) -> bool:
    """Nothing that is under way could end it."""
    is_target_up = all(g.replicas == g.useful for g in view.groups if g.revision == view.target)
    return is_rolling(view) and view.routing_known and is_target_up and not any(group.leaving for group in view.groups)


# -- growth -----------------------------------------------------------------------------------------------------------


def _grow(view: RolloutView, role: PodRole, extra: int, reserved: int) -> Grow | None:
    """`reserved`: pods that the last good revision is to have."""
    mine = next((g.replicas for g in view.groups if g.role is role and g.revision == view.target), 0)
    others = sum(g.replicas for g in view.groups if g.role is role and g.revision != view.target)
    good = sum(g.replicas for g in view.groups if g.role is role and g.revision == view.fallback)
    others += max(0, reserved - good)
    wanted = view.wanted[role]
    limit = min(wanted, max(mine, wanted + view.max_surge + extra - others))
    return Grow(role, limit) if limit > mine else None


def _needed(view: RolloutView, role: PodRole) -> int:
    """Pods that the last good revision must have so that what is allowed is promised; 0 if it need not grow. A gap in
    routing that may pass is none."""
    if not view.fallback or not view.routing_known or _yields(view, view.fallback):
        return 0
    count = expected(view)
    # It may have no Deployment any more, and so no class of its own.
    mine = next((g.klass for g in view.groups if g.revision == view.fallback), view.fallback)
    there = shares(view.groups, view.wanted, count)
    missing = allowed(view.wanted, view.max_unavailable) - sum(there.values(), Fraction(0))
    if missing <= 0:
        return 0
    others = sum(
        count(g) for g in view.groups if g.role is role and g.klass == mine and g.revision != view.fallback
    )  # of one fingerprint with it
    return max(0, math.ceil((there.get(mine, Fraction(0)) + missing) * view.wanted[role]) - others)


def _regrows(view: RolloutView, grows: Iterable[Grow], needs: Mapping[PodRole, int]) -> Iterable[Regrow]:
    grown = {grow.role: grow.replicas for grow in grows}
    for role in ENGINE_ROLES:
        mine = [g for g in view.groups if g.role is role]
        good = sum(g.replicas for g in mine if g.revision == view.fallback)
        target = sum(g.replicas for g in mine if g.revision == view.target)
        others = sum(g.replicas for g in mine if g.revision not in (view.fallback, view.target))
        room = view.wanted[role] + view.max_surge - others - grown.get(role, target)
        if (limit := min(needs[role], room)) > good:
            yield Regrow(role, view.fallback, limit)


# -- shrinking --------------------------------------------------------------------------------------------------------


def _shrinkable(view: RolloutView, group: Group) -> bool:
    keep = view.wanted[group.role] if group.revision == view.target else 0
    return group.replicas > keep


def _shrinks(view: RolloutView) -> tuple[Shrink, ...]:
    """First pods that are not ready (a victim in its drain among them), then as many ready ones as may go."""
    groups = list(view.groups)
    told: list[Shrink] = []
    # A drain that has begun goes on first; the last good revision keeps its places longest.
    order = sorted(range(len(groups)), key=lambda i: (not groups[i].leaving, groups[i].revision == view.fallback))
    for index in order:
        group = groups[index]
        if group.idle and _shrinkable(view, group) and _may_lose_idle(view, groups, index):
            groups[index] = _less_idle(group)
            told.append(Shrink(group.role, group.revision))
    while view.routing_known:
        best = _best_shrink(view, groups, {(shrink.role, shrink.revision) for shrink in told})
        if best is None:
            return tuple(told)
        told.append(Shrink(groups[best].role, groups[best].revision))
        groups[best] = _less(view, groups[best])
    return tuple(told)


def _may_lose_idle(view: RolloutView, groups: list[Group], index: int) -> bool:
    group = groups[index]
    if group.revision == view.target:
        return True
    if group.failed and _yields(view, group.revision):
        return True
    if clean_up_budget(view, groups, group.role) < 1:
        return False
    after = [*groups[:index], _less_idle(group), *groups[index + 1 :]]
    return _keeps(view, groups, after, promised(view))


def _yields(view: RolloutView, revision: str) -> bool:
    """Whether failed pods of an older revision are to make room: the target has pods that find none."""
    return view.homeless > 0 and any(g.failed for g in view.groups if g.revision == revision)


def _best_shrink(view: RolloutView, groups: list[Group], busy: set[tuple[PodRole, str]]) -> int | None:
    """The index of the group whose ready pod costs least, the smallest group first; None if none may go. Of one with
    pods that are not ready, those would go."""
    told: list[tuple[Fraction, int]] = []
    for index, group in enumerate(groups):
        if (group.role, group.revision) in busy or group.idle or not _shrinkable(view, group):
            continue
        after = [*groups[:index], _less(view, group), *groups[index + 1 :]]
        if _may_lose_ready(view, groups, after, group):
            told.append((capacity(after, view.wanted, serving(view)), index))
    best = max(told, key=lambda one: (one[0], -groups[one[1]].ready, -one[1]), default=None)
    return None if best is None else best[1]


def _may_lose_ready(view: RolloutView, before: list[Group], after: list[Group], group: Group) -> bool:
    is_spare = available(view, after, group.role) >= view.least(group.role)
    return is_spare and _keeps(view, before, after, serving(view)) and _keeps(view, before, after, promised(view))


def _keeps(view: RolloutView, before: Iterable[Group], after: Iterable[Group], count: Count) -> bool:
    """Capacity by `count` stays at what is allowed, or as it is."""
    floor = min(allowed(view.wanted, view.max_unavailable), capacity(before, view.wanted, count))
    return capacity(after, view.wanted, count) >= floor


def _less_idle(group: Group) -> Group:
    return replace(group, replicas=group.replicas - 1, leaving=max(0, group.leaving - 1))


def _less(view: RolloutView, group: Group) -> Group:
    """One ready pod less. Of the target one that is not routed to, if that has lasted; else the worst is expected."""
    if group.lost:
        return replace(group, replicas=group.replicas - 1, unrouted=group.unrouted - 1, lost=group.lost - 1)
    if group.useful:
        return replace(group, replicas=group.replicas - 1, useful=group.useful - 1)
    return replace(group, replicas=group.replicas - 1, unrouted=group.unrouted - 1)


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


def choose_fallback(target: str, revisions: Iterable[Revision], workloads: Iterable[Workload]) -> str:
    """The good revision that may grow again while `target` has not taken over; empty if there is none.

    Only one of which places are left, and of several the one with most: a revision that gave up its last place, because
    it was replaced or because nothing was wanted, has no part in what comes after."""
    left = Counter[str]()
    for workload in workloads:
        left[workload.revision] += workload.replicas
    good = [r for r in revisions if r.verdict is Verdict.GOOD and r.hash != target and left[r.hash]]
    best = max(good, key=lambda revision: (left[revision.hash], revision.number), default=None)
    return "" if best is None else best.hash


def classes(revisions: Iterable[str], fingerprints: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Revision -> class. Two are one class only if the engines of both report one and the same fingerprint."""
    told: dict[str, str] = {}
    for revision in revisions:
        reported = fingerprints.get(revision, frozenset())
        told[revision] = f"fingerprint {next(iter(reported))}" if len(reported) == 1 else f"revision {revision}"
    return told
