"""What somebody else has changed."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
from operator_cluster import manifest

from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import Apply
from sluice_operator.decide.diff import additions, covers, leftovers
from sluice_operator.decide.observed import Child, Memory, Observed, Owner
from sluice_operator.decide.plan import plan
from sluice_operator.decide.reading import read_workload
from sluice_operator.keys.keyring import Keyring
from sluice_operator.live.apply import Applier
from sluice_operator.live.cluster import FIELD_MANAGER
from sluice_operator.live.observe import Known
from sluice_operator.names import PodRole
from sluice_operator.render.children import OwnerRef, gateway_deployment
from sluice_operator.render.revision import StandardRenderer, gateway_hash

RENDERER = StandardRenderer("control:1")


def parsed() -> ModelDeploymentSpec:
    spec = parse("m", manifest())
    assert isinstance(spec, ModelDeploymentSpec)
    return spec


def deployment():
    """The gateways' Deployment as the API server has it."""
    spec = parsed()
    revision = gateway_hash(spec, RENDERER)
    owner = OwnerRef("ns", "m", "u")
    made = copy.deepcopy(
        gateway_deployment(owner, spec.gateway.replicas, revision, RENDERER.gateway("m", spec, revision))
    )
    made["metadata"] |= {"uid": "d", "resourceVersion": "1"}
    made["spec"]["template"]["spec"] |= {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
    for container in made["spec"]["template"]["spec"]["containers"]:
        container |= {"terminationMessagePath": "/dev/termination-log"}
    return made


def applied(item):
    """Deployments that plan applies when `item` is what is there of the gateways."""
    workload = read_workload(item)
    assert workload is not None
    assert workload.role is PodRole.GATEWAY
    child = Child("Deployment", item["metadata"]["name"], "d", "1", Owner.OURS, item)
    observed = Observed("ns", "m", "u", 2, Memory(0.0), workloads=(workload,), children=(child,))
    told = [action.object for action in plan(parsed(), observed, 1000.0, RENDERER) if isinstance(action, Apply)]
    return [
        made for made in told if made["metadata"]["name"] == item["metadata"]["name"] and made["kind"] == "Deployment"
    ]


def test_what_the_api_server_and_kubectl_restart_add_to_gateways_is_left():
    item = deployment()
    assert applied(item) == []
    item["spec"]["template"]["metadata"].setdefault("annotations", {})["kubectl.kubernetes.io/restartedAt"] = "now"
    assert applied(item) == []


def test_what_somebody_else_has_made_the_gateways_run_is_put_back():
    """Their image could be another's, under a label that still named our revision, and all was Ready."""
    for member, value in (("image", "evil:1"), ("command", ["sh"])):
        item = deployment()
        item["spec"]["template"]["spec"]["containers"][0][member] = value
        (put_back,) = applied(item)
        assert put_back["spec"]["template"]["spec"]["containers"][0].get(member) != value
    item = deployment()
    item["spec"]["template"]["spec"]["containers"] = []
    assert len(applied(item)) == 1


def test_what_somebody_else_has_added_to_the_gateways_is_no_reason_to_apply_for_ever():
    """An Apply takes away nothing that it never set, so the next look would find it again."""
    item = deployment()
    (main,) = item["spec"]["template"]["spec"]["containers"]
    assert "args" not in main
    main["args"] = ["--more"]
    item["spec"]["template"]["spec"]["containers"].append({"name": "stranger", "image": "proxy:1"})
    assert applied(item) == []


class Unmoved:
    """An API server to which what is applied is no change, or one."""

    def __init__(self, version: str) -> None:
        self.version = version

    async def patch(self, path: str, content: str, body: Any, **query: str) -> Any:
        return {"metadata": {"resourceVersion": self.version}}


@pytest.mark.parametrize(("version", "is_idle"), [("1", True), ("2", False)])
async def test_what_changed_nothing_is_no_reason_to_look_again_at_once(version: str, is_idle: bool) -> None:
    """Such as where a webhook has the last word about an image: it was a write every other second, for ever."""
    item = deployment()
    item["metadata"]["managedFields"] = [{"manager": FIELD_MANAGER, "operation": "Apply"}]
    child = Child("Deployment", item["metadata"]["name"], "d", "1", Owner.OURS, item)
    observed = Observed("ns", "m", "u", 2, Memory(0.0), children=(child,))
    cluster, nobody = cast(Any, Unmoved(version)), cast(Any, None)
    applier = Applier(cluster, nobody, observed, Known("u", Memory(0.0), Keyring("ns", "m")))
    assert (await applier.obey(Apply(item))).idle is is_idle


def owned(tree, operation="Apply", manager=FIELD_MANAGER, **more):
    return {"metadata": {"managedFields": [{"manager": manager, "operation": operation, "fieldsV1": tree, **more}]}}


WANTED = {
    "metadata": {"annotations": {"b": "2"}, "labels": {"l": "1"}},
    "spec": {
        "ports": [{"name": "http", "port": 80, "protocol": "TCP"}, {"name": "x", "port": 81}],
        "type": "ClusterIP",
    },
}


@pytest.mark.parametrize(
    ("tree", "is_left"),
    [
        ({"f:metadata": {"f:annotations": {".": {}, "f:b": {}}}}, False),
        ({"f:metadata": {"f:annotations": {"f:a": {}, "f:b": {}}}}, True),
        ({"f:metadata": {"f:finalizers": {}}}, True),
        ({"f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:name": {}}}}}, False),
        ({"f:spec": {"f:ports": {'k:{"port":81,"protocol":"TCP"}': {"f:port": {}}}}}, False),
        ({"f:spec": {"f:ports": {'k:{"port":82,"protocol":"TCP"}': {"f:name": {}}}}}, True),
        ({"f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:nodePort": {}}}}}, True),
        ({"f:spec": {"f:type": {}, "f:sessionAffinity": {}}}, True),
    ],
)
def test_what_we_own_and_no_longer_want_is_left_over(tree, is_left):
    assert leftovers(owned(tree), WANTED, FIELD_MANAGER) is is_left
    assert not leftovers(owned(tree, manager="kubectl"), WANTED, FIELD_MANAGER)
    assert not leftovers(owned(tree, subresource="status"), WANTED, FIELD_MANAGER)


def test_of_what_we_created_defaults_are_not_left_over():
    """The API server counts them to whoever creates."""
    assert not leftovers(owned({"f:spec": {"f:sessionAffinity": {}}}, "Update"), WANTED, FIELD_MANAGER)
    assert leftovers(owned({"f:metadata": {"f:annotations": {"f:a": {}}}}, "Update"), WANTED, FIELD_MANAGER)


def test_what_is_added_to_a_selector_is_no_addition():
    """A Service that selects nobody any more is not the one that we wanted, though all that we said is still in it."""
    wanted = {"spec": {"selector": {"a": "1"}, "podSelector": {"matchLabels": {"b": "2"}}, "ports": [{"port": 1}]}}
    live = copy.deepcopy(wanted)
    live["spec"]["clusterIP"] = "10.0.0.1"
    assert covers(live, wanted)
    assert additions(live, wanted) == {}
    live["spec"]["selector"]["foo"] = "bar"
    live["spec"]["podSelector"]["matchLabels"]["foo"] = "bar"
    assert not covers(live, wanted)
    assert additions(live, wanted) == {
        "spec": {"selector": {"foo": None}, "podSelector": {"matchLabels": {"foo": None}}}
    }
