"""Gateways whose number somebody else decides."""

from __future__ import annotations

from operator_cluster import Cluster, manifest

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.names import PodRole


def test_an_autoscaler_of_gateways_is_obeyed_also_when_their_template_changes():
    cluster = Cluster(manifest(gateway={"replicas": 2, "scaling": {"mode": "External"}}))
    cluster.run_until_quiet(2000)
    (gateway,) = [d for d in cluster.deployments.values() if d.role is PodRole.GATEWAY]
    assert gateway.replicas == 2
    for replicas in (5, 1):
        gateway = cluster.deployments[gateway.name]
        gateway.replicas, gateway.version = replicas, gateway.version + 1
        cluster.run(60)
        assert cluster.deployments[gateway.name].replicas == replicas
        assert cluster.condition("GatewayReady").status is ConditionStatus.TRUE
    cluster.change(gateway={"replicas": 2, "scaling": {"mode": "External"}, "maxQueued": 77})
    cluster.run(60)
    assert cluster.deployments[gateway.name].replicas == 1
    cluster.change(gateway={"replicas": 2})
    cluster.run(60)
    assert cluster.deployments[gateway.name].replicas == 2
