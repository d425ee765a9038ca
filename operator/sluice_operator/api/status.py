"""`status` of a ModelDeployment. Bounded in items and length: it is written often and read by everybody."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.field import api

MAX_MESSAGE = 512
MAX_DECISIONS = 10
MAX_INCIDENTS = 10
MAX_REASONS = 10


@dataclass(frozen=True, slots=True)
class Condition:
    type: str = api("Accepted, Placed, PrefillReady, ... or Ready.", max_size=64)
    status: ConditionStatus = api("True, False or Unknown.")
    reason: str = api("One CamelCase word; docs/kubernetes.md lists all with remedies.", max_size=64)
    message: str = api("For people: what, where and what to do.", "", max_size=MAX_MESSAGE)
    observed_generation: int = api("The spec that this is about.", 0, minimum=0)
    last_transition_time: str = api("When `status` last changed, RFC 3339.", "", max_size=32)


@dataclass(frozen=True, slots=True)
class RoleStatus:
    desired: int = api("Pods wanted.", 0, minimum=0)
    ready: int = api("Pods ready.", 0, minimum=0)
    updated: int = api("Pods of the current revision.", 0, minimum=0)
    quarantined: int = api("Pods kept for somebody to look at.", 0, minimum=0)
    summary: str = api(
        "ready/desired; pods above what is desired, as in a rollout, are in `ready` only.", "0/0", max_size=16
    )


@dataclass(frozen=True, slots=True)
class RolesStatus:
    prefill: RoleStatus = api("Prefill engines.", RoleStatus)
    decode: RoleStatus = api("Decode engines.", RoleStatus)
    gateway: RoleStatus = api("Gateways.", RoleStatus)


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    time: str = api("When, RFC 3339.", max_size=32)
    from_replicas: int = api("Decode replicas before.", 0, minimum=0)
    to_replicas: int = api("Decode replicas after.", 0, minimum=0)
    verdict: str = api("Up, Down or Hold.", "", max_size=16)
    reason: str = api("One CamelCase word.", "", max_size=64)
    inputs: str = api("What was seen.", "", max_size=MAX_MESSAGE)


@dataclass(frozen=True, slots=True)
class ScalingStatus:
    decisions: tuple[DecisionStatus, ...] = api(
        "The last decisions, newest first.", (), max_size=MAX_DECISIONS, atomic=True
    )
    hint: str = api("What the ratio of prefill to decode should be, when it is off.", "", max_size=256)


@dataclass(frozen=True, slots=True)
class IncidentStatus:
    id: str = api("Pod and restart: the same incident has the same id.", max_size=128)
    time: str = api("When, RFC 3339.", "", max_size=32)
    pod: str = api("The pod.", "", max_size=253)
    role: str = api("Its role.", "", max_size=16)
    reason: str = api("One CamelCase word.", "", max_size=64)
    message: str = api("The supervisor's last words.", "", max_size=MAX_MESSAGE)


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    matching: int = api("Nodes that could take a pod.", 0, minimum=0)
    reasons: tuple[str, ...] = api(
        "Why the others cannot, and what the scheduler says.",
        (),
        max_size=MAX_REASONS,
        item_max=MAX_MESSAGE,
        atomic=True,
    )


@dataclass(frozen=True, slots=True)
class ModelDeploymentStatus:
    observed_generation: int = api("The spec that this is about.", 0, minimum=0)
    revision: str = api("Hash of the engine-relevant spec that is being served or rolled out.", "", max_size=16)
    fingerprint: str = api("What the engines say they are.", "", max_size=128)
    url: str = api("Where clients go inside the cluster.", "", max_size=512)
    reason: str = api(
        "The first broken link of Accepted, Placed, PrefillReady, DecodeReady, GatewayReady, Routable.", "", max_size=64
    )
    conditions: tuple[Condition, ...] = api("Why it is as it is.", (), max_size=16, list_keys=("type",))
    roles: RolesStatus = api("Pods by role.", RolesStatus)
    routable: int = api("Decode engines that every ready gateway routes to.", 0, minimum=0)
    kv_utilization_percent: int = api(
        "Cache pages in use, all decode engines, in steps of 5.", 0, minimum=0, maximum=100
    )
    decode_replicas: int = api("For /scale: decode pods.", 0, minimum=0)
    decode_selector: str = api("For /scale: selects decode pods.", "", max_size=512)
    scaling: ScalingStatus = api("What the autoscaler did.", ScalingStatus)
    incidents: tuple[IncidentStatus, ...] = api(
        "What died or froze lately.", (), max_size=MAX_INCIDENTS, list_keys=("id",)
    )
    placement: PlacementStatus = api("Where pods can go.", PlacementStatus)
