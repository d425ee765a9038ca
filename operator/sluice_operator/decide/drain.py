"""How one pod leaves a Deployment. A ReplicaSet removes not-ready pods before it looks at anything else, so:

drain the victim; close its readiness gate; when it has finished (or its time is over) and every not-ready pod of the
Deployment may die, shrink by one; then look who died. A drained pod that is still there and that nobody wants gone any
more is deleted, for an engine cannot take a drain back; its ReplicaSet makes a new one.

All times come from the pods' own conditions, so an operator that has forgotten everything goes on where it was.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from sluice_operator.decide.actions import Action, Delete, Drain, Scale, SetServing
from sluice_operator.decide.observed import Pod, Workload


def shrink(
    workload: Workload, members: Sequence[Pod], now: float, timeout_s: float, useful: Container[str]
) -> tuple[Action, ...]:
    """The next actions that bring `workload` one pod down. `members`: its pods that its ReplicaSet counts; `useful`:
    names of those that take requests."""
    if len(members) > workload.replicas:
        return ()  # the last shrink is still being carried out
    if len(members) < workload.replicas:
        return (_scale(workload),)  # the one to go does not exist yet
    down = [pod for pod in members if not pod.ready]
    if down and all(may_die(pod, now, timeout_s) for pod in down):
        return (_scale(workload),)
    return begin(choose_victim(members, now, timeout_s, useful))


def begin(victim: Pod) -> tuple[Action, ...]:
    """What is still missing of: drain, then not ready. Of one that does not answer nobody can see whether it was told:
    its gate is closed first, and it is not asked again and again."""
    close = () if victim.serving is False else (SetServing(victim.name, victim.uid, False),)
    drain = Drain(victim.name, victim.uid)
    if victim.load is None:
        return (*close, drain) if close else ()
    return close if victim.load.draining else (drain, *close)


def choose_victim(members: Sequence[Pod], now: float, timeout_s: float, useful: Container[str]) -> Pod:
    """One that has been not ready for so long that it bars the others; then one whose drain has begun; then a not-ready
    one; then one that takes no requests, for it may be that one that the rollout counts on; then the one with the
    least work left, the newest first."""

    def rank(pod: Pod) -> int:
        if pod.is_leaving:
            return 1
        if pod.ready:
            return 4 if pod.name in useful else 3
        return 0 if now - pod.ready_changed_at >= timeout_s else 2

    def work(pod: Pod) -> int:
        return pod.load.remaining if pod.load is not None else 1 << 30

    return min(members, key=lambda pod: (rank(pod), work(pod), -pod.created_at, pod.name))


def may_die(pod: Pod, now: float, timeout_s: float) -> bool:
    """Not ready, and nothing of value is lost with it."""
    if pod.ready:
        return False
    if not pod.node or not pod.started:
        return True  # serves nobody
    if pod.serving is False:
        return now - pod.serving_changed_at >= timeout_s or (pod.load is not None and pod.load.empty)
    return False


def open_new(members: Iterable[Pod]) -> tuple[Action, ...]:
    """A pod whose gate nobody has written is new: without this it would never be ready."""
    return tuple(SetServing(pod.name, pod.uid, True) for pod in members if pod.serving is None and not pod.is_leaving)


def settle(members: Iterable[Pod], now: float, timeout_s: float) -> tuple[Action, ...]:
    """Of a Deployment that is not to shrink: drained pods go, so that new ones come; an engine that has started anew
    in the middle of its drain may serve again. A drain whose gate nobody came to close is carried on."""
    told: list[Action] = []
    for pod in members:
        if pod.serving is not False and pod.is_leaving:
            told.append(SetServing(pod.name, pod.uid, False))
            continue
        if pod.serving is False and pod.load is not None and not pod.load.draining:
            told.append(SetServing(pod.name, pod.uid, True))
        elif pod.is_leaving and may_die(pod, now, timeout_s):
            told.append(Delete("Pod", pod.name, pod.uid))
    return tuple(told)


def _scale(workload: Workload) -> Scale:
    return Scale(
        workload.name,
        workload.role,
        workload.revision,
        workload.replicas - 1,
        workload.replicas,
        workload.resource_version,
    )
