"""What somebody wrote in a pod template and what the operator puts there, joined. Ours wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]
# Lists that are maps: by what their items are told apart.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "resourceClaims": "name",
    "claims": "name",
    "imagePullSecrets": "name",
    "readinessGates": "conditionType",
}


def merge(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Object:
    """Objects are joined, lists of KEYS too; anything else of ours replaces theirs."""
    told = dict(theirs)
    for name, value in ours.items():
        there = told.get(name)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            told[name] = merge(there, value)
        elif name in KEYS and isinstance(value, Sequence) and isinstance(there, Sequence):
            told[name] = _merge_lists(there, value, KEYS[name])
        else:
            told[name] = value
    return told


def _merge_lists(theirs: Sequence[Any], ours: Sequence[Any], key: str) -> list[Any]:
    """Ours first, in our order: init containers of theirs may need what ours made."""
    by_key = {item.get(key): item for item in theirs if isinstance(item, Mapping)}
    mine = {item[key] for item in ours}
    joined = [merge(by_key.get(item[key], {}), item) for item in ours]
    return joined + [item for item in theirs if not isinstance(item, Mapping) or item.get(key) not in mine]


def with_defaults(theirs: Mapping[str, Any], defaults: Mapping[str, Any]) -> Object:
    """The other way round: theirs wins."""
    return merge(defaults, theirs)


def without_nulls(value: Any) -> Any:
    """For Kubernetes a member that is null is absent. Left there it would replace a default of ours."""
    if isinstance(value, Mapping):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
