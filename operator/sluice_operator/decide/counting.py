"""Pods, counted for a rollout: what was observed becomes the groups that it decides over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_operator.decide.failing import has_failed
from sluice_operator.decide.groups import Group
from sluice_operator.decide.observed import Memory, Observed, Pod, Workload
from sluice_operator.names import ENGINE_ROLES

# A gateway that does not route to a ready engine for less is in a passing gap, or has not heard of it yet.
LOST_S = 10.0


def unrouted_since(observed: Observed, now: float) -> Mapping[str, float]:
    """When each ready engine was first seen that a ready gateway does not route to, by uid. It begins anew after a look
    in which a gateway did not report."""
    if observed.routed is None:
        return {}
    before = observed.memory.unrouted_since
    return {
        pod.uid: before.get(pod.uid, now)
        for pod in observed.pods
        if pod.role in ENGINE_ROLES and pod.serves and pod.name not in observed.routed
    }


@dataclass(frozen=True, slots=True)
class Counting:
    """`memory`: with what this look has added."""

    observed: Observed
    memory: Memory
    now: float
    startup_max_s: float

    def group(self, workload: Workload, klass: str) -> Group:
        """More pods than replicas are a shrink that is being carried out: those that it leaves count."""
        members = self.observed.members(workload.role, workload.revision)
        left = workload.replicas
        useful = min(left, sum(self.observed.is_useful(pod) for pod in members))
        unrouted = min(left - useful, sum(pod.serves and not self.observed.is_useful(pod) for pod in members))
        idle = left - useful - unrouted
        return Group(
            role=workload.role,
            revision=workload.revision,
            klass=klass,
            replicas=left,
            useful=useful,
            unrouted=unrouted,
            lost=min(unrouted, sum(self._is_lost(pod) for pod in members)),
            leaving=min(idle, sum(pod.is_leaving for pod in members)),
            failed=min(idle, sum(self._has_failed(pod) for pod in members)),
        )

    def homeless(self, target: str) -> int:
        """Engines of the target that the scheduler has found no node for, beyond what is about to become free."""
        engines = [pod for pod in self.observed.pods if pod.role in ENGINE_ROLES]
        waiting = sum(
            pod.is_member and pod.revision == target and not pod.node and bool(pod.unschedulable) for pod in engines
        )
        going = sum(bool(pod.node) and bool(pod.gone_by) for pod in engines)
        return max(0, waiting - going)

    def _is_lost(self, pod: Pod) -> bool:
        since = self.memory.unrouted_since.get(pod.uid)
        return since is not None and self.now - since >= LOST_S

    def _has_failed(self, pod: Pod) -> bool:
        since = self.memory.failing_since.get(pod.uid, self.now)
        return has_failed(pod, self.now, self.startup_max_s, since)
