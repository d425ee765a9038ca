"""An engine's Deployment is held: whatever is done to its template ends no pod."""

from __future__ import annotations

import pytest
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.decide.reading import read_workload
from sluice_operator.names import ENGINE_ROLES, LABEL_REVISION, LABEL_ROLE, PodRole


@pytest.fixture
def served():
    cluster = Cluster(manifest(image=with_tag("A"), prefill={"replicas": 2}, decode={"replicas": 3}))
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is ConditionStatus.TRUE
    return cluster


def engines(cluster):
    return [d for d in cluster.deployments.values() if d.role in ENGINE_ROLES]


def names(cluster):
    return sorted(p.name for p in cluster.pods.values() if p.role in ENGINE_ROLES and p.gone_at is None)


def test_engines_are_held_once_they_are_there_and_gateways_are_not(served):
    assert [d.paused for d in engines(served)] == [True, True]
    assert not any(d.paused for d in served.deployments.values() if d.role is PodRole.GATEWAY)


def test_a_restart_of_one_deployment_ends_no_engine_and_says_how_it_is_done(served):
    before = names(served)
    for deployment in engines(served):
        served.edit(deployment)
    served.run(60)
    assert names(served) == before
    assert served.condition("Ready").status is ConditionStatus.TRUE
    told = [event.message for event in served.events.values() if event.reason == "TemplateEdited"]
    assert len(told) == 2
    assert all("annotation in prefill.template and decode.template" in text for text in told)
    assert all(d.template == d.rolled for d in engines(served))
    assert all(d.paused for d in engines(served))


def test_a_restart_by_the_model_deployment_is_a_rollout(served):
    before = set(names(served))
    annotated = {"metadata": {"annotations": {"restarted": "today"}}}
    served.change(
        prefill=served.spec["prefill"] | {"template": annotated}, decode=served.spec["decode"] | {"template": annotated}
    )
    least = 5
    for _ in range(400):
        served.step()
        least = min(least, sum(p.ready for p in served.pods.values() if p.role in ENGINE_ROLES))
    assert not before & set(names(served))
    assert least >= 5
    assert served.broken == []
    assert all(d.paused for d in engines(served))


def test_it_stays_held_while_pods_are_missing_and_lost_ones_are_replaced(served):
    deployment = next(d for d in engines(served) if d.role is PodRole.DECODE)
    served.quota_is_full = True
    victim = next(p for p in served.pods.values() if p.role is PodRole.DECODE)
    victim.running, victim.gone_at, victim.ready = 0, served.now, False
    served.edit(deployment)
    others = set(names(served))
    served.run(30)
    assert deployment.paused
    assert deployment.template == deployment.rolled
    assert set(names(served)) == others
    served.quota_is_full = False
    served.run(120)
    assert len(names(served)) == 5


def test_why_pods_cannot_be_made_is_read_from_the_replica_set():
    """The controller of a Deployment that is held leaves its own condition as it was, for good or bad."""
    failed = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}
    labels = {LABEL_ROLE: "decode", LABEL_REVISION: "r"}
    meta = {"name": "m-decode-r", "uid": "d", "resourceVersion": "7", "labels": labels}

    def refused(deployment, replica_set, owner="d"):
        references = [{"uid": owner, "controller": True}]
        there = {"metadata": {"name": "x", "ownerReferences": references}, "status": replica_set}
        return read_workload({"metadata": meta, "spec": {"replicas": 2}, "status": deployment}, [there]).refused

    assert refused({}, failed) == "exceeded quota"
    assert refused(failed, {}) == ""
    assert refused({}, failed, owner="e") == ""
    assert refused(failed, {}, owner="e") == "exceeded quota", "before there is a ReplicaSet"
