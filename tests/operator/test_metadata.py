"""What the policies of a cluster demand: labels and annotations of every child, user ids, ports, and their refusals."""

from __future__ import annotations

import json

import pytest
from operator_cluster import Cluster, manifest
from template_api import Api, look, nothing

from sluice_operator.api.spec import MetadataSpec, ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import Apply, Label
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.render.children import (
    OwnerRef,
    controller_revision,
    engine_objects,
    gateway_deployment,
    metadata_change,
    standing,
)
from sluice_operator.render.revision import StandardRenderer, gateway_hash, revision_hash

WANTED = {"labels": {"team": "search"}, "annotations": {"example.com/cost-centre": "42"}}
RENDERER = StandardRenderer("control:1")


def spec(**changes):
    return from_json(ModelDeploymentSpec, manifest(**changes), "spec")


def children(told, renderer=RENDERER):
    owner = OwnerRef("ns", "m", "u", told.metadata)
    data = renderer.engine("m", told, "r")
    return (
        *standing(owner, told, renderer.api_ports, renderer.dns_ports),
        controller_revision(owner, "r", 1, data),
        *(item for role in ENGINE_ROLES for item in engine_objects(owner, role, "r", data[role.value])),
        gateway_deployment(owner, 1, "g", renderer.gateway("m", told, "g")),
    )


def test_every_child_has_the_labels_and_annotations_of_the_spec_and_keeps_its_own():
    gpu = {"type": "GPU", "gpu": {"allocation": "ResourceClaim"}}
    made = children(spec(metadata=WANTED, accelerator=gpu, monitoring={"podMonitor": True}))
    assert {"Deployment", "Service", "ConfigMap", "PodMonitor", "ResourceClaimTemplate"} <= {i["kind"] for i in made}
    for item in made:
        assert item["metadata"]["labels"]["team"] == "search", item["kind"]
        assert item["metadata"]["labels"]["sluice.dev/deployment"] == "m"
        assert item["metadata"]["annotations"]["example.com/cost-centre"] == "42", item["kind"]


def test_changing_them_replaces_no_pod():
    before, after = spec(), spec(metadata=WANTED)
    assert revision_hash(before) == revision_hash(after)
    assert gateway_hash(before, RENDERER) == gateway_hash(after, RENDERER)
    assert RENDERER.engine("m", before, "r") == RENDERER.engine("m", after, "r")


def test_children_that_are_made_once_get_them_later_and_lose_them_again():
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    pods = set(cluster.pods)
    cluster.change(metadata=WANTED)
    cluster.run_until_quiet(2000)
    configs = [item["metadata"] for (kind, _), item in cluster.objects.items() if kind == "ConfigMap"]
    assert configs
    assert all(meta["labels"]["team"] == "search" for meta in configs)
    cluster.change(metadata={"labels": {"owner": "a"}})
    cluster.run_until_quiet(2000)
    for kind, name in cluster.objects:
        meta = cluster.objects[kind, name]["metadata"]
        assert "team" not in meta["labels"]
        assert "example.com/cost-centre" not in meta.get("annotations", {})
        assert meta["labels"]["owner"] == "a"
        assert meta["labels"]["sluice.dev/deployment"] == "m"
    assert set(cluster.pods) == pods
    assert not [action for action in cluster.plan() if isinstance(action, Label | Apply)]


def test_what_others_have_put_on_a_child_is_left_alone():
    extra = MetadataSpec({"team": "b"}, {})
    there = {"labels": {"theirs": "x", "team": "a"}, "annotations": {"theirs": "y"}}
    keys = json.dumps({"labels": ["team"]})
    assert metadata_change(there, extra) == {"labels": {"team": "b"}, "annotations": {"sluice.dev/metadata": keys}}
    done = {"labels": {"theirs": "x", "team": "b"}, "annotations": {"theirs": "y", "sluice.dev/metadata": keys}}
    assert metadata_change(done, extra) == {}
    gone = {"labels": {"team": None}, "annotations": {"sluice.dev/metadata": None}}
    assert metadata_change(done, MetadataSpec()) == gone
    # Nonsense, or a list of what is ours, takes nothing of ours away.
    for told in ("3", "x", "[]", '{"labels": 4}', '{"labels": ["sluice.dev/deployment", 7]}'):
        wiped = {"labels": {"sluice.dev/deployment": "m"}, "annotations": {"sluice.dev/metadata": told}}
        assert metadata_change(wiped, MetadataSpec()) == {"annotations": {"sluice.dev/metadata": None}}


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({"labels": {"sluice.dev/role": "x"}}, "spec.metadata.labels[sluice.dev/role]"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "spec.metadata.labels[app.kubernetes.io/name]"),
        ({"annotations": {"a b": "x"}}, "spec.metadata.annotations[a b]"),
        ({"labels": {"a": "not a label"}}, "spec.metadata.labels[a]"),
        ({"labels": {"a": 3}}, "spec.metadata.labels[a]"),
    ],
)
def test_what_cannot_be_a_label_is_refused_with_its_path(metadata, path):
    ((reason, problem),) = parse("m", manifest(metadata=metadata))
    assert (reason, problem.path) == ("SpecInvalid", path)
    assert problem.remedy


def test_labels_of_other_tools_are_no_ones_own():
    assert isinstance(
        parse("m", manifest(metadata={"labels": {"app.kubernetes.io/part-of": "x"}})), ModelDeploymentSpec
    )


def test_a_pod_monitor_has_the_labels_by_which_a_prometheus_selects():
    made = children(spec(monitoring={"podMonitor": True, "labels": {"release": "prometheus"}}))
    (monitor,) = [item for item in made if item["kind"] == "PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["metadata"]["labels"]["sluice.dev/deployment"] == "m"


# -- refusals of policies ---------------------------------------------------------------------------------------------

DENIALS = [
    'admission webhook "validate.kyverno.svc-fail" denied the request: label team is required',
    "deployments.apps \"m-decode-dry-run\" is forbidden: ValidatingAdmissionPolicy 'team' with binding 'team' denied"
    " request: label team is required",
]


@pytest.mark.parametrize("words", DENIALS)
async def test_what_a_policy_denies_is_no_fault_of_the_template(words):
    """It is told as WriteRefused when the object is made in earnest, in the policy's words."""
    assert await look(Api(invalid=words), nothing()) == ("", "")


async def test_a_template_that_speaks_of_denials_is_still_refused_when_it_is_wrong():
    told, _ = await look(Api(invalid="spec.template.spec.x: Invalid value: denied request"), nothing())
    assert told.startswith("spec: ")


async def test_a_label_that_policies_demand_is_there_when_the_template_is_tried():
    api = Api()
    assert await look(api, nothing(), metadata=WANTED) == ("", "")
    assert {labels.get("team") for labels in api.labels} == {"search"}


# -- user ids and ports -----------------------------------------------------------------------------------------------


def security(renderer, role, template=None):
    told = spec(**({role.value: {"template": {"spec": template}}} if template else {}))
    whole = renderer.gateway("m", told, "g") if role is PodRole.GATEWAY else renderer.engine("m", told, "r")[role.value]
    pod = whole["spec"] if role is PodRole.GATEWAY else whole["template"]["spec"]
    return pod["securityContext"]


@pytest.mark.parametrize("role", PodRole)
def test_a_user_that_is_null_is_the_clusters_to_choose(role):
    usual = security(RENDERER, role)
    assert (usual["runAsUser"], usual["runAsGroup"], usual["fsGroup"]) == (65532, 65532, 65532)
    told = security(RENDERER, role, {"securityContext": {"runAsUser": None, "fsGroup": None}})
    assert "runAsUser" not in told
    assert "fsGroup" not in told
    assert (told["runAsGroup"], told["runAsNonRoot"]) == (65532, True)
    # What is not a user id is not given away by a null.
    kept = security(RENDERER, role, {"securityContext": {"runAsNonRoot": None, "seccompProfile": None}})
    assert kept["runAsNonRoot"] is True
    assert kept["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("role", PodRole)
def test_the_operator_can_leave_all_users_to_the_cluster_or_set_another(role):
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & security(StandardRenderer("c", user=None), role).keys()
    assert security(StandardRenderer("c", user=1001), role)["runAsUser"] == 1001
    assert security(StandardRenderer("c", user=None), role, {"securityContext": {"runAsUser": 7}})["runAsUser"] == 7


def test_gateways_are_replaced_when_their_user_is_another_and_only_then():
    assert gateway_hash(spec(), StandardRenderer("c")) == gateway_hash(spec(), StandardRenderer("c", dns_ports=(5353,)))
    assert gateway_hash(spec(), StandardRenderer("c")) != gateway_hash(spec(), StandardRenderer("c", user=None))


def test_policies_let_pods_go_to_name_servers_where_these_listen():
    made = children(spec(), StandardRenderer("c", dns_ports=(53, 5353)))
    for policy in (item["spec"] for item in made if item["kind"] == "NetworkPolicy"):
        opened = [{(p["protocol"], p["port"]) for p in rule["ports"]} for rule in policy["egress"] if "to" not in rule]
        assert {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)} in opened
