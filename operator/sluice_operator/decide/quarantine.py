"""Wedged pods that are kept for somebody to look at: a few, for a while."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_operator.api.spec import QuarantineSpec
from sluice_operator.decide.actions import Action, Delete, ReleasePod
from sluice_operator.decide.observed import Pod


def quarantine(pods: Iterable[Pod], limits: QuarantineSpec, now: float) -> tuple[Action, ...]:
    """Releases pods whose supervisor holds them in quarantine, so that their ReplicaSet makes others; deletes those
    beyond the limits. How long one has been kept is the age of its Ready=False."""
    pods = [pod for pod in pods if not pod.terminating]
    kept = sorted((pod for pod in pods if pod.quarantined), key=lambda pod: (pod.ready_changed_at, pod.name))
    over = [pod for pod in kept if now - pod.ready_changed_at >= limits.max_seconds]
    room = limits.max_pods - (len(kept) - len(over))
    over += [pod for pod in kept if pod not in over][limits.max_pods :]
    told: list[Action] = [Delete("Pod", pod.name, pod.uid) for pod in over]
    for pod in sorted((pod for pod in pods if wants_quarantine(pod)), key=lambda pod: pod.name):
        if room > 0:
            told.append(ReleasePod(pod.name, pod.uid, pod.resource_version))
            room -= 1
        else:
            told.append(Delete("Pod", pod.name, pod.uid))
    return tuple(told)


def wants_quarantine(pod: Pod) -> bool:
    return pod.is_member and not pod.ready and pod.load is not None and pod.load.quarantined
