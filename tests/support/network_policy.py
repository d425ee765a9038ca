"""NetworkPolicy objects, evaluated as the API defines them: ingress at the target, egress at the source, and nothing
passes that no rule lets pass once a policy selects a pod. A member that this does not know is an error."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Pod:
    namespace: str
    labels: Mapping[str, str]
    ip: str = "10.244.0.9"
    namespace_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Address:
    """Something that is no pod: a node, the API server, a host on the internet."""

    ip: str


def allows(policies: Iterable[Object], source: Pod | Address, target: Pod | Address, port: int, protocol: str) -> bool:
    told = list(policies)
    return _passes(told, "Ingress", target, source, port, protocol) and _passes(
        told, "Egress", source, target, port, protocol
    )


def _passes(
    policies: list[Object], way: str, mine: Pod | Address, other: Pod | Address, port: int, protocol: str
) -> bool:
    if isinstance(mine, Address):
        return True
    selecting = [policy for policy in policies if way in policy["spec"]["policyTypes"] and _selects(policy, mine)]
    if not selecting:
        return True
    key, peers = ("ingress", "from") if way == "Ingress" else ("egress", "to")
    return any(
        _rule(rule, peers, policy["metadata"]["namespace"], other, port, protocol)
        for policy in selecting
        for rule in _checked(policy).get(key, [])
    )


def _checked(policy: Object) -> Object:
    spec: Object = policy["spec"]
    _only(spec, "podSelector", "policyTypes", "ingress", "egress")
    return spec


def _selects(policy: Object, pod: Pod) -> bool:
    return policy["metadata"]["namespace"] == pod.namespace and _matches(policy["spec"]["podSelector"], pod.labels)


def _rule(rule: Object, peers: str, namespace: str, other: Pod | Address, port: int, protocol: str) -> bool:
    _only(rule, "ports", peers)
    ports, told = rule.get("ports") or [], rule.get(peers) or []
    return (not ports or any(_port(p, port, protocol) for p in ports)) and (
        not told or any(_peer(peer, namespace, other) for peer in told)
    )


def _port(told: Object, port: int, protocol: str) -> bool:
    _only(told, "port", "endPort", "protocol")
    assert told.get("port") is None or isinstance(told["port"], int), "named ports are not used here"
    if told.get("protocol", "TCP") != protocol:
        return False
    return "port" not in told or told["port"] <= port <= told.get("endPort", told["port"])


def _peer(peer: Object, namespace: str, other: Pod | Address) -> bool:
    _only(peer, "podSelector", "namespaceSelector", "ipBlock")
    if "ipBlock" in peer:
        assert len(peer) == 1, "an ipBlock stands alone"
        block = peer["ipBlock"]
        _only(block, "cidr", "except")
        ip = ipaddress.ip_address(other.ip)
        within = ip in ipaddress.ip_network(block["cidr"])
        return within and not any(ip in ipaddress.ip_network(part) for part in block.get("except", []))
    if isinstance(other, Address):
        return False
    if "namespaceSelector" not in peer:
        return other.namespace == namespace and _matches(peer["podSelector"], other.labels)
    named = {"kubernetes.io/metadata.name": other.namespace, **other.namespace_labels}
    return _matches(peer["namespaceSelector"], named) and _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    _only(selector, "matchLabels", "matchExpressions")
    equal = selector.get("matchLabels", {}).items() <= labels.items()
    return equal and all(_expression(told, labels) for told in selector.get("matchExpressions", []))


def _expression(told: Object, labels: Mapping[str, str]) -> bool:
    key, values = told["key"], told.get("values", [])
    match told["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"operator {other!r}")


def _only(told: Object, *known: str) -> None:
    if unknown := set(told) - set(known):
        raise ValueError(f"unknown members {sorted(unknown)}")
