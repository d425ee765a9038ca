"""Engines: the spec file that a process reads, and the pod template around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from sluice_operator import names
from sluice_operator.api.enums import Allocation, CacheFormat, IndexKeyFormat
from sluice_operator.api.spec import DecodeSpec, ModelDeploymentSpec, PrecisionSpec, PrefillSpec
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_operator.render.affinity import (
    CLAIM,
    node_expressions,
    resources,
    spread,
    with_domain,
    with_node_expressions,
)
from sluice_operator.render.merge import merge, with_defaults, without_nulls
from sluice_operator.render.model import CONTAINER_SECURITY, ModelSource, engine_source, image_of, with_init_resources
from sluice_operator.render.probes import probes
from sluice_protocol.engine_spec import EngineSpec, PortSpec
from sluice_protocol.generate import Role
from sluice_protocol.service_spec import HealthSpec, LogFormat

Object = dict[str, Any]
RUN, EVIDENCE, CONFIG, KEY, TLS = (
    "/run/sluice",
    "/var/lib/sluice/evidence",
    "/etc/sluice/spec",
    "/etc/sluice/key",
    "/etc/sluice/tls",
)
SPEC_FILE = "engine.json"
# Above the drain: a pod whose node goes gets SIGTERM without the operator's drain before it.
GRACE_SLACK_S = 15
# The most that quarantine.maxSeconds may say: the operator ends one earlier, and need not restart engines for that.
QUARANTINE_S = 3600.0
USER = 65532
# Of these a template may say null: the cluster chooses (OpenShift does, and refuses a pod that does).
IDS = ("runAsUser", "runAsGroup", "fsGroup")


def role_spec(spec: ModelDeploymentSpec, role: PodRole) -> PrefillSpec | DecodeSpec:
    return spec.prefill if role is PodRole.PREFILL else spec.decode


def engine_spec(spec: ModelDeploymentSpec, role: PodRole) -> EngineSpec:
    """Without what only a pod knows (name, address, key): its command line adds that."""
    sizes = spec.engine
    rows = spec.prefill.max_rooms if role is PodRole.PREFILL else spec.decode.max_running
    return EngineSpec(
        role=Role(role.value),
        name=role.value,
        run_dir=RUN,
        model=engine_source(spec.model, spec.image).path,
        precision=precision_text(spec.precision),
        page_tokens=sizes.page_tokens or 0,
        chunk_tokens=sizes.chunk_tokens or 0,
        max_running=rows,
        max_context_tokens=sizes.max_context_tokens or 0,
        memory_bytes=(sizes.cache_mebibytes or 0) << 20,
        verify=spec.transport.verify.value.lower(),
        ports=PortSpec(ports.ENGINE, ports.SOURCE, ports.PROBE, f"{ports.TRANSFER_FIRST}-{ports.TRANSFER_LAST}"),
        health=health_spec(spec),
        drain_s=float(spec.drain.timeout_seconds),
        otlp=spec.monitoring.otlp_endpoint or "",
        log=LogFormat.JSON,
    )


def health_spec(spec: ModelDeploymentSpec) -> HealthSpec:
    """Of every supervisor."""
    return HealthSpec(
        floor_s=float(spec.probes.wedge_floor_seconds),
        evidence_dir=EVIDENCE,
        quarantine_s=QUARANTINE_S,
        termination_path="/dev/termination-log",
        debug_port=ports.DEBUG,
    )


def precision_text(precision: PrecisionSpec) -> str:
    """As EngineSpec has it; empty: as the weights."""
    if precision.kv is CacheFormat.AUTO:
        return ""
    index = "" if precision.index_keys is IndexKeyFormat.AUTO else f"/{precision.index_keys.value.lower()}"
    return precision.kv.value.lower() + index


def spec_file(spec: ModelDeploymentSpec, role: PodRole) -> str:
    """The text of the file that `--spec` names."""
    told = json.loads(msgspec.json.encode(engine_spec(spec, role)))
    del told["key"]  # comes from a Secret; a ConfigMap is for everybody to read
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


def pod_template(name: str, spec: ModelDeploymentSpec, role: PodRole, revision: str, user: int | None = USER) -> Object:
    """The PodTemplateSpec of a role's Deployment. `user`: see `defaulted`."""
    engine, source = role_spec(spec, role), engine_source(spec.model, spec.image)
    theirs = engine.template
    labels = names.base_labels(name) | names.selector(name, role, revision)
    pod: Object = {
        "serviceAccountName": engine.service_account_name or names.account_name(name, role),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": spec.drain.timeout_seconds + GRACE_SLACK_S,
        "readinessGates": [{"conditionType": names.READINESS_GATE}],
        "containers": [_container(spec, role, source)],
        "volumes": _volumes(name, role, revision, source),
    }
    if source.init:
        pod["initContainers"] = list(source.init)
    if spec.image.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in spec.image.pull_secrets]
    gpu = spec.accelerator.gpu
    if gpu is not None and gpu.allocation is Allocation.RESOURCE_CLAIM:
        claim = names.claim_name(name, role, revision)
        pod["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": claim}]
    joined = merge(defaulted(theirs, user), {"metadata": {"labels": labels}, "spec": pod})
    return _placed(joined, name, spec, names.selector(name, role))


def _placed(template: Object, name: str, spec: ModelDeploymentSpec, labels: Mapping[str, str]) -> Object:
    pod = with_init_resources(template["spec"])
    affinity = with_node_expressions(pod.get("affinity") or {}, node_expressions(spec.accelerator))
    affinity = with_domain(affinity, name, spec.accelerator)
    pod = {**pod, "topologySpreadConstraints": [*(pod.get("topologySpreadConstraints") or []), *spread(labels)]}
    return {**template, "spec": pod | ({"affinity": affinity} if affinity else {})}


def pod_security(user: int | None) -> Object:
    """`user` None: the cluster chooses user and groups."""
    ids = {} if user is None else dict.fromkeys(IDS, user)
    return {
        "runAsNonRoot": True,
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def defaulted(theirs: Mapping[str, Any], user: int | None = USER) -> Object:
    """Their template over what they may change: user, groups, capabilities."""
    container = {"name": names.MAIN_CONTAINER, "securityContext": CONTAINER_SECURITY}
    security = pod_security(user)
    for name in _null_ids(theirs):
        security.pop(name, None)
    return with_defaults(without_nulls(theirs), {"spec": {"securityContext": security, "containers": [container]}})


def _null_ids(theirs: Mapping[str, Any]) -> list[str]:
    pod = theirs.get("spec") or {}
    security = pod.get("securityContext") or {}
    return [name for name in IDS if name in security and security[name] is None]


def _container(spec: ModelDeploymentSpec, role: PodRole, source: ModelSource) -> Object:
    arguments = (
        *("--spec", f"{CONFIG}/{SPEC_FILE}", "--name", "$(POD_NAME)"),
        *("--host", "$(POD_IP)", "--key-file", f"{KEY}/key", "--tls-dir", TLS),
    )
    return {
        "name": names.MAIN_CONTAINER,
        "image": image_of(spec.image),
        "imagePullPolicy": spec.image.pull_policy.value,
        "command": ["python", "-m", f"sluice_{role.value}", *arguments],
        "env": [
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_IP", "status.podIP"),
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [
            {"name": "engine", "containerPort": ports.ENGINE, "protocol": "TCP"},
            {"name": "source", "containerPort": ports.SOURCE, "protocol": "TCP"},
            {"name": "probe", "containerPort": ports.PROBE, "protocol": "TCP"},
        ],
        "resources": resources(spec.accelerator, role_spec(spec, role).parallelism.tensor),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "spec", "mountPath": CONFIG, "readOnly": True},
            {"name": "key", "mountPath": KEY, "readOnly": True},
            {"name": "tls", "mountPath": TLS, "readOnly": True},
            {"name": "run", "mountPath": RUN},
            {"name": "evidence", "mountPath": EVIDENCE},
            {"name": "tmp", "mountPath": "/tmp"},
            *source.mounts,
        ],
    } | probes("probe", "/startupz", spec.probes.startup_max_seconds)


def _volumes(name: str, role: PodRole, revision: str, source: ModelSource) -> list[Object]:
    return [
        {"name": "spec", "configMap": {"name": names.engine_name(name, role, revision)}},
        secret_volume("key", names.key_secret(name)),
        secret_volume("tls", names.certificate_secret(name, role)),
        *own_volumes(),
        *source.volumes,
    ]


def own_volumes() -> list[Object]:
    return [
        # The flight recorder: memory, and gone with the pod.
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "evidence", "emptyDir": {"sizeLimit": "512Mi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "8Gi"}},
    ]


def secret_volume(name: str, secret: str) -> Object:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def field_env(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
