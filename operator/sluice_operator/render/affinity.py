"""Where a pod may go, and where it would rather: affinity, spread, GPU or claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_operator.api.enums import AcceleratorType, Allocation, DomainPolicy
from sluice_operator.api.spec import AcceleratorSpec, GpuSpec
from sluice_operator.names import ENGINE_ROLES, LABEL_DEPLOYMENT, LABEL_ROLE
from sluice_operator.placement.placement import MAJOR_LABEL, PRODUCT_LABEL

Object = dict[str, Any]
HOSTNAME = "kubernetes.io/hostname"
CLAIM = "gpu"
DRIVER = "gpu.nvidia.com"


def node_expressions(accelerator: AcceleratorSpec) -> list[Object]:
    """Of labels that GPU Feature Discovery writes. `In`, not `Gt`: code for 10 does not run on 12. A claim selects by
    the driver's own attributes instead."""
    gpu = accelerator.gpu
    if accelerator.type is AcceleratorType.CPU or gpu is None or gpu.allocation is Allocation.RESOURCE_CLAIM:
        return []
    wanted = ((MAJOR_LABEL, [str(major) for major in gpu.compute_major]), (PRODUCT_LABEL, list(gpu.products)))
    return [{"key": key, "operator": "In", "values": values} for key, values in wanted if values]


def with_node_expressions(affinity: Mapping[str, Any], expressions: list[Object]) -> Object:
    """Terms are alternatives, so what is required goes into each of theirs."""
    if not expressions:
        return dict(affinity)
    node = dict(affinity.get("nodeAffinity") or {})
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    joined = [{**term, "matchExpressions": [*(term.get("matchExpressions") or []), *expressions]} for term in terms]
    node["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": joined}
    return {**affinity, "nodeAffinity": node}


def with_domain(affinity: Mapping[str, Any], name: str, accelerator: AcceleratorSpec) -> Object:
    """Engines of one deployment near each other, both roles and all revisions: the first pod may go anywhere, for the
    scheduler lets a pod pass that is the first one its own term means."""
    gpu = accelerator.gpu
    if gpu is None or gpu.domain.policy is DomainPolicy.NONE:
        return dict(affinity)
    term: Object = {
        "topologyKey": gpu.domain.topology_key,
        "labelSelector": {
            "matchLabels": {LABEL_DEPLOYMENT: name},
            "matchExpressions": [
                {"key": LABEL_ROLE, "operator": "In", "values": [role.value for role in ENGINE_ROLES]}
            ],
        },
    }
    pod = dict(affinity.get("podAffinity") or {})
    if gpu.domain.policy is DomainPolicy.REQUIRED:
        key, item = "requiredDuringSchedulingIgnoredDuringExecution", term
    else:
        key, item = "preferredDuringSchedulingIgnoredDuringExecution", {"weight": 100, "podAffinityTerm": term}
    pod[key] = [*(pod.get(key) or []), item]
    return {**affinity, "podAffinity": pod}


def spread(labels: Mapping[str, str]) -> list[Object]:
    """Softly over hosts, so that one node's end takes few pods; inside a domain where affinity keeps them there."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(labels)},
        }
    ]


def resources(accelerator: AcceleratorSpec, tensor: int) -> Object:
    """Of the main container: GPUs by number, or a claim by name."""
    gpu = accelerator.gpu
    if accelerator.type is AcceleratorType.CPU or gpu is None:
        return {}
    if gpu.allocation is Allocation.RESOURCE_CLAIM:
        return {"claims": [{"name": CLAIM}]}
    return {"limits": {gpu.resource_name: str(tensor)}}


def claim_spec(gpu: GpuSpec, tensor: int) -> Object:
    """Of a ResourceClaimTemplate: exactly `tensor` devices of the class that have what is asked for."""
    attributes = f'device.attributes["{DRIVER}"]'
    selectors = []
    if gpu.compute_major:
        majors = ", ".join(str(major) for major in gpu.compute_major)
        selectors.append(f"{attributes}.cudaComputeCapability.major() in [{majors}]")
    if gpu.products:
        # The label has dashes where the driver's name has blanks.
        products = ", ".join(f'"{product}"' for product in gpu.products)
        selectors.append(f'{attributes}.productName.replace(" ", "-") in [{products}]')
    exactly: Object = {"deviceClassName": gpu.device_class, "allocationMode": "ExactCount", "count": tensor}
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": expression}} for expression in selectors]
    return {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}
