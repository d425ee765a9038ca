"""Fields of a pod template that no Kubernetes has."""

from __future__ import annotations

import json

import pytest
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator import offline, pod_fields
from sluice_operator.pod_fields import refused_fields, unknown_fields
from sluice_operator.render.merge import merge

PATH = "spec.prefill.template"
SIDECAR = {"name": "proxy", "image": "x", "ports": [{"containerPort": 80}]}


def unknown(pod, **template):
    return {p.path: p.remedy for p in unknown_fields({"spec": pod} | template, PATH)}


@pytest.mark.parametrize(
    ("pod", "path", "remedy"),
    [
        ({"tolerationz": []}, "tolerationz", "did you mean tolerations?"),
        ({"priorityClass": "high"}, "priorityClass", "did you mean priorityClassName?"),
        ({"zzz": 1}, "zzz", "correct or remove it"),
        ({"tolerations": [{"key": "a"}, {"effects": "b"}]}, "tolerations[1].effects", "did you mean effect?"),
        ({"containers": [SIDECAR | {"resource": {}}]}, "containers[0].resource", "did you mean resources?"),
        ({"initContainers": [{"name": "a", "Image": "x"}]}, "initContainers[0].Image", "did you mean image?"),
        ({"volumes": [{"name": "v", "emptydir": {}}]}, "volumes[0].emptydir", "did you mean emptyDir?"),
        ({"affinity": {"nodeAffinity": {"required": {}}}}, "affinity.nodeAffinity.required", "correct or remove it"),
        ({"containers": [{"resources": {"limit": {}}}]}, "containers[0].resources.limit", "did you mean limits?"),
    ],
)  # fmt: skip
def test_a_misspelled_field_is_found_wherever_it_is(pod, path, remedy):
    assert unknown(pod) == {f"{PATH}.spec.{path}": remedy}


def test_what_has_free_names_or_values_is_no_field():
    free = {
        "nodeSelector": {"any.thing/at-all": "x"},
        "containers": [SIDECAR | {"resources": {"limits": {"example.com/device": "1"}, "requests": {"cpu": 1}}}],
        "volumes": [{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"foo": "bar"}}}],
        "overhead": {"cpu": "1"},
    }
    assert unknown(free, metadata={"labels": {"my": "label"}, "annotations": {"x": "y"}}) == {}
    # What is of no shape that could be a pod's is for accept and the API server to refuse.
    assert unknown({"containers": "x", "tolerations": {"a": 1}, "affinity": []}) == {}


def test_the_table_is_complete_and_small():
    told = json.loads((pod_fields.files("sluice_operator") / "pod_schema.json").read_text())
    assert {"PodSpec", "Container", "Volume", "Affinity", "Probe", "EphemeralContainer"} <= told["types"].keys()
    for fields in told["types"].values():
        for kind in fields.values():
            assert kind == "" or kind.lstrip("[]{}") in told["types"]
    assert len(json.dumps(told)) < 40_000


def test_everything_that_we_render_is_in_it():
    cluster = Cluster(manifest(image=with_tag("A")))
    cluster.run(60)
    (revision,) = cluster.revisions.values()
    for role in revision["data"].values():
        assert list(unknown_fields(role["template"], "x")) == []


def test_what_the_api_server_names_is_named_where_the_user_wrote_it():
    """Ours come first among containers, and what is ours is not the user's to correct."""
    theirs = {"spec": {"tolerationz": [], "containers": [SIDECAR | {"portz": []}], "tolerations": [{"kee": "a"}]}}
    ours = {"spec": {"containers": [{"name": "main", "new": 1}], "newField": 1}}
    rendered = merge(theirs, ours)
    words = (
        'Deployment in version "v1" cannot be handled as a Deployment: strict decoding error: '
        'unknown field "spec.template.spec.containers[0].new", unknown field "spec.template.spec.containers[1].portz", '
        'unknown field "spec.template.spec.newField", unknown field "spec.template.spec.tolerationz", '
        'unknown field "spec.template.spec.tolerations[0].kee"'
    )
    told = [p.path for p in refused_fields(words, rendered, theirs, PATH)]
    assert told == [f"{PATH}.spec.{x}" for x in ("containers[0].portz", "tolerationz", "tolerations[0].kee")]
    assert refused_fields("spec.template.spec.containers[0].image: Required value", rendered, theirs, PATH) == ()


def plan_of(**changes):
    return list(offline.report("ns", "m", manifest(**changes), None, "control:1"))


def test_plan_refuses_misspelled_fields_of_every_template():
    for role in ("prefill", "decode", "gateway"):
        lines = plan_of(**{role: {"template": {"spec": {"tolerationz": [], "priorityClass": "x"}}}})
        assert (lines[0].text, lines[0].status) == ("Accepted: False", 1)
        assert [f"spec.{role}.template.spec.tolerationz" in line.text for line in lines] == [False, True, False]
        assert all("TemplateInvalid" in line.text for line in lines[1:])
    assert plan_of(prefill={"template": {"spec": {"tolerations": []}}})[0].text == "Accepted: True"
