"""Children that were restored without an owner."""

from __future__ import annotations

import pytest
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.decide.observed import Owner
from sluice_operator.decide.reading import owner_of
from sluice_operator.names import ENGINE_ROLES

TRUE, FALSE = ConditionStatus.TRUE, ConditionStatus.FALSE


@pytest.fixture
def served():
    cluster = Cluster(manifest(image=with_tag("A"), prefill={"replicas": 1}, decode={"replicas": 2}))
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is TRUE
    return cluster


def orphaned(cluster):
    """All that a backup brings back without owners; the fake knows gateways' Deployments by their pods alone."""
    found = [*cluster.objects, *(("ControllerRevision", name) for name in cluster.revisions)]
    found += [("Deployment", d.name) for d in cluster.deployments.values() if d.role in ENGINE_ROLES]
    for key in found:
        cluster.owners[key] = Owner.ORPHAN
    return found


def test_what_is_as_it_would_be_made_now_is_adopted_and_nothing_restarts(served):
    pods = set(served.pods)
    found = orphaned(served)
    served.run(30)
    assert [key for key in found if served.owners[key] is not Owner.OURS] == []
    assert set(served.pods) == pods
    assert served.condition("Ready").status is TRUE


def test_a_deployment_whose_template_differs_is_not_and_is_named_with_the_command(served):
    orphaned(served)
    deployment = next(d for d in served.deployments.values() if d.role in ENGINE_ROLES)
    container = deployment.template["spec"]["containers"][0]
    template = {**deployment.template["spec"], "containers": [{**container, "image": "other:1"}]}
    deployment.template = {**deployment.template, "spec": template}
    served.run(30)
    accepted = served.condition("Accepted")
    assert (accepted.status, accepted.reason) == (FALSE, "NameConflict")
    assert f"`kubectl delete -n ns deployment/{deployment.name}`" in accepted.message
    assert served.owners["Deployment", deployment.name] is Owner.ORPHAN
    others = [key for key, owner in served.owners.items() if owner is Owner.ORPHAN]
    assert others == [("Deployment", deployment.name)]


def test_a_secret_never_is_and_all_that_is_left_is_named_at_once(served):
    for key in (("Secret", "m-key"), ("Service", "m-gateway")):
        served.objects.setdefault(key, {"kind": key[0], "metadata": {"name": key[1]}})
        served.owners[key] = Owner.ORPHAN
    served.objects["Service", "m-gateway"] = {
        "kind": "Service",
        "metadata": {"name": "m-gateway"},
        "spec": {"ports": []},
    }
    served.run(10)
    message = served.condition("Accepted").message
    assert "a Secret is never adopted" in message
    command = message.partition("`kubectl delete -n ns ")[2].partition("`")[0]
    assert {"secret/m-key", "service/m-gateway"} == set(command.split())


@pytest.mark.parametrize(
    ("labels", "references", "owner"),
    [
        ({"sluice.dev/deployment": "m"}, [], Owner.ORPHAN),
        ({"sluice.dev/deployment": "m"}, None, Owner.ORPHAN),
        ({"sluice.dev/deployment": "other"}, [], Owner.STRANGER),
        ({}, [], Owner.STRANGER),
        ({"sluice.dev/deployment": "m"}, [{"uid": "x", "kind": "Other", "controller": True}], Owner.STRANGER),
        ({"sluice.dev/deployment": "m"}, [{"uid": "u"}], Owner.OURS),
    ],
)
def test_an_orphan_has_our_label_and_no_controller(labels, references, owner):
    assert owner_of({"metadata": {"labels": labels, "ownerReferences": references}}, "m", "u") is owner
