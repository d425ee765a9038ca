"""Policies of a cluster that demand labels, as a real API server enforces them."""

from __future__ import annotations

import pytest
from operator_process import OperatorProcess

from sluice_operator.live.cluster import KINDS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"


@pytest.fixture
def operator(plane, namespace, crd):
    with OperatorProcess(plane, f"op-{namespace}", namespace) as running:
        yield running


@pytest.fixture
def demanding(served):
    """Deployments and Services of the namespace need the label team, when they are made and when they are changed."""
    name, client = f"team-{served.namespace}", served.client
    rule = {
        "apiGroups": ["apps", ""],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["deployments", "services"],
    }
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [
            {
                "expression": "has(object.metadata.labels) && 'team' in object.metadata.labels",
                "message": "the label team is required",
            }
        ],
    }
    here = {"matchLabels": {"kubernetes.io/metadata.name": served.namespace}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": here}}
    kinds = (("ValidatingAdmissionPolicy", policy), ("ValidatingAdmissionPolicyBinding", binding))
    plurals = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
    for (kind, spec), plural in zip(kinds, plurals, strict=True):
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        client.create(f"{ADMISSION}/{plural}", body)
    yield
    for plural in plurals:
        client.delete(f"{ADMISSION}/{plural}/{name}")


def test_a_denial_is_told_in_the_policys_words_and_ends_with_the_label(operator, demanding, served):
    served.create()
    # A policy takes a moment to be enforced; whatever was made before it is denied at its next change.
    told = served.until("Progressing", "False", "WriteRefused")
    assert "the label team is required" in told["message"]
    assert served.condition("Accepted")["status"] == "True"
    served.change(metadata={"labels": {"team": "search"}})
    served.until("Ready", "True")
    for kind in ("Deployment", "Service", "ConfigMap", "ControllerRevision"):
        for child in served.children(kind):
            assert child["metadata"]["labels"]["team"] == "search", child["metadata"]["name"]
    path = KINDS["Deployment"].path(served.namespace)
    assert all(item["metadata"]["labels"]["team"] == "search" for item in served.client.get(path)["items"])
