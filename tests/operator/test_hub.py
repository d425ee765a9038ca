"""Downloads in clusters without a way out of their own: a proxy, authorities, and what a template adds."""

from __future__ import annotations

import pytest
from operator_cluster import manifest

from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.decide.accept import parse
from sluice_operator.names import PodRole
from sluice_operator.render.children import OwnerRef, standing
from sluice_operator.render.revision import StandardRenderer

RENDERER = StandardRenderer("control:1")
URI = "hf://owner/name@main"
SECRET = {"secretKeyRef": {"name": "proxy", "key": "url"}}


def spec(hub=None, **changes):
    told = parse("m", manifest(model={"uri": URI} | ({"hub": hub} if hub else {}), **changes))
    assert isinstance(told, ModelDeploymentSpec), told
    return told


def pod(told, role):
    if role is PodRole.GATEWAY:
        return RENDERER.gateway("m", told, "g")["spec"]
    return RENDERER.engine("m", told, "r")[role.value]["template"]["spec"]


def download(told, role):
    (found,) = [c for c in pod(told, role)["initContainers"] if c["name"] == "download"]
    return found


def environment(container):
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


def outside(told, role):
    """TCP ports that its policy opens to every address, without those of name servers."""
    (policy,) = [
        o
        for o in standing(OwnerRef("ns", "m", "u"), told)
        if (o["kind"], o["metadata"]["name"]) == ("NetworkPolicy", f"m-{role}")
    ]
    rules = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
    return {p["port"] for ports in rules for p in ports} - {53}


@pytest.mark.parametrize("role", PodRole)
def test_a_download_goes_through_its_proxy_and_policies_let_it_go_nowhere_else(role):
    told = spec({"proxy": "http://proxy.example:3128"})
    found = environment(download(told, role))
    assert found["HTTPS_PROXY"] == found["HTTP_PROXY"] == found["https_proxy"] == "http://proxy.example:3128"
    assert outside(told, role) == {3128} | ({443, 6443} if role is PodRole.GATEWAY else set())
    assert 443 in outside(spec(), role)
    assert not [c for c in pod(told, role)["containers"] if "HTTPS_PROXY" in environment(c)]


@pytest.mark.parametrize("role", PodRole)
def test_a_download_trusts_the_authorities_of_a_config_map(role):
    told = spec({"caConfigMap": "company-ca"})
    found = download(told, role)
    assert (
        environment(found)["SSL_CERT_FILE"] == environment(found)["REQUESTS_CA_BUNDLE"] == "/etc/sluice/hub-ca/ca.crt"
    )
    assert {"name": "hub-ca", "mountPath": "/etc/sluice/hub-ca", "readOnly": True} in found["volumeMounts"]
    assert {"name": "hub-ca", "configMap": {"name": "company-ca"}} in pod(told, role)["volumes"]


@pytest.mark.parametrize("role", PodRole)
def test_a_template_adds_to_the_download_and_takes_nothing_from_it(role):
    added = {
        "name": "download",
        "env": [{"name": "HTTPS_PROXY", "valueFrom": SECRET}, {"name": "HF_HOME", "value": "/elsewhere"}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "resources": {"limits": {"memory": "1Gi"}},
    }
    template = {"spec": {"initContainers": [added], "volumes": [{"name": "extra", "emptyDir": {}}]}}
    told = spec({"egressPorts": [8443]}, **{role.value: {"template": template}})
    found = download(told, role)
    assert found["command"][:2] == ["hf", "download"]
    assert environment(found)["HTTPS_PROXY"] == SECRET
    assert environment(found)["HF_HOME"] == "/tmp/hf"
    assert {"name": "extra", "mountPath": "/extra"} in found["volumeMounts"]
    assert found["resources"] == {"limits": {"memory": "1Gi"}}
    assert {443, 8443} <= outside(told, role)


@pytest.mark.parametrize(
    ("uri", "container", "path"),
    [
        (URI, {"name": "download", "command": ["sh"]}, "initContainers[0].command"),
        (URI, {"name": "download", "image": "other"}, "initContainers[0].image"),
        (URI, {"name": "download", "env": 3}, "initContainers[0].env"),
        ("pvc://models/tiny", {"name": "download", "env": []}, "initContainers[0].name"),
        (URI, {"name": "tokenizer"}, "initContainers[0].name"),
    ],
)
def test_what_a_template_may_not_do_to_the_download_is_refused_with_its_path(uri, container, path):
    template = {"spec": {"initContainers": [container]}}
    found = parse("m", manifest(model={"uri": uri}, decode={"template": template}))
    assert [problem.path for _, problem in found] == [f"spec.decode.template.spec.{path}"]


@pytest.mark.parametrize("uri", ["s3://bucket/model", "gs://bucket/model"])
def test_buckets_are_refused_with_the_way_that_there_is(uri):
    ((_, problem),) = parse("m", manifest(model={"uri": uri}))
    assert problem.path == "spec.model.uri"
    assert "mount a bucket (s3://, gs://) as a claim or copy it into one" in problem.remedy


def test_a_proxy_and_authorities_that_cannot_be_are_refused():
    for hub, path in (
        ({"proxy": "proxy:3128"}, "spec.model.hub.proxy"),
        ({"proxy": "http://user:word@proxy:3128"}, "spec.model.hub.proxy"),
        ({"proxy": "http://proxy:70000"}, "spec.model.hub.proxy"),
        ({"caConfigMap": "a..b"}, "spec.model.hub.caConfigMap"),
        ({"egressPorts": [0]}, "spec.model.hub.egressPorts[0]"),
    ):
        found = parse("m", manifest(model={"uri": URI, "hub": hub}))
        assert [problem.path for _, problem in found] == [path]
