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

Object = Mapping[str, Any]
WHOSE = {
    Owner.NAMESAKE: "it belongs to a deleted ModelDeployment of this name",
    Owner.STRANGER: "it belongs to something else",
    Owner.ORPHAN: "it has our label and no owner, and is not what would be made now",
}
SECRET = "it has our label and no owner, and a Secret is never adopted"


def is_ours(orphan: Child, wanted: Object) -> bool:
    """Whether an ownerless child may be adopted as `wanted`, which is what we would apply."""
    return orphan.kind != "Secret" and covers(orphan.object, _comparable(wanted))


def describe(namespace: str, taken: Sequence[Child]) -> str:
    """All of them, and one command for those that were restored."""
    whose = [SECRET if c.owner is Owner.ORPHAN and c.kind == "Secret" else WHOSE[c.owner] for c in taken]
    told = "; ".join(f"{child.kind} {child.name}: {why}" for child, why in zip(taken, whose))
    orphans = " ".join(f"{c.kind.lower()}/{c.name}" for c in taken if c.owner is Owner.ORPHAN)
    return f"{told}. To have them made anew: `kubectl delete -n {namespace} {orphans}`" if orphans else told


def _comparable(wanted: Object) -> Object:
    """Without the owner, and without what changes while it lives: replicas, a revision's number and its verdict."""
    meta = {key: value for key, value in wanted["metadata"].items() if key != "ownerReferences"}
    rest = {key: value for key, value in wanted.items() if key not in ("metadata", "revision")}
    if wanted["kind"] == "ControllerRevision":
        meta["labels"] = {key: value for key, value in meta["labels"].items() if value}
    if wanted["kind"] == "Deployment":
        rest["spec"] = {key: value for key, value in wanted["spec"].items() if key != "replicas"}
    return {**rest, "metadata": meta}


def conflicts(children: Mapping[tuple[str, str], Child], wanted: Iterable[Object]) -> list[Child]:
    """What has a name that we need and is not ours, each once."""
    keys = dict.fromkeys((item["kind"], item["metadata"]["name"]) for item in wanted)
    return [child for key in keys if (child := children.get(key)) is not None and child.owner is not Owner.OURS]
