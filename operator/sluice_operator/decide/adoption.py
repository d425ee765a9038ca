"""Children that were restored without an owner: which of them this ModelDeployment takes for its own.

Only what carries our label and says what we would say. Never a Secret, whose content nobody can compare with what the
processes of this cluster believe, and never a Deployment whose template differs: it would be another revision under our
name. Everything else that has a name which we need is left alone, and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sluice_operator.decide.diff import covers
from sluice_operator.decide.observed import Child, Owner
from sluice_operator.names import LABEL_DEPLOYMENT

Object = Mapping[str, Any]
WHOSE = {
    Owner.NAMESAKE: "it belongs to a deleted ModelDeployment of this name",
    Owner.STRANGER: "it belongs to something else",
    Owner.ORPHAN: "it has our label and no owner, and is not what would be made now",
}
SECRET = "it has our label and no owner, and a Secret is never adopted"


def is_ours(child: Child, wanted: Object) -> bool:
    """Whether an ownerless `child` may be adopted as `wanted`, which is what we would apply."""
    if child.owner is not Owner.ORPHAN or child.kind == "Secret":
        return False
    return covers(child.object, _without_owner(_comparable(wanted)))


def describe(namespace: str, taken: Sequence[Child]) -> str:
    """All of them, and one command for those that were restored."""
    whose = [SECRET if c.owner is Owner.ORPHAN and c.kind == "Secret" else WHOSE[c.owner] for c in taken]
    told = "; ".join(f"{child.kind} {child.name}: {why}" for child, why in zip(taken, whose))
    orphans = " ".join(f"{c.kind.lower()}/{c.name}" for c in taken if c.owner is Owner.ORPHAN)
    return f"{told}. To have them made anew: `kubectl delete -n {namespace} {orphans}`" if orphans else told


def label_is_ours(labels: Mapping[str, Any], name: str) -> bool:
    """Of a child of the ModelDeployment `name`."""
    return labels.get(LABEL_DEPLOYMENT) == name


def _comparable(wanted: Object) -> Object:
    """Without what changes while it lives: replicas, and the verdict on a revision."""
    spec = wanted.get("spec")
    if wanted["kind"] == "Deployment" and isinstance(spec, Mapping):
        return {**wanted, "spec": {key: value for key, value in spec.items() if key != "replicas"}}
    if wanted["kind"] == "ControllerRevision":
        meta = wanted["metadata"]
        labels = {key: value for key, value in meta["labels"].items() if value}
        return {**wanted, "metadata": {**meta, "labels": labels}, "revision": None}
    return wanted


def _without_owner(item: Object) -> Object:
    meta = {key: value for key, value in item["metadata"].items() if key != "ownerReferences"}
    return {key: value for key, value in {**item, "metadata": meta}.items() if value is not None}


def conflicts(children: Mapping[tuple[str, str], Child], wanted: Iterable[Object]) -> list[Child]:
    """What has a name that we need and is not ours, each once."""
    keys = dict.fromkeys((item["kind"], item["metadata"]["name"]) for item in wanted)
    return [child for key in keys if (child := children.get(key)) is not None and child.owner is not Owner.OURS]
