"""Nodes as the API server tells them, read into what placement looks at. Never raises: one of no shape is bare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sluice_operator.decide.observed import GPU_RESOURCE, Node, Taint


def read_node(raw: Mapping[str, Any], used_gpus: int | None = None) -> Node:
    """`used_gpus`: what pods on it have asked for; None: not known."""
    meta, spec, status = (_object(raw.get(part)) for part in ("metadata", "spec", "status"))
    allocatable = _object(status.get("allocatable"))
    gpus = _count(allocatable.get(GPU_RESOURCE))
    others = {str(name): _count(amount) for name, amount in allocatable.items() if str(name).startswith("nvidia.com/")}
    others.pop(GPU_RESOURCE, None)
    conditions = [_object(c) for c in _list(status.get("conditions"))]
    # A file that somebody wrote by hand has no conditions: nothing is known to be wrong.
    ready = all(c.get("status") == "True" for c in conditions if c.get("type") == "Ready")
    return Node(
        name=str(meta.get("name", "")),
        labels={str(key): str(value) for key, value in _object(meta.get("labels")).items()},
        taints=tuple(_taint(_object(taint)) for taint in _list(spec.get("taints"))),
        ready=ready,
        cordoned=bool(spec.get("unschedulable")),
        gpus=gpus,
        free_gpus=None if used_gpus is None else gpus - used_gpus,
        others=others,
    )


def used_gpus(pods: Iterable[Mapping[str, Any]]) -> Mapping[str, int]:
    """Node -> GPUs that its pods have, as the scheduler counts: those that run side by side, or the largest one that
    starts before them. Pods that have ended, or have no node yet, hold none."""
    used: defaultdict[str, int] = defaultdict(int)
    for pod in pods:
        spec, status = _object(pod.get("spec")), _object(pod.get("status"))
        node = str(spec.get("nodeName") or "")
        if not node or status.get("phase") in ("Succeeded", "Failed"):
            continue
        first = [_object(c) for c in _list(spec.get("initContainers"))]
        beside = [c for c in first if c.get("restartPolicy") == "Always"]
        main = sum(_gpus(_object(c)) for c in [*_list(spec.get("containers")), *beside])
        used[node] += max([main, *(_gpus(c) for c in first)])
    return dict(used)


def _gpus(container: Mapping[str, Any]) -> int:
    limits = _object(_object(container.get("resources")).get("limits"))
    return _count(limits.get(GPU_RESOURCE))


def _taint(raw: Mapping[str, Any]) -> Taint:
    return Taint(str(raw.get("key", "")), str(raw.get("value") or ""), str(raw.get("effect", "")))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 0
