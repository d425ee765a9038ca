"""A revision: the hash of what engines depend on, and what is rendered for it, once, into a ControllerRevision.

Replicas, scaling, gateway, rollout, quarantine and pause are not in it: changing them restarts no engine. What a later
operator would render for the same hash does not matter, for what runs is what was kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sluice_operator.api.enums import Allocation
from sluice_operator.api.spec import DecodeSpec, GatewaySpec, ModelDeploymentSpec, PrefillSpec
from sluice_operator.api.value import to_json
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.render import engine, gateway
from sluice_operator.render.affinity import claim_spec
from sluice_operator.render.policies import DNS, HTTPS

Object = dict[str, Any]
HASH_CHARACTERS = 8
_ENGINE_FIELDS = (
    "model",
    "image",
    "accelerator",
    "precision",
    "engine",
    "prefill",
    "decode",
    "transport",
    "probes",
    "drain",
)


class Renderer(Protocol):
    """What differs between two versions of the operator."""

    def engine(self, name: str, spec: ModelDeploymentSpec, revision: str) -> Object:
        """Role -> {template, file, claim?}: `data` of the ControllerRevision."""

    def gateway(self, name: str, spec: ModelDeploymentSpec, revision: str) -> Object:
        """The gateway's PodTemplateSpec."""

    def gateway_key(self) -> str:
        """Changes whenever gateways should be replaced for the operator's sake."""

    @property
    def api_ports(self) -> tuple[int, ...]:
        """Where the API server listens: NetworkPolicies let gateways go there."""

    @property
    def dns_ports(self) -> tuple[int, ...]:
        """Where name servers listen: NetworkPolicies let all pods go there."""


@dataclass(frozen=True, slots=True)
class StandardRenderer:
    """`control_image`: operator and gateway are of one image. `user`: that pods run as; None: the cluster chooses."""

    control_image: str
    api_ports: tuple[int, ...] = HTTPS
    dns_ports: tuple[int, ...] = DNS
    user: int | None = engine.USER

    def engine(self, name: str, spec: ModelDeploymentSpec, revision: str) -> Object:
        return {role.value: _engine_data(name, spec, role, revision, self.user) for role in ENGINE_ROLES}

    def gateway(self, name: str, spec: ModelDeploymentSpec, revision: str) -> Object:
        return gateway.pod_template(name, spec, self.control_image, revision, self.user)

    def gateway_key(self) -> str:
        return self.control_image if self.user == engine.USER else f"{self.control_image} {self.user}"


def revision_hash(spec: ModelDeploymentSpec) -> str:
    """Of what engines depend on. Defaults are left out, so that a new field with one changes no hash."""
    steady = replace(
        spec,
        model=replace(spec.model, served_names=()),
        prefill=replace(spec.prefill, replicas=PrefillSpec().replicas),
        decode=replace(spec.decode, replicas=DecodeSpec().replicas, scaling=DecodeSpec().scaling),
    )
    told = to_json(steady, defaults=False)
    return _digest({name: told[name] for name in _ENGINE_FIELDS if name in told} | _traces(spec))


def gateway_hash(spec: ModelDeploymentSpec, renderer: Renderer) -> str:
    steady = replace(spec.gateway, replicas=GatewaySpec().replicas, service=GatewaySpec().service)
    told = [to_json(part, defaults=False) for part in (spec.model, spec.image, spec.probes, steady)]
    return _digest([*told, renderer.gateway_key(), *_traces(spec).values()])


def _traces(spec: ModelDeploymentSpec) -> Object:
    """The only part of monitoring that processes are told."""
    return {"otlp": spec.monitoring.otlp_endpoint} if spec.monitoring.otlp_endpoint else {}


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]


def _engine_data(name: str, spec: ModelDeploymentSpec, role: PodRole, revision: str, user: int | None) -> Object:
    told: Object = {
        "template": engine.pod_template(name, spec, role, revision, user),
        "file": engine.spec_file(spec, role),
    }
    gpu = spec.accelerator.gpu
    if gpu is not None and gpu.allocation is Allocation.RESOURCE_CLAIM:
        told["claim"] = claim_spec(gpu, engine.role_spec(spec, role).parallelism.tensor)
    return told


def role_data(data: Mapping[str, Any], role: PodRole) -> Mapping[str, Any]:
    """Raises KeyError for a ControllerRevision that is none of ours."""
    found: Mapping[str, Any] = data[role.value]
    return found
