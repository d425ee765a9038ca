"""The gateway: its Deployment, an ordinary one that rolls by itself."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from sluice_operator import names
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_operator.render.affinity import spread
from sluice_operator.render.engine import (
    EVIDENCE,
    GRACE_SLACK_S,
    KEY,
    RUN,
    TLS,
    USER,
    defaulted,
    field_env,
    health_spec,
    own_volumes,
    secret_volume,
)
from sluice_operator.render.merge import merge
from sluice_operator.render.model import ModelSource, gateway_source, with_init_resources
from sluice_operator.render.probes import probes
from sluice_protocol.service_spec import HealthSpec

Object = dict[str, Any]
API_KEYS = "/etc/sluice/api-keys"
# Running answers may finish; a client's own time-out is seldom longer.
SHUTDOWN_S = 120
# Above that, before its supervisor kills it; below the pod's grace.
STOP_SLACK_S = 5
# A gateway loads a tokenizer, no model.
STARTUP_MAX_S = 120
ROLE = PodRole.GATEWAY


def pod_template(
    name: str, spec: ModelDeploymentSpec, control_image: str, revision: str, user: int | None = USER
) -> Object:
    source = gateway_source(spec.model, spec.image)
    pod: Object = {
        "serviceAccountName": spec.gateway.service_account_name or names.account_name(name, ROLE),
        # It watches the EndpointSlices of its engines.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": SHUTDOWN_S + GRACE_SLACK_S,
        "containers": [_container(name, spec, control_image, source)],
        "volumes": _volumes(name, spec, source),
    }
    if source.init:
        pod["initContainers"] = list(source.init)
    if spec.image.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in spec.image.pull_secrets]
    labels = names.role_labels(name, ROLE) | {names.LABEL_REVISION: revision}
    joined = merge(defaulted(spec.gateway.template, user), {"metadata": {"labels": labels}, "spec": pod})
    pod = with_init_resources(joined["spec"])
    constraints = [*(pod.get("topologySpreadConstraints") or []), *spread(names.selector(name, ROLE))]
    return {**joined, "spec": {**pod, "topologySpreadConstraints": constraints}}


def served_name(name: str, spec: ModelDeploymentSpec) -> str:
    return spec.model.served_names[0] if spec.model.served_names else name


def _container(name: str, spec: ModelDeploymentSpec, image: str, source: ModelSource) -> Object:
    keys = ("--api-keys-file", f"{API_KEYS}/keys") if spec.gateway.api_keys_secret else ()
    traces = ("--otlp", spec.monitoring.otlp_endpoint) if spec.monitoring.otlp_endpoint else ()
    supervisor = (
        *("--name", "$(POD_NAME)", "--run-dir", RUN, "--health", _health(spec)),
        *("--probe-host", "$(POD_IP)", "--probe-port", str(ports.PROBE), "--stop-s", str(SHUTDOWN_S + STOP_SLACK_S)),
    )
    arguments = (
        *("--listen", f"*:{ports.HTTP}", "--model-name", served_name(name, spec), "--tokenizer", source.path),
        *("--discover", f"$(POD_NAMESPACE)/{_services(name)}", "--report-listen", f"$(POD_IP):{ports.CONTROL}"),
        *("--key-file", f"{KEY}/key", "--tls-dir", TLS, *keys, *traces),
        *("--max-queued", str(spec.gateway.max_queued), "--shutdown-s", str(SHUTDOWN_S), "--log", "json"),
    )
    mounts: list[Object] = [
        {"name": "key", "mountPath": KEY, "readOnly": True},
        {"name": "tls", "mountPath": TLS, "readOnly": True},
        {"name": "run", "mountPath": RUN},
        {"name": "evidence", "mountPath": EVIDENCE},
        {"name": "tmp", "mountPath": "/tmp"},
        *source.mounts,
    ]
    if spec.gateway.api_keys_secret:
        mounts.append({"name": "api-keys", "mountPath": API_KEYS, "readOnly": True})
    return {
        "name": names.MAIN_CONTAINER,
        "image": image,
        "imagePullPolicy": spec.image.pull_policy.value,
        "command": ["python", "-m", "sluice_gateway.supervised", *supervisor, "--", *arguments],
        "env": [
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
            field_env("POD_IP", "status.podIP"),
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [
            {"name": "http", "containerPort": ports.HTTP, "protocol": "TCP"},
            {"name": "control", "containerPort": ports.CONTROL, "protocol": "TCP"},
            {"name": "probe", "containerPort": ports.PROBE, "protocol": "TCP"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    } | probes("probe", "/startupz", STARTUP_MAX_S)


def _services(name: str) -> str:
    """Those of its engines, as --discover reads them."""
    return ",".join(names.role_name(name, role) for role in names.ENGINE_ROLES)


def _health(spec: ModelDeploymentSpec) -> str:
    """What differs from the defaults, as --health reads it."""
    told = json.loads(msgspec.json.encode(health_spec(spec)))
    usual = json.loads(msgspec.json.encode(HealthSpec()))
    return json.dumps({name: value for name, value in told.items() if value != usual[name]}, sort_keys=True)


def _volumes(name: str, spec: ModelDeploymentSpec, source: ModelSource) -> list[Object]:
    volumes: list[Object] = [
        secret_volume("key", names.key_secret(name)),
        secret_volume("tls", names.certificate_secret(name, ROLE)),
        *own_volumes(),
        *source.volumes,
    ]
    if spec.gateway.api_keys_secret:
        volumes.append(secret_volume("api-keys", spec.gateway.api_keys_secret))
    return volumes
