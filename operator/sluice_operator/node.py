"""Nodes as the API server tells them, read into what placement looks at. Never raises: one of no shape is bare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_operator.observed import Node, Taint
from sluice_operator.placement import GPU_RESOURCE


def read_node(raw: Mapping[str, Any], used_gpus: int | None = None) -> Node:
    """`used_gpus`: what pods on it have asked for; None: not known."""
    meta, spec, status = (_object(raw.get(part)) for part in ("metadata", "spec", "status"))
    gpus = _count(_object(status.get("allocatable")).get(GPU_RESOURCE))
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
    )


def _taint(raw: Mapping[str, Any]) -> Taint:
    return Taint(str(raw.get("key", "")), str(raw.get("value") or ""), str(raw.get("effect", "")))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 0
