"""What admission cannot see, as an ordered list of checks: the first that objects is the reason of Accepted=False."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from sluice_operator.api.crd import MAX_NAME
from sluice_operator.api.enums import ServiceType
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import Invalid, Problem, from_json
from sluice_operator.decide.reasons import Reason
from sluice_operator.names import MAIN_CONTAINER, PREFIX, is_label_value, is_object_name, is_ours, is_qualified_name
from sluice_operator.render.model import DOWNLOAD, TOKENIZER

Objection = tuple[Reason, Problem]
SpecCheck = Callable[[str, ModelDeploymentSpec], Iterator[Objection]]

_POD_FORBIDDEN = {
    "restartPolicy": "pods of a Deployment are always restarted",
    "terminationGracePeriodSeconds": "it follows from drain.timeoutSeconds",
    "serviceAccountName": "set serviceAccountName of the role, beside its template",
    "serviceAccount": "set serviceAccountName of the role, beside its template",
    "automountServiceAccountToken": "engines get no token",
    "readinessGates": "the operator has one of its own",
    "activeDeadlineSeconds": "engines run until they are drained",
    "hostNetwork": "ports are fixed and policies need pod addresses",
    "hostPID": "the restricted profile forbids it",
    "hostIPC": "the restricted profile forbids it",
    "hostname": "pods are told apart by their own names",
    "subdomain": "pods are told apart by their own names",
    "nodeName": "the scheduler places pods; use nodeSelector",
}
_MAIN_FORBIDDEN = {
    "command": "the operator starts engine and gateway",
    "args": "the operator starts engine and gateway",
    "image": "it is spec.image",
    "imagePullPolicy": "it is spec.image.pullPolicy",
    "ports": "they are fixed",
    "livenessProbe": "probes are the operator's; see spec.probes",
    "readinessProbe": "probes are the operator's; see spec.probes",
    "startupProbe": "probes are the operator's; see spec.probes.startupMaxSeconds",
    "lifecycle": "pods end by a drain",
    "terminationMessagePath": "the supervisor writes the cause of death there",
    "terminationMessagePolicy": "the supervisor writes the cause of death there",
    "stdin": "nobody answers",
    "tty": "nobody answers",
    "workingDir": "it is the image's",
}
_ENV_FORBIDDEN_PREFIXES = ("SLUICE_", "UCX_", "NIXL_")
_ENV_FORBIDDEN = ("POD_NAME", "POD_IP", "POD_NAMESPACE", "HOME", "HF_HUB_OFFLINE")
# Volumes and mounts that the operator makes.
_VOLUMES = ("spec", "key", "tls", "run", "evidence", "tmp", "model", "tokenizer", "api-keys", "hub-ca")
_METADATA = ("labels", "annotations")


def parse(name: str, raw: object, *, is_newer: bool = False) -> ModelDeploymentSpec | tuple[Objection, ...]:
    """The spec with its defaults, or all that is wrong with it, in the order of importance. `is_newer`: see
    `from_json`."""
    try:
        spec = from_json(ModelDeploymentSpec, raw, "spec", is_newer=is_newer)
    except Invalid as error:
        return tuple((Reason.SPEC_INVALID, problem) for problem in error.problems)
    found = tuple(objection for check in CHECKS for objection in check(name, spec))
    return found or spec


def _name(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    first = name[:1]
    plain = all(c.isdigit() or ("a" <= c <= "z") or c == "-" for c in name)
    if not (plain and "a" <= first <= "z" and not name.endswith("-") and len(name) <= MAX_NAME):
        remedy = f"give at most {MAX_NAME} lower-case letters, digits and '-', a letter first"
        yield Reason.SPEC_INVALID, Problem("metadata.name", f"is {name[:80]!r}", remedy)


def _rules(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    """The CEL rules once more, for a file that no API server has seen. tests/operator holds both against each other."""
    if spec.model.hub is not None and not spec.model.uri.startswith("hf://"):
        yield _bad("spec.model.hub", "is for hf:// models only", "remove it")
    if (spec.image.tag is None) == (spec.image.digest is None):
        yield _bad("spec.image", "needs exactly one of tag and digest", "set one and remove the other")
    if spec.precision.kv.value == "Auto" and spec.precision.index_keys.value != "Auto":
        yield _bad("spec.precision.indexKeys", "needs kv", "set kv, or leave both Auto")
    if (spec.accelerator.type.value == "GPU") != (spec.accelerator.gpu is not None):
        yield _bad("spec.accelerator.gpu", "belongs to type GPU", "set gpu: {} with it, remove gpu with type CPU")
    scaling = spec.decode.scaling
    if (scaling.mode.value == "Auto") != (scaling.auto is not None):
        yield _bad("spec.decode.scaling.auto", "belongs to mode Auto", "set it with Auto, remove it otherwise")
    if scaling.auto is not None and scaling.auto.min_replicas > scaling.auto.max_replicas:
        yield _bad("spec.decode.scaling.auto", "has minReplicas above maxReplicas", "raise one or lower the other")
    if not spec.rollout.max_surge and not spec.rollout.max_unavailable:
        yield _bad("spec.rollout", "has maxSurge and maxUnavailable both 0", "raise one")


def _bad(path: str, problem: str, remedy: str) -> Objection:
    return Reason.SPEC_INVALID, Problem(path, problem, remedy)


def _service(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    """Without a CEL rule: v1alpha1 gets no tighter ones."""
    service = spec.gateway.service
    if service.type is not ServiceType.LOAD_BALANCER and (
        service.load_balancer_class or service.load_balancer_source_ranges
    ):
        problem = "has loadBalancerClass or loadBalancerSourceRanges, which need type LoadBalancer"
        yield _bad("spec.gateway.service", problem, "set it or remove them")
    for number, network in enumerate(service.load_balancer_source_ranges):
        if not _is_network(network):
            path = f"spec.gateway.service.loadBalancerSourceRanges[{number}]"
            yield _bad(path, f"is {network!r}", "give a network such as 10.0.0.0/8")


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def _tensor(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    for role, engine in (("prefill", spec.prefill), ("decode", spec.decode)):
        if engine.parallelism.tensor > 1:
            path = f"spec.{role}.parallelism.tensor"
            yield Reason.TENSOR_UNSUPPORTED, Problem(path, f"is {engine.parallelism.tensor}", "set it to 1")


def _templates(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    for role, template in (
        ("prefill", spec.prefill.template),
        ("decode", spec.decode.template),
        ("gateway", spec.gateway.template),
    ):
        downloads = spec.model.uri.startswith("hf://")
        for problem in template_problems(template, f"spec.{role}.template", downloads=downloads):
            yield Reason.TEMPLATE_INVALID, problem


def _ports(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    """Of URLs: the schema's pattern knows no numbers."""
    hub = spec.model.hub
    urls = {
        "spec.model.hub.endpoint": hub.endpoint if hub is not None else None,
        "spec.model.hub.proxy": hub.proxy if hub is not None else None,
        "spec.monitoring.otlpEndpoint": spec.monitoring.otlp_endpoint,
    }
    for path, url in urls.items():
        _, colon, port = (url or "").partition("://")[2].partition("/")[0].partition(":")
        if colon and not 1 <= int(port) <= 65535:
            yield Reason.SPEC_INVALID, Problem(path, f"has port {port}", "give a port of 1 to 65535, or none")


def _names(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    """What becomes the name of an object, or the key of a label or annotation, as the API server will have it. The
    schema's patterns let dots follow each other, and know no length of a part."""
    gpu, hub = spec.accelerator.gpu, spec.model.hub
    objects = {
        "spec.model.hub.tokenSecret": hub.token_secret if hub is not None else None,
        "spec.model.hub.caConfigMap": hub.ca_config_map if hub is not None else None,
        "spec.model.hub.cacheClaim": hub.cache_claim if hub is not None else None,
        "spec.model.uri": spec.model.uri[6:].split("/")[0] if spec.model.uri.startswith("pvc://") else None,
        "spec.gateway.apiKeysSecret": spec.gateway.api_keys_secret,
        "spec.gateway.serviceAccountName": spec.gateway.service_account_name,
        "spec.prefill.serviceAccountName": spec.prefill.service_account_name,
        "spec.decode.serviceAccountName": spec.decode.service_account_name,
        "spec.accelerator.gpu.deviceClass": gpu.device_class if gpu is not None else None,
    }
    for path, told in objects.items():
        if told is not None and not is_object_name(told):
            remedy = "give lower-case letters, digits, '-' and single dots, at most 253"
            yield Reason.SPEC_INVALID, Problem(path, f"names {told[:80]!r}, which nothing can be called", remedy)
    keys = {f"spec.gateway.service.annotations[{key[:80]}]": key for key in spec.gateway.service.annotations}
    if gpu is not None:
        keys["spec.accelerator.gpu.domain.topologyKey"] = gpu.domain.topology_key
    for path, key in keys.items():
        if not is_qualified_name(key):
            remedy = "give at most 63 letters, digits, '-', '_' and '.', after a domain and '/' or not"
            yield Reason.SPEC_INVALID, Problem(path, "is no key that Kubernetes takes", remedy)
    for key, value in spec.gateway.service.annotations.items():
        if not isinstance(value, str):
            problem = Problem(f"spec.gateway.service.annotations[{key[:80]}]", "is no string", "put it in quotes")
            yield Reason.SPEC_INVALID, problem


def _labels(name: str, spec: ModelDeploymentSpec) -> Iterator[Objection]:
    """Of children: nothing of the operator's own, and what the API server takes."""
    maps = {
        "spec.metadata.labels": spec.metadata.labels,
        "spec.metadata.annotations": spec.metadata.annotations,
        "spec.monitoring.labels": spec.monitoring.labels,
        "spec.gateway.service.labels": spec.gateway.service.labels,
    }
    for path, values in maps.items():
        for key, value in values.items():
            where = f"{path}[{key[:80]}]"
            if is_ours(key):
                problem = Problem(where, "is the operator's", "remove it")
            elif not is_qualified_name(key):
                remedy = "give at most 63 letters, digits, '-', '_' and '.', after a domain and '/' or not"
                problem = Problem(where, "is no key that Kubernetes takes", remedy)
            elif not isinstance(value, str):
                problem = Problem(where, "is no string", "put it in quotes")
            elif path.endswith("labels") and not is_label_value(value):
                remedy = "give at most 63 letters, digits, '-', '_' and '.', a letter or digit first and last"
                problem = Problem(where, f"is {value[:80]!r}, which no label can be", remedy)
            else:
                continue
            yield Reason.SPEC_INVALID, problem


CHECKS: tuple[SpecCheck, ...] = (_name, _rules, _ports, _names, _service, _labels, _tensor, _templates)


# -- templates --------------------------------------------------------------------------------------------------------


def template_problems(template: Mapping[str, Any], path: str, *, downloads: bool = False) -> Iterator[Problem]:
    """What is the operator's, and what is of no shape that could be a pod's. The rest is for the dry run to find.
    `downloads`: an init container of ours gets the model, and the template may add to it."""
    for name in template:
        if name not in ("metadata", "spec"):
            yield Problem(f"{path}.{name}", "is no part of a pod template", "leave only metadata and spec")
    yield from _metadata(template.get("metadata"), f"{path}.metadata")
    pod = template.get("spec")
    if pod is None:
        return
    if not isinstance(pod, Mapping):
        yield Problem(f"{path}.spec", "is no object", "give a PodSpec")
        return
    yield from _forbidden(pod, _POD_FORBIDDEN, f"{path}.spec")
    yield from _shapes(pod, f"{path}.spec")
    yield from _volumes(pod, f"{path}.spec.volumes")
    for field in ("containers", "initContainers", "ephemeralContainers"):
        added = DOWNLOAD if downloads and field == "initContainers" else ""
        yield from _containers(pod.get(field), f"{path}.spec.{field}", field == "containers", added)


def _metadata(meta: Any, path: str) -> Iterator[Problem]:
    if meta is None:
        return
    if not isinstance(meta, Mapping):
        yield Problem(path, "is no object", "give labels and annotations")
        return
    for field, values in meta.items():
        if field not in _METADATA:
            yield Problem(f"{path}.{field}", "is not for a template", "leave only labels and annotations")
        elif not isinstance(values, Mapping):
            yield Problem(f"{path}.{field}", "is no object", "give strings by name")
        else:
            for key, value in values.items():
                if str(key).startswith((f"{PREFIX}/", "app.kubernetes.io/")):
                    yield Problem(f"{path}.{field}[{key}]", "is the operator's", "remove it")
                elif not isinstance(value, str):
                    yield Problem(f"{path}.{field}[{key}]", "is no string", "put it in quotes")


def _forbidden(there: Mapping[str, Any], forbidden: Mapping[str, str], path: str) -> Iterator[Problem]:
    for field, why in forbidden.items():
        if field in there:
            yield Problem(f"{path}.{field}", f"is the operator's ({why})", "remove it")


# What we join with our own: it must have the shape that it has in a pod.
_OBJECTS, _LISTS = (
    ("affinity", "securityContext", "nodeSelector"),
    ("topologySpreadConstraints", "tolerations", "volumes"),
)
_MORE_LISTS = ("imagePullSecrets", "resourceClaims")


def _shapes(pod: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for field in _OBJECTS:
        if not isinstance(pod.get(field, {}), Mapping):
            yield Problem(f"{path}.{field}", "is no object", "give an object or remove it")
    for field in (*_LISTS, *_MORE_LISTS):
        yield from _list_of_objects(pod.get(field), f"{path}.{field}")
    affinity = pod.get("affinity")
    if isinstance(affinity, Mapping):
        yield from _affinity(affinity, f"{path}.affinity")


def _affinity(affinity: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for field in ("nodeAffinity", "podAffinity"):
        part = affinity.get(field)
        if part is not None and not isinstance(part, Mapping):
            yield Problem(f"{path}.{field}", "is no object", "give an object or remove it")
    node = affinity.get("nodeAffinity")
    if isinstance(node, Mapping):
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        required = node.get(key)
        if required is not None and not isinstance(required, Mapping):
            yield Problem(f"{path}.nodeAffinity.{key}", "is no object", "give nodeSelectorTerms")
        elif required is not None:
            where = f"{path}.nodeAffinity.{key}.nodeSelectorTerms"
            yield from _list_of_objects(required.get("nodeSelectorTerms"), where)
            for number, term in enumerate(required.get("nodeSelectorTerms") or ()):
                if isinstance(term, Mapping):
                    yield from _list_of_objects(term.get("matchExpressions"), f"{where}[{number}].matchExpressions")
    pod = affinity.get("podAffinity")
    if isinstance(pod, Mapping):
        for rule in ("required", "preferred"):
            key = f"{rule}DuringSchedulingIgnoredDuringExecution"
            yield from _list_of_objects(pod.get(key), f"{path}.podAffinity.{key}")


def _list_of_objects(value: Any, path: str) -> Iterator[Problem]:
    if value is None:
        return
    if not isinstance(value, list):
        yield Problem(path, "is no list", "give a list or remove it")
        return
    for number, item in enumerate(value):
        if not isinstance(item, Mapping):
            yield Problem(f"{path}[{number}]", "is no object", "give an object")


def _volumes(pod: Mapping[str, Any], path: str) -> Iterator[Problem]:
    volumes = pod.get("volumes")
    for number, volume in enumerate(volumes if isinstance(volumes, list) else ()):
        if isinstance(volume, Mapping) and volume.get("name") in _VOLUMES:
            yield Problem(f"{path}[{number}].name", f"{volume['name']!r} is a volume of the operator", "rename it")


def _containers(containers: Any, path: str, is_main_allowed: bool, added: str) -> Iterator[Problem]:
    """`added`: a container of the operator's to which the template may add some things; empty: none."""
    yield from _list_of_objects(containers, path)
    seen: set[Any] = set()
    for number, container in enumerate(containers if isinstance(containers, list) else ()):
        if not isinstance(container, Mapping):
            continue
        here, name = f"{path}[{number}]", container.get("name")
        if not isinstance(name, str) or not name:
            yield Problem(f"{here}.name", "is missing", f"name it; the engine or gateway is {MAIN_CONTAINER!r}")
        elif name in seen:
            yield Problem(f"{here}.name", f"{name!r} is there twice", "rename one")
        elif name == MAIN_CONTAINER and is_main_allowed:
            yield from _main(container, here)
        elif name == added:
            yield from _added(container, here)
        elif name in (MAIN_CONTAINER, DOWNLOAD, TOKENIZER):
            yield Problem(f"{here}.name", f"{name!r} is the operator's", "rename it")
        seen.add(str(name))


def _added(container: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """To the download: a proxy with a password, mounts of authorities, its resources."""
    for field in container:
        if field not in ("name", "env", "envFrom", "volumeMounts", "resources"):
            remedy = "leave only env, envFrom, volumeMounts and resources"
            yield Problem(f"{path}.{field}", "is the operator's", remedy)
    if not isinstance(container.get("resources", {}), Mapping):
        yield Problem(f"{path}.resources", "is no object", "give an object or remove it")
    for field in ("env", "volumeMounts", "envFrom"):
        yield from _list_of_objects(container.get(field), f"{path}.{field}")


def _main(container: Mapping[str, Any], path: str) -> Iterator[Problem]:
    yield from _forbidden(container, _MAIN_FORBIDDEN, path)
    for field in ("resources", "securityContext"):
        if not isinstance(container.get(field, {}), Mapping):
            yield Problem(f"{path}.{field}", "is no object", "give an object or remove it")
    for field in ("env", "volumeMounts", "envFrom"):
        yield from _list_of_objects(container.get(field), f"{path}.{field}")
    env = container.get("env")
    for number, variable in enumerate(env if isinstance(env, list) else ()):
        name = str(variable.get("name", "")) if isinstance(variable, Mapping) else ""
        if name.startswith(_ENV_FORBIDDEN_PREFIXES) or name in _ENV_FORBIDDEN:
            yield Problem(f"{path}.env[{number}].name", f"{name!r} is the operator's", "remove it")
    resources = container.get("resources")
    for field in ("limits", "requests", "claims"):
        part = resources.get(field) if isinstance(resources, Mapping) else None
        if field != "claims" and part is not None and not isinstance(part, Mapping):
            yield Problem(f"{path}.resources.{field}", "is no object", "give quantities by name")
        elif isinstance(part, Mapping) and "nvidia.com/gpu" in part:
            yield Problem(f"{path}.resources.{field}[nvidia.com/gpu]", "is parallelism.tensor", "remove it")
        elif field == "claims":
            yield from _list_of_objects(part, f"{path}.resources.claims")
