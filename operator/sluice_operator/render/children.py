"""Every object that a ModelDeployment owns, whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice_operator import names
from sluice_operator.api.crd import API_VERSION, KIND
from sluice_operator.api.spec import MetadataSpec, ModelDeploymentSpec
from sluice_operator.names import ENGINE_ROLES, PodRole, Verdict
from sluice_operator.render import ports
from sluice_operator.render.engine import SPEC_FILE
from sluice_operator.render.policies import DNS, HTTPS, network_policies

Object = dict[str, Any]
# What plan deletes when it is ours and nobody wants it any more.
PRUNED_KINDS = frozenset(
    {
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "PodMonitor",
        "ConfigMap",
        "ResourceClaimTemplate",
    }
)


# What is made once and then left as it is.
KEPT_KINDS = frozenset({"Deployment", "ConfigMap", "ControllerRevision", "ResourceClaimTemplate"})


@dataclass(frozen=True, slots=True)
class OwnerRef:
    """The ModelDeployment that everything belongs to. `extra`: labels and annotations of all of it."""

    namespace: str
    name: str
    uid: str
    extra: MetadataSpec = field(default_factory=MetadataSpec)

    @property
    def reference(self) -> Object:
        """As it stands in the metadata of each child."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }

    def meta(self, name: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> Object:
        told: Object = {"name": name, "namespace": self.namespace, "labels": {**self.extra.labels, **labels}}
        if notes := {**self.extra.annotations, **(annotations or {})}:
            told["annotations"] = notes
        if keys := _extra_keys(self.extra):
            told["annotations"] = {**notes, names.ANNOTATION_EXTRA: keys}
        return told | {"ownerReferences": [self.reference]}


def _extra_keys(extra: MetadataSpec) -> str:
    """Which labels and annotations come from spec.metadata, so that they can be taken away with it."""
    told = {part: sorted(keys) for part, keys in (("labels", extra.labels), ("annotations", extra.annotations)) if keys}
    return json.dumps(told, sort_keys=True) if told else ""


def metadata_change(there: Mapping[str, Any], extra: MetadataSpec) -> Object:
    """A merge patch of a child's metadata that gives it what `extra` has, and takes away what an earlier one had; empty
    if there is nothing to change."""
    notes = there.get("annotations") or {}
    keys = _extra_keys(extra)
    before = _read_keys(notes.get(names.ANNOTATION_EXTRA, ""))
    patch: Object = {}
    for part, wanted in (("labels", extra.labels), ("annotations", extra.annotations)):
        live = there.get(part) or {}
        change: Object = {key: value for key, value in wanted.items() if live.get(key) != value}
        change |= {key: None for key in before.get(part, ()) if key in live and key not in wanted}
        if change:
            patch[part] = change
    if keys != notes.get(names.ANNOTATION_EXTRA, ""):
        patch.setdefault("annotations", {})[names.ANNOTATION_EXTRA] = keys or None
    return patch


def _read_keys(text: str) -> Mapping[str, list[str]]:
    """Somebody may have written nonsense there: then nothing is taken away. Nor is what is the operator's own."""
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    parts = told if isinstance(told, dict) else {}
    return {
        part: [key for key in keys if isinstance(key, str) and not names.is_ours(key)]
        for part, keys in parts.items()
        if isinstance(keys, list)
    }


def standing(
    owner: OwnerRef,
    spec: ModelDeploymentSpec,
    api_ports: tuple[int, ...] = HTTPS,
    dns_ports: tuple[int, ...] = DNS,
) -> tuple[Object, ...]:
    """What does not depend on a revision. `api_ports`, `dns_ports`: where the API server and name servers listen."""
    return (
        *_accounts(owner, spec),
        *_gateway_rights(owner, spec.gateway.service_account_name or names.account_name(owner.name, PodRole.GATEWAY)),
        *(_engine_service(owner, role) for role in ENGINE_ROLES),
        _gateway_service(owner, spec),
        *(_budget(owner, spec, role) for role in PodRole),
        *(
            _object("networking.k8s.io/v1", "NetworkPolicy", owner.meta(name, labels), spec=policy)
            for name, labels, policy in network_policies(owner.name, spec, api_ports, dns_ports)
        ),
        *((_pod_monitor(owner, spec),) if spec.monitoring.pod_monitor else ()),
    )


def controller_revision(owner: OwnerRef, revision: str, number: int, data: Mapping[str, Any]) -> Object:
    labels = names.base_labels(owner.name) | {
        names.LABEL_REVISION: revision,
        names.LABEL_VERDICT: Verdict.UNKNOWN.value,
    }
    meta = owner.meta(names.revision_name(owner.name, revision), labels)
    return _object("apps/v1", "ControllerRevision", meta, data=dict(data), revision=number)


def engine_objects(owner: OwnerRef, role: PodRole, revision: str, data: Mapping[str, Any]) -> tuple[Object, ...]:
    """Of one role and revision, from what its ControllerRevision keeps: all are made once and never edited."""
    name = names.engine_name(owner.name, role, revision)
    labels = names.role_labels(owner.name, role) | {names.LABEL_REVISION: revision}
    meta = owner.meta(name, labels)
    config = _object("v1", "ConfigMap", meta, data={SPEC_FILE: data["file"]}, immutable=True)
    claims: tuple[Object, ...] = ()
    if "claim" in data:
        claims = (_object("resource.k8s.io/v1", "ResourceClaimTemplate", meta, spec={"spec": data["claim"]}),)
    # Never rolls by itself: its template does not change. What a surge would do is the operator's business.
    deployment = {
        "replicas": 0,
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": names.selector(owner.name, role, revision)},
        "strategy": {"type": "Recreate"},
        "template": data["template"],
    }
    return (config, *claims, _object("apps/v1", "Deployment", meta, spec=deployment))


def gateway_deployment(owner: OwnerRef, replicas: int, revision: str, template: Mapping[str, Any]) -> Object:
    name = names.role_name(owner.name, PodRole.GATEWAY)
    labels = names.role_labels(owner.name, PodRole.GATEWAY) | {names.LABEL_REVISION: revision}
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": names.selector(owner.name, PodRole.GATEWAY)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": dict(template),
    }
    return _object("apps/v1", "Deployment", owner.meta(name, labels), spec=spec)


def url_of(owner: OwnerRef) -> str:
    return f"http://{names.role_name(owner.name, PodRole.GATEWAY)}.{owner.namespace}.svc:{ports.SERVICE}/v1"


def _object(api_version: str, kind: str, meta: Object, **rest: Any) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **rest}


def _accounts(owner: OwnerRef, spec: ModelDeploymentSpec) -> list[Object]:
    """Those that somebody uses: pods may run as accounts of theirs."""
    made = []
    if not spec.gateway.service_account_name:
        made.append(_account(owner, PodRole.GATEWAY))
    if not (spec.prefill.service_account_name and spec.decode.service_account_name):
        made.append(_account(owner, PodRole.PREFILL))
    return made


def _account(owner: OwnerRef, role: PodRole) -> Object:
    meta = owner.meta(names.account_name(owner.name, role), names.base_labels(owner.name))
    return _object("v1", "ServiceAccount", meta, automountServiceAccountToken=False)


def _gateway_rights(owner: OwnerRef, account: str) -> tuple[Object, Object]:
    """To see who its engines are, in this namespace, and nothing else."""
    name = names.role_name(owner.name, PodRole.GATEWAY)
    meta = owner.meta(name, names.role_labels(owner.name, PodRole.GATEWAY))
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    role = _object("rbac.authorization.k8s.io/v1", "Role", meta, rules=rules)
    binding = _object(
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        meta,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": account, "namespace": owner.namespace}],
    )
    return role, binding


def _engine_service(owner: OwnerRef, role: PodRole) -> Object:
    """Headless, not-ready addresses too: who exists. Gateways ask the engines themselves what they are up to."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(owner.name, role),
        "ports": [{"name": "engine", "port": ports.ENGINE, "targetPort": "engine", "protocol": "TCP"}],
    }
    meta = owner.meta(names.role_name(owner.name, role), names.role_labels(owner.name, role))
    return _object("v1", "Service", meta, spec=spec)


def _gateway_service(owner: OwnerRef, spec: ModelDeploymentSpec) -> Object:
    service = spec.gateway.service
    body: Object = {
        "type": service.type.value,
        "selector": names.selector(owner.name, PodRole.GATEWAY),
        "ports": [{"name": "http", "port": ports.SERVICE, "targetPort": "http", "protocol": "TCP"}],
    }
    if service.load_balancer_class:
        body["loadBalancerClass"] = service.load_balancer_class
    if service.load_balancer_source_ranges:
        body["loadBalancerSourceRanges"] = list(service.load_balancer_source_ranges)
    labels = {**service.labels, **names.role_labels(owner.name, PodRole.GATEWAY)}
    meta = owner.meta(names.role_name(owner.name, PodRole.GATEWAY), labels, service.annotations)
    return _object("v1", "Service", meta, spec=body)


def _budget(owner: OwnerRef, spec: ModelDeploymentSpec, role: PodRole) -> Object:
    """A node's drain takes one pod at a time, and a broken one always. One in quarantine serves nobody: were it
    counted, no healthy one could be moved while it is kept.

    Of engines the number is ours to say: `maxUnavailable` is counted against the replicas of all Deployments whose pods
    the budget selects, and in a rollout these are more than are wanted. Two budgets, one per revision, would leave
    none for a pod in both, and no number for one revision alone."""
    kept = {"key": names.LABEL_QUARANTINED, "operator": "DoesNotExist"}
    wanted = {PodRole.PREFILL: spec.prefill.replicas, PodRole.DECODE: spec.decode.replicas}
    limit = {"minAvailable": max(0, wanted[role] - 1)} if role in wanted else {"maxUnavailable": 1}
    body = {
        **limit,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.selector(owner.name, role), "matchExpressions": [kept]},
    }
    meta = owner.meta(names.role_name(owner.name, role), names.role_labels(owner.name, role))
    return _object("policy/v1", "PodDisruptionBudget", meta, spec=body)


def _pod_monitor(owner: OwnerRef, spec: ModelDeploymentSpec) -> Object:
    body = {
        "selector": {"matchLabels": {names.LABEL_DEPLOYMENT: owner.name}},
        # Labels of every metric: sluice_dev_deployment, sluice_dev_revision.
        "podTargetLabels": [names.LABEL_DEPLOYMENT, names.LABEL_REVISION],
        "podMetricsEndpoints": [{"port": "probe", "path": "/metrics", "interval": "15s"}],
    }
    meta = owner.meta(owner.name, {**spec.monitoring.labels, **names.base_labels(owner.name)})
    return _object("monitoring.coreos.com/v1", "PodMonitor", meta, spec=body)
