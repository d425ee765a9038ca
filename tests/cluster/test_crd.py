"""The CRD as a real API server takes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster_client import Refused
from external_metrics import METRIC, ExternalMetrics
from operator_cluster import manifest
from operator_invalid import INVALID, changed, good

from sluice_operator.api.crd import API_VERSION, COLUMNS, KIND
from sluice_operator.decide.accept import parse

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

FILE = Path(__file__).parents[2] / "charts/sluice-crds/templates/modeldeployments.yaml"


def collection(namespace):
    return f"/apis/{API_VERSION}/namespaces/{namespace}/modeldeployments"


def deployment(name, spec):
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def test_a_plain_apply_installs_it_and_a_second_changes_nothing(plane, crd):
    assert FILE.stat().st_size < 256 * 1024
    assert "unchanged" in plane.kubectl("apply", "-f", str(FILE))
    there = plane.client().get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/modeldeployments.sluice.dev")
    conditions = {c["type"]: c["status"] for c in there["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("mdep", "served by prefill and decode engines on separate pods"),
        ("mdep.spec.model", "uri <string> -required-"),
        ("mdep.spec.decode.scaling.mode", "Static: decode.replicas rules. Auto: the operator writes it."),
        ("mdep.spec.rollout", "maxSurge"),
        ("mdep.status.conditions", "lastTransitionTime"),
    ],
)
def test_kubectl_explains_it(plane, crd, path, words):
    told = plane.kubectl("explain", path)
    assert words in re.sub(r"\s+", " ", told)
    assert "<empty>" not in told


def test_kubectl_explains_every_field(plane, crd):
    told = plane.kubectl("explain", "mdep.spec", "--recursive")
    for name in (
        "apiKeysSecret",
        "kvUtilizationPercent",
        "topologyKey",
        "wedgeFloorSeconds",
        "stabilizationWindowSeconds",
    ):
        assert name in told


def test_it_is_listed_in_columns(plane, client, namespace, crd):
    client.create(collection(namespace), deployment("m", manifest()))
    header, row = plane.kubectl("get", "mdep", "-n", namespace, "-o", "wide").splitlines()
    assert header.split() == ["NAME", *(name.upper() for name, *_ in COLUMNS)]
    assert row.split()[0] == "m"
    assert "pvc://models/tiny" in row


def test_defaults_are_filled_in_by_the_api_server_as_by_us(client, namespace, crd):
    there = client.create(collection(namespace), deployment("m", manifest()))
    assert there["spec"]["rollout"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert parse("m", there["spec"]) == parse("m", manifest())


@pytest.mark.parametrize(("changes", "path"), INVALID, ids=[str(index) for index in range(len(INVALID))])
def test_what_is_wrong_is_refused_or_named(client, namespace_of_invalid, crd, changes, path):
    """At admission, or by the condition that parse makes: with the field, and what to do."""
    there, refusal = offered(client, namespace_of_invalid, changed(changes))
    if refusal is not None:
        assert refusal.code in (400, 422), refusal
        assert letters(last_name(path)) in letters(refusal.text), f"{path}: {refusal}"
        return
    client.delete(f"{collection(namespace_of_invalid)}/m")
    objections = parse("m", there["spec"])
    assert isinstance(objections, tuple), f"{changes} is accepted"
    reason, problem = objections[0]
    assert path in problem.path, f"{path}: {reason} {problem}"
    assert problem.remedy


def offered(client, namespace, spec):
    """(what was stored, None) or (None, why it was refused): as kubectl apply would."""
    try:
        return client.create(f"{collection(namespace)}?fieldValidation=Strict", deployment("m", spec)), None
    except Refused as error:
        return None, error


def letters(text):
    return re.sub(r"\W+", "", text)


def last_name(path):
    return re.findall(r"[A-Za-z]+", path.partition("[")[0] if path.endswith("]") else path)[-1]


@pytest.fixture(scope="session")
def namespace_of_invalid(client):
    client.create("/api/v1/namespaces", {"metadata": {"name": "invalid"}})
    return "invalid"


def test_there_are_seventy_of_them(client):
    assert len(INVALID) >= 70


@pytest.mark.parametrize("name", ["a" * 41, "1st", "a.b"])
def test_a_name_that_leaves_no_room_for_suffixes_is_refused(client, namespace, crd, name):
    with pytest.raises(Refused, match="give at most 40 lower-case letters"):
        client.create(collection(namespace), deployment(name, manifest()))


def test_the_model_cannot_change(client, namespace, crd):
    client.create(collection(namespace), deployment("m", manifest()))
    with pytest.raises(Refused, match=r"spec\.model"):
        client.merge(f"{collection(namespace)}/m", {"spec": {"model": {"uri": "pvc://models/other"}}})


def test_a_spec_that_uses_everything_is_accepted(client, namespace, crd):
    client.create(f"{collection(namespace)}?fieldValidation=Strict", deployment("m", good()))


def test_the_whole_spec_can_be_edited_under_the_cel_budget(plane, client, namespace, crd):
    """kubectl apply of a later spec evaluates the transition rules."""
    first = json.dumps(deployment("m", manifest()))
    plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=first)
    later = json.dumps(deployment("m", manifest(prefill={"replicas": 3})))
    assert "configured" in plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=later)


def test_scale_goes_up_and_down_to_zero(plane, client, namespace, crd):
    path = f"{collection(namespace)}/m"
    client.create(collection(namespace), deployment("m", manifest()))
    for replicas in (3, 0, 1):
        plane.kubectl("scale", "mdep/m", "-n", namespace, f"--replicas={replicas}")
        assert client.get(path)["spec"]["decode"]["replicas"] == replicas
        assert client.get(f"{path}/scale")["spec"].get("replicas", 0) == replicas


def test_status_is_a_part_of_its_own(client, namespace, crd):
    path = f"{collection(namespace)}/m"
    client.create(collection(namespace), deployment("m", manifest()) | {"status": {"routable": 9}})
    assert "status" not in client.get(path)
    client.merge(f"{path}/status", {"status": {"decodeReplicas": 2, "decodeSelector": "a=b"}, "spec": {"paused": True}})
    there = client.get(path)
    assert there["metadata"]["generation"] == 1
    assert not there["spec"].get("paused")
    scale = client.get(f"{path}/scale")
    assert scale["status"] == {"replicas": 2, "selector": "a=b"}


def test_an_autoscaler_of_others_drives_it(plane, client, namespace, crd):
    """mode External: an HPA over an external metric, as KEDA makes one."""
    path = f"{collection(namespace)}/m"
    spec = manifest(decode={"replicas": 1, "scaling": {"mode": "External"}})
    client.create(collection(namespace), deployment("m", spec))
    client.merge(f"{path}/status", {"status": {"decodeReplicas": 1, "decodeSelector": "sluice.dev/deployment=m"}})
    hpa = {
        "metadata": {"name": "m"},
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": "m"},
            "minReplicas": 1,
            "maxReplicas": 6,
            "metrics": [
                {
                    "type": "External",
                    "external": {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "10"}},
                }
            ],
        },
    }
    with ExternalMetrics(client, plane.folder / "server.crt", plane.folder / "server.key") as metrics:
        metrics.value = 38
        client.create(f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers", hpa)
        client.until(path, lambda there: there["spec"]["decode"]["replicas"] == 4)
