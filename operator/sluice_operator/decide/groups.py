"""What the pods of each Deployment are worth to a rollout: counts, and the floors that follow from them.

A class is the revisions whose engines have equal fingerprints: only within one can prefill and decode be a pair. With
P, D the wanted prefill and decode engines, and p, d those of a class that count:

    capacity = sum over classes of min(p / P, d / D)
    allowed  = min((P - maxUnavailable) / P, (D - maxUnavailable) / D), at least 0

Who counts depends on the question:

| question | of older revisions | of the target |
| --- | --- | --- |
| what serves | ready, whether routed to or not | ready and routed to |
| what is promised | all replicas: a lost pod is made anew | ready and routed to |
| what is expected | the same | ready, unless it is known to be `lost` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from sluice_operator.names import ENGINE_ROLES, PodRole


@dataclass(frozen=True, slots=True)
class Group:
    """The pods of one Deployment, counted; none of the counts is above `replicas`.

    `useful`: ready, in no drain, and routed to by every ready gateway. `unrouted`: ready, in no drain, and not routed
    to; `lost`: those of them for which this is no passing gap. `leaving`: a drain of them has begun. `failed`: not
    ready, and waiting will not help.
    """

    role: PodRole
    revision: str
    klass: str
    replicas: int
    useful: int
    unrouted: int = 0
    lost: int = 0
    leaving: int = 0
    failed: int = 0

    @property
    def ready(self) -> int:
        return self.useful + self.unrouted

    @property
    def idle(self) -> int:
        """Not ready, leaving, or not made yet."""
        return self.replicas - self.ready


@dataclass(frozen=True, slots=True)
class RolloutView:
    """`routing_known` False: nobody knows whether a successor is routed to: what is ready is taken for useful, and no
    ready pod may go.

    `fallback`: the last good revision, older than the target; empty if there is none. `homeless`: pods of the target
    that the scheduler finds no node for, less the places that pods of ours are about to leave.
    """

    wanted: Mapping[PodRole, int]
    max_surge: int
    max_unavailable: int
    target: str
    groups: tuple[Group, ...]
    routing_known: bool = True
    fallback: str = ""
    homeless: int = 0

    def least(self, role: PodRole) -> int:
        """Pods of `role` that a rollout leaves available, as a Deployment does."""
        return max(0, self.wanted[role] - self.max_unavailable)


Count = Callable[[Group], int]


def useful(group: Group) -> int:
    return group.useful


def capacity(groups: Iterable[Group], wanted: Mapping[PodRole, int], count: Count = useful) -> Fraction:
    """Share of the wanted pairs; above 1 while more pods count than are wanted. 0 if none are wanted."""
    return sum(shares(groups, wanted, count).values(), Fraction(0))


def shares(groups: Iterable[Group], wanted: Mapping[PodRole, int], count: Count) -> Mapping[str, Fraction]:
    """The same, of each class."""
    if not all(wanted[role] for role in ENGINE_ROLES):
        return {}
    counted: dict[str, dict[PodRole, int]] = {}
    for group in groups:
        counted.setdefault(group.klass, dict.fromkeys(ENGINE_ROLES, 0))[group.role] += count(group)
    return {klass: min(Fraction(n[role], wanted[role]) for role in ENGINE_ROLES) for klass, n in counted.items()}


def allowed(wanted: Mapping[PodRole, int], max_unavailable: int) -> Fraction:
    if not all(wanted[role] for role in ENGINE_ROLES):
        return Fraction(0)
    return max(Fraction(0), min(Fraction(n - max_unavailable, n) for n in wanted.values()))


def serving(view: RolloutView) -> Count:
    return lambda group: group.useful if group.revision == view.target else group.ready


def promised(view: RolloutView) -> Count:
    return lambda group: group.useful if group.revision == view.target else group.replicas


def expected(view: RolloutView) -> Count:
    return lambda group: group.ready - group.lost if group.revision == view.target else group.replicas


def available(view: RolloutView, groups: Iterable[Group], role: PodRole) -> int:
    count = serving(view)
    return sum(count(group) for group in groups if group.role is role)


def clean_up_budget(view: RolloutView, groups: Iterable[Group], role: PodRole) -> int:
    """How many older pods that are not ready the Deployment controller would remove: all pods, less those that must be
    available, less those of the target that have not taken over."""
    mine = [group for group in groups if group.role is role]
    late = sum(group.replicas - group.useful for group in mine if group.revision == view.target)
    return sum(group.replicas for group in mine) - view.least(role) - late
