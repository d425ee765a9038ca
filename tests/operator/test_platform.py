"""What platform engineers set: accounts, names of GPUs, the gateway's Service."""

from __future__ import annotations

import pytest
from operator_cluster import manifest

from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.placement.node import read_node
from sluice_operator.placement.placement import place
from sluice_operator.render.children import OwnerRef, standing
from sluice_operator.render.revision import StandardRenderer, revision_hash

RENDERER = StandardRenderer("control:1")
MIG = "nvidia.com/mig-3g.40gb"


def spec(**changes):
    return from_json(ModelDeploymentSpec, manifest(**changes), "spec")


def made(told, kind):
    return {o["metadata"]["name"]: o for o in standing(OwnerRef("ns", "m", "u"), told) if o["kind"] == kind}


def pod(told, role):
    if role is PodRole.GATEWAY:
        return RENDERER.gateway("m", told, "g")["spec"]
    return RENDERER.engine("m", told, "r")[role.value]["template"]["spec"]


@pytest.mark.parametrize("role", PodRole)
def test_a_role_runs_as_the_account_that_it_is_given(role):
    told = spec(**{role.value: {"serviceAccountName": "theirs"}})
    assert pod(told, role)["serviceAccountName"] == "theirs"
    others = {pod(told, other)["serviceAccountName"] for other in PodRole if other is not role}
    assert "theirs" not in others
    assert others <= made(told, "ServiceAccount").keys()


def test_accounts_that_nobody_uses_are_not_made_and_rights_go_to_who_watches():
    theirs = {"serviceAccountName": "theirs"}
    told = spec(prefill=theirs, decode=theirs, gateway=theirs)
    assert made(told, "ServiceAccount") == {}
    (subject,) = made(told, "RoleBinding")["m-gateway"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("theirs", "ns")
    assert not any(pod(told, role)["automountServiceAccountToken"] for role in ENGINE_ROLES)


def test_a_mig_slice_is_asked_for_by_its_name_and_found_on_nodes():
    told = spec(accelerator={"type": "GPU", "gpu": {"resourceName": MIG}})
    for role in ENGINE_ROLES:
        (main,) = [c for c in pod(told, role)["containers"] if c["name"] == "main"]
        assert main["resources"]["limits"] == {MIG: "1"}
    sliced = read_node({"metadata": {"name": "a"}, "status": {"allocatable": {MIG: "2", "nvidia.com/gpu": "0"}}}, 0)
    whole = read_node({"metadata": {"name": "b"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}, 0)
    found = place(told, [sliced, whole], ())
    assert [row.refusal is None for row in found.rows if row.role is PodRole.DECODE] == [True, False]
    assert f"decode: 1 node cannot be used: no {MIG}" in found.reasons
    assert f"no {MIG}" in place(told, [whole], ()).message
    usual = place(spec(accelerator={"type": "GPU", "gpu": {}}), [sliced, whole], ())
    assert [row.refusal is None for row in usual.rows if row.role is PodRole.DECODE] == [False, True]


def test_the_usual_name_changes_no_revision():
    plain, named = {"type": "GPU", "gpu": {}}, {"type": "GPU", "gpu": {"resourceName": "nvidia.com/gpu"}}
    assert revision_hash(spec(accelerator=plain)) == revision_hash(spec(accelerator=named))


def test_the_gateways_service_is_as_load_balancers_want_it():
    told = spec(
        gateway={
            "service": {
                "type": "LoadBalancer",
                "labels": {"expose": "dns", "sluice.dev/role": "x"},
                "loadBalancerClass": "service.k8s.aws/nlb",
                "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/8"],
            }
        }
    )
    service = made(told, "Service")["m-gateway"]
    assert service["spec"]["loadBalancerClass"] == "service.k8s.aws/nlb"
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8", "fd00::/8"]
    assert service["metadata"]["labels"]["expose"] == "dns"
    assert service["metadata"]["labels"]["sluice.dev/role"] == "gateway"
    plain = made(spec(), "Service")["m-gateway"]["spec"]
    assert not {"loadBalancerClass", "loadBalancerSourceRanges"} & plain.keys()
