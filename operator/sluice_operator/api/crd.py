"""The CustomResourceDefinition, all of it from `spec` and `status`."""

from __future__ import annotations

from typing import Any

import yaml

from sluice_operator.api.field import Rule
from sluice_operator.api.schema import Schema, object_schema
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.status import ModelDeploymentStatus

GROUP, VERSION, KIND, PLURAL = "sluice.dev", "v1alpha1", "ModelDeployment", "modeldeployments"
API_VERSION = f"{GROUP}/{VERSION}"
MAX_NAME = 40
NAME_RULES = (
    Rule(
        f"self.metadata.name.size() <= {MAX_NAME} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        f"metadata.name: give at most {MAX_NAME} lower-case letters, digits and '-', a letter first: children get"
        " suffixes",
    ),
)
# (name, JSON path, type, shown in the narrow view)
COLUMNS = (
    ("Ready", '.status.conditions[?(@.type=="Ready")].status', "string", True),
    ("Reason", ".status.reason", "string", True),
    ("Prefill", ".status.roles.prefill.summary", "string", True),
    ("Decode", ".status.roles.decode.summary", "string", True),
    ("Routable", ".status.routable", "integer", True),
    ("KV%", ".status.kvUtilizationPercent", "integer", True),
    ("Rev", ".status.revision", "string", True),
    ("Age", ".metadata.creationTimestamp", "date", True),
    ("Gateway", ".status.roles.gateway.summary", "string", False),
    ("Model", ".spec.model.uri", "string", False),
    ("URL", ".status.url", "string", False),
)
_HEADER = """\
# Generated from operator/sluice_operator/api by tools/house/generate.py (`make proto`).
"""


def root_schema() -> Schema:
    return {
        "type": "object",
        "description": "A model served by prefill and decode engines on separate pods, behind a gateway.",
        "required": ["spec"],
        "x-kubernetes-validations": [{"rule": rule.rule, "message": rule.message} for rule in NAME_RULES],
        "properties": {
            "apiVersion": {"type": "string", "description": "sluice.dev/v1alpha1"},
            "kind": {"type": "string", "description": "ModelDeployment"},
            # The bound is for the cost of the rule above; the rule says it better.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 63}}},
            "spec": object_schema(ModelDeploymentSpec, "What to run. Written by you."),
            "status": object_schema(ModelDeploymentStatus, "What is running. Written by the operator."),
        },
    }


def crd() -> dict[str, Any]:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": name, "jsonPath": path, "type": kind} | ({} if narrow else {"priority": 1})
            for name, path, kind, narrow in COLUMNS
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.decode.replicas",
                "statusReplicasPath": ".status.decodeReplicas",
                "labelSelectorPath": ".status.decodeSelector",
            },
        },
        "schema": {"openAPIV3Schema": root_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            # helm leaves it, and with it everybody's deployments, when the chart goes.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["mdep"],
            },
            "versions": [version],
        },
    }


def render_yaml() -> str:
    return _HEADER + yaml.safe_dump(crd(), sort_keys=False, width=110, allow_unicode=True)
