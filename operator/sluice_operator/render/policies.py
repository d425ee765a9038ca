"""Who may talk to whom: the flow matrix, and the NetworkPolicies that follow from it.

NIXL's payload is not encrypted; that nobody else reaches its ports is what protects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator import names
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_operator.render.model import hub_ports, port_of

Object = dict[str, Any]
# Peers of a flow that are no role of the deployment.
ANYBODY, OPERATOR = "anybody", "operator"


@dataclass(frozen=True, slots=True)
class Flow:
    """`peer` may open TCP connections to `role` on these ports."""

    peer: str
    role: PodRole
    port: int
    last: int | None = None


# Both engines listen for NIXL: which side connects is UCX's choice. The gateway's status page asks supervisors.
FLOWS = (
    Flow(PodRole.GATEWAY, PodRole.PREFILL, ports.ENGINE),
    Flow(PodRole.GATEWAY, PodRole.PREFILL, ports.PROBE),
    Flow(OPERATOR, PodRole.PREFILL, ports.ENGINE),
    Flow(PodRole.DECODE, PodRole.PREFILL, ports.SOURCE),
    Flow(PodRole.DECODE, PodRole.PREFILL, ports.TRANSFER_FIRST, ports.TRANSFER_LAST),
    Flow(ANYBODY, PodRole.PREFILL, ports.PROBE),
    Flow(PodRole.GATEWAY, PodRole.DECODE, ports.ENGINE),
    Flow(PodRole.GATEWAY, PodRole.DECODE, ports.PROBE),
    Flow(OPERATOR, PodRole.DECODE, ports.ENGINE),
    Flow(PodRole.PREFILL, PodRole.DECODE, ports.TRANSFER_FIRST, ports.TRANSFER_LAST),
    Flow(ANYBODY, PodRole.DECODE, ports.PROBE),
    Flow(ANYBODY, PodRole.GATEWAY, ports.HTTP),
    Flow(OPERATOR, PodRole.GATEWAY, ports.CONTROL),
    Flow(ANYBODY, PodRole.GATEWAY, ports.PROBE),
)
# Where name servers and API servers listen, unless the operator is told otherwise. Policies see the ports of pods: the
# name servers of OpenShift listen on 5353 behind their Service.
DNS = (53,)
HTTPS = (443, 6443)


def network_policies(
    name: str, spec: ModelDeploymentSpec, api_ports: tuple[int, ...] = HTTPS, dns_ports: tuple[int, ...] = DNS
) -> Iterator[tuple[str, Mapping[str, str], Object]]:
    """(name, labels, spec), one policy per role. `api_ports`: of the API server, which gateways watch."""
    for role in PodRole:
        policy = {
            "podSelector": {"matchLabels": names.selector(name, role)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [_ingress(name, flow) for flow in FLOWS if flow.role is role],
            "egress": [*_egress(name, role), {"ports": _dns(dns_ports)}, *_outside(role, spec, api_ports)],
        }
        yield names.role_name(name, role), names.role_labels(name, role), policy


def _dns(dns_ports: tuple[int, ...]) -> list[Object]:
    return [{"protocol": protocol, "port": port} for port in dns_ports for protocol in ("UDP", "TCP")]


def _ingress(name: str, flow: Flow) -> Object:
    told: Object = {"ports": [ports.tcp(flow.port, flow.last)]}
    return told if flow.peer == ANYBODY else told | {"from": [_peer(name, flow.peer)]}


def _egress(name: str, role: PodRole) -> list[Object]:
    return [
        {"ports": [ports.tcp(flow.port, flow.last)], "to": [_peer(name, flow.role)]}
        for flow in FLOWS
        if flow.peer == role.value
    ]


def _outside(role: PodRole, spec: ModelDeploymentSpec, api_ports: tuple[int, ...]) -> list[Object]:
    """The API server has no selector, and neither has the Hugging Face hub, a proxy or a collector of traces."""
    collector = spec.monitoring.otlp_endpoint
    api = api_ports if role is PodRole.GATEWAY else ()
    wanted = (*api, *hub_ports(spec.model), *([port_of(collector)] if collector else []))
    told = list(dict.fromkeys(wanted))
    return [{"ports": [ports.tcp(port) for port in told]}] if told else []


def _peer(name: str, peer: str) -> Object:
    if peer == OPERATOR:
        return {"namespaceSelector": {}, "podSelector": {"matchLabels": names.OPERATOR_LABELS}}
    return {"podSelector": {"matchLabels": names.selector(name, PodRole(peer))}}
