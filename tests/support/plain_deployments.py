"""What Kubernetes itself would do: one plain Deployment per role, rolled by the Deployment controller.

The controller is modelled after pkg/controller/deployment/rolling.go of Kubernetes 1.34, for a constant number of
replicas and `minReadySeconds: 0`: `reconcileNewReplicaSet`, then, in a look of its own, `reconcileOldReplicaSets` with
its clean-up of unhealthy replicas. ReplicaSets, kubelets and the scheduler are those of the cluster in memory.
"""

from __future__ import annotations

from operator_cluster import TICK_S, Cluster, SimDeployment

from sluice_operator.names import ENGINE_ROLES, PodRole


class PlainDeployments(Cluster):
    """`deployments`: ReplicaSets, named after role and image tag, in the order of their creation."""

    def step(self, seconds: float = TICK_S) -> None:
        for role in ENGINE_ROLES:
            self._reconcile(role)
        self.tick(seconds)

    def tag_of(self, revision: str) -> str:
        return revision

    def _is_of(self, pod, tags) -> bool:
        return pod.revision in tags

    def _make(self, deployment: SimDeployment) -> None:
        super()._make(deployment)
        newest = next(reversed(self.pods.values()))
        newest.gate = True  # a plain pod has no gate

    def _kill(self, pod, why) -> None:
        pod.gone_at, pod.ready = self.now, False  # a plain Deployment drains nothing

    # -- the Deployment controller --------------------------------------------------------------------------------

    def _reconcile(self, role: PodRole) -> None:
        wanted = self.spec[role.value]["replicas"]
        new = self._new_set(role)
        old = [d for d in self.deployments.values() if d.role is role and d is not new]
        if not self._scale_up(new, old, wanted):
            self._scale_down_old(new, old, wanted)

    def _new_set(self, role: PodRole) -> SimDeployment:
        tag = self.spec["image"]["tag"]
        name = f"{role.value}-{tag}"
        return self.deployments.setdefault(name, SimDeployment(name, role, tag, 0))

    def _scale_up(self, new: SimDeployment, old: list[SimDeployment], wanted: int) -> bool:
        """Whether anything was scaled."""
        most = wanted + self.spec["rollout"]["maxSurge"]
        there = new.replicas + sum(d.replicas for d in old)
        more = min(most - there, wanted - new.replicas)
        if new.replicas <= wanted and more <= 0:
            return False
        new.replicas = wanted if new.replicas > wanted else new.replicas + more
        return True

    def _scale_down_old(self, new: SimDeployment, old: list[SimDeployment], wanted: int) -> None:
        """`DeploymentMaxUnavailable`: never more than is wanted."""
        least = wanted - min(self.spec["rollout"]["maxUnavailable"], wanted)
        unavailable = new.replicas - self._available(new)
        budget = new.replicas + sum(d.replicas for d in old) - least - unavailable
        if budget <= 0 or not any(d.replicas for d in old):
            return
        self._clean_up(old, budget)
        spare = self._available(new) + sum(self._available(d) for d in old) - least
        for deployment in old:
            going = min(deployment.replicas, max(spare, 0))
            deployment.replicas -= going
            spare -= going

    def _clean_up(self, old: list[SimDeployment], budget: int) -> None:
        """Replicas that are not ready, of the oldest sets first."""
        for deployment in old:
            going = min(budget, deployment.replicas - min(deployment.replicas, self._available(deployment)))
            deployment.replicas -= going
            budget -= going

    def _available(self, deployment: SimDeployment) -> int:
        return sum(
            p.ready and p.gone_at is None and p.role is deployment.role and p.revision == deployment.revision
            for p in self.pods.values()
        )


def ready_pairs(cluster: Cluster) -> float:
    """How many pairs the ready pods make, as a share of those wanted; surge pods beyond them do not count."""
    wanted = {role: cluster.spec[role.value]["replicas"] for role in ENGINE_ROLES}
    ready: dict[str, dict[PodRole, int]] = {}
    for pod in cluster.pods.values():
        if pod.role in ENGINE_ROLES and pod.ready and pod.gone_at is None:
            shares = ready.setdefault(pod.revision, dict.fromkeys(ENGINE_ROLES, 0))
            shares[pod.role] += 1
    return min(1.0, sum(min(n[role] / wanted[role] for role in ENGINE_ROLES) for n in ready.values()))
