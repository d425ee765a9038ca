"""Where a pod finds its model: what spec.model.uri means as volumes, mounts and init containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sluice_operator.api.spec import HubSpec, ImageSpec, ModelSpec
from sluice_operator.names import MAIN_CONTAINER

Object = dict[str, Any]
MOUNT = "/models"
TOKENIZER_MOUNT = "/tokenizer"
# What a gateway reads of a model: names and tokens, no weights.
TOKENIZER_FILES = "*.json"
# Init containers of ours.
DOWNLOAD, TOKENIZER = "download", "tokenizer"
_SHARED = ("cpu", "memory", "ephemeral-storage")
HUB_CA = "/etc/sluice/hub-ca"
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path`: the directory inside the container. `init`: containers that fill it."""

    path: str
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    init: tuple[Object, ...] = ()


def image_of(image: ImageSpec) -> str:
    return f"{image.repository}@{image.digest}" if image.digest else f"{image.repository}:{image.tag}"


def engine_source(model: ModelSpec, image: ImageSpec) -> ModelSource:
    scheme, rest = model.uri.split("://", 1)
    if scheme == "pvc":
        return _claim(rest)
    if scheme == "image":
        return ModelSource(rest)
    return _hub(rest, model.hub or HubSpec(), image, "")


def gateway_source(model: ModelSpec, image: ImageSpec) -> ModelSource:
    """The gateway's image holds no model: of one inside the engine image it gets a copy of the small files."""
    scheme, rest = model.uri.split("://", 1)
    if scheme == "pvc":
        return _claim(rest)
    if scheme == "hf":
        return _hub(rest, model.hub or HubSpec(), image, TOKENIZER_FILES)
    # The URI's pattern admits nothing that a shell would read as anything but a path.
    copy = _init(TOKENIZER, image, ["sh", "-c", f"cp {rest}/{TOKENIZER_FILES} {TOKENIZER_MOUNT}/"])
    mount = {"name": "tokenizer", "mountPath": TOKENIZER_MOUNT}
    copy["volumeMounts"].append(mount)
    volume = {"name": "tokenizer", "emptyDir": {"sizeLimit": "256Mi"}}
    return ModelSource(TOKENIZER_MOUNT, (volume,), ({**mount, "readOnly": True},), (copy,))


def hub_ports(model: ModelSpec) -> tuple[int, ...]:
    """TCP ports that pods go to for their downloads: the hub's or its proxy's, and more that the spec names."""
    if not model.uri.startswith("hf://"):
        return ()
    hub = model.hub or HubSpec()
    return (port_of(hub.proxy or hub.endpoint or "https://huggingface.co"), *hub.egress_ports)


def port_of(url: str) -> int:
    """TCP port of an http or https URL."""
    parts = urlsplit(url)
    return parts.port or DEFAULT_PORTS[parts.scheme]


def _claim(rest: str) -> ModelSource:
    claim, path = rest.split("/", 1)
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return ModelSource(f"{MOUNT}/{path}", (volume,), ({"name": "model", "mountPath": MOUNT, "readOnly": True},))


def _hub(rest: str, hub: HubSpec, image: ImageSpec, only: str) -> ModelSource:
    repository, revision = rest.rsplit("@", 1)
    path = f"{MOUNT}/{repository.replace('/', '--')}--{revision}" + ("--tokenizer" if only else "")
    command = ["hf", "download", repository, "--revision", revision, "--local-dir", path]
    download = _init(DOWNLOAD, image, command + (["--include", only] if only else []))
    download["volumeMounts"].append({"name": "model", "mountPath": MOUNT})
    # It asks the hub for the model, and nobody for anything else.
    quiet = ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_UPDATE_CHECK")
    download["env"] += [{"name": "HF_HOME", "value": "/tmp/hf"}, *({"name": name, "value": "1"} for name in quiet)]
    if hub.endpoint:
        download["env"].append({"name": "HF_ENDPOINT", "value": hub.endpoint})
    if hub.proxy:
        names = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")
        download["env"] += [{"name": name, "value": hub.proxy} for name in names]
    volumes: list[Object] = []
    if hub.ca_config_map:
        # Of httpx, requests and Rust's clients: each has a name of its own.
        files = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
        download["env"] += [{"name": name, "value": f"{HUB_CA}/ca.crt"} for name in files]
        download["volumeMounts"].append({"name": "hub-ca", "mountPath": HUB_CA, "readOnly": True})
        volumes.append({"name": "hub-ca", "configMap": {"name": hub.ca_config_map}})
    if hub.token_secret:
        source = {"secretKeyRef": {"name": hub.token_secret, "key": "token"}}
        download["env"].append({"name": "HF_TOKEN", "valueFrom": source})
    where = {"persistentVolumeClaim": {"claimName": hub.cache_claim}} if hub.cache_claim else {"emptyDir": {}}
    mount = {"name": "model", "mountPath": MOUNT, "readOnly": True}
    return ModelSource(path, ({"name": "model"} | where, *volumes), (mount,), (download,))


def with_init_resources(pod: Object) -> Object:
    """A pod spec whose init containers of ours ask for what `main` does, without devices, unless the template says
    what. A quota wants limits of every container; a pod is counted by the larger of the two, so this makes none larger.
    """
    main = next(container for container in pod["containers"] if container["name"] == MAIN_CONTAINER)
    told = main.get("resources") or {}
    asked = {part: told.get(part) or {} for part in ("requests", "limits")}
    shared = {part: {name: amounts[name] for name in _SHARED if name in amounts} for part, amounts in asked.items()}
    like = {part: amounts for part, amounts in shared.items() if amounts}
    if not like or "initContainers" not in pod:
        return pod
    ours = (DOWNLOAD, TOKENIZER)
    init = [{"resources": like, **c} if c["name"] in ours else c for c in pod["initContainers"]]
    return {**pod, "initContainers": init}


def _init(name: str, image: ImageSpec, command: list[str]) -> Object:
    return {
        "name": name,
        "image": image_of(image),
        "imagePullPolicy": image.pull_policy.value,
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": dict(CONTAINER_SECURITY),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
