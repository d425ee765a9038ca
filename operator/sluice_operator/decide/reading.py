"""Objects as the API server tells them, read into what plan looks at. What has no shape reads as nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sluice_operator import names
from sluice_operator.api.crd import API_VERSION, KIND
from sluice_operator.decide.moments import seconds
from sluice_operator.decide.observed import Child, Owner, Pod, Revision, Termination, Workload
from sluice_operator.names import PodRole, Verdict

Object = Mapping[str, Any]


def owner_of(item: Object, name: str, uid: str) -> Owner:
    """Of an object in the namespace of the ModelDeployment `name` with `uid`."""
    for reference in _list(_object(item.get("metadata")).get("ownerReferences")):
        if reference.get("uid") == uid:
            return Owner.OURS
        group = str(reference.get("apiVersion", "")).partition("/")[0]
        if (group, reference.get("kind"), reference.get("name")) == (API_VERSION.partition("/")[0], KIND, name):
            return Owner.NAMESAKE
    labels = _object(_object(item.get("metadata")).get("labels"))
    is_orphan = not owner_uid(item) and labels.get(names.LABEL_DEPLOYMENT) == name
    return Owner.ORPHAN if is_orphan else Owner.STRANGER


def owner_uid(item: Object) -> str:
    """Of the controller, empty if there is none."""
    references = _list(_object(item.get("metadata")).get("ownerReferences"))
    return next((str(r.get("uid", "")) for r in references if r.get("controller")), "")


def read_child(item: Object, name: str, uid: str) -> Child:
    meta = _object(item.get("metadata"))
    version = str(meta.get("resourceVersion", ""))
    return Child(str(item["kind"]), str(meta["name"]), str(meta["uid"]), version, owner_of(item, name, uid), item)


def read_workload(item: Object, replica_sets: Iterable[Object] = ()) -> Workload | None:
    """None for a Deployment without our labels. `replica_sets`: of the namespace. They say why pods cannot be made: the
    controller of a Deployment that is held leaves its own condition as it was."""
    meta = _object(item.get("metadata"))
    role = _role(meta)
    if role is None:
        return None
    revision = str(_object(meta.get("labels")).get(names.LABEL_REVISION, ""))
    spec = _object(item.get("spec"))
    replicas, paused = spec.get("replicas", 1), bool(spec.get("paused"))
    version, uid = str(meta["resourceVersion"]), str(meta["uid"])
    own = [replica_set for replica_set in replica_sets if owner_uid(replica_set) == uid]
    refused = next((why for told in own or [item] if (why := _refusal(told))), "")
    return Workload(str(meta["name"]), role, revision, int(replicas), uid, version, refused, paused)


def _refusal(item: Object) -> str:
    """Why pods of a Deployment or ReplicaSet cannot be made; empty if they can."""
    failed = _conditions(item).get("ReplicaFailure", {})
    return str(failed.get("message") or failed.get("reason") or "") if failed.get("status") == "True" else ""


def read_revision(item: Object) -> Revision:
    meta = _object(item.get("metadata"))
    labels = _object(meta.get("labels"))
    told = str(labels.get(names.LABEL_VERDICT, ""))
    return Revision(
        name=str(meta["name"]),
        hash=str(labels.get(names.LABEL_REVISION, "")),
        number=int(item.get("revision", 0)),
        data=_object(item.get("data")),
        verdict=Verdict(told) if told in set(Verdict) else Verdict.UNKNOWN,
        verdict_reason=str(labels.get(names.LABEL_VERDICT_REASON, "")),
        uid=str(meta["uid"]),
        resource_version=str(meta["resourceVersion"]),
        verdict_detail=str(_object(meta.get("annotations")).get(names.ANNOTATION_VERDICT_DETAIL, "")),
    )


def read_pod(item: Object) -> Pod | None:
    """None for a pod without a role of ours. `load` is for somebody else to add."""
    meta, spec, status = (_object(item.get(part)) for part in ("metadata", "spec", "status"))
    role = _role(meta)
    if role is None:
        return None
    labels = _object(meta.get("labels"))
    conditions = _conditions(item)
    containers = _list(status.get("containerStatuses"))
    main = _container(containers)
    inits = _list(status.get("initContainerStatuses"))
    init = _init_in_work(inits, _sidecars(spec))
    beside = _sidecar_at_fault(containers, main) if init is None else None
    if init is not None and "running" in _object(main.get("state")):
        init, beside = None, init  # a sidecar of that kind, whose part in the start is done
    helper = init or beside
    at_work = main if helper is None else helper
    lives = [at_work] if init is None else inits
    waiting = _object(_object(at_work.get("state")).get("waiting"))
    kinds = ("Ready", names.READINESS_GATE, "PodScheduled", "Initialized")
    ready, gate, placed, initialized = (conditions.get(kind, {}) for kind in kinds)
    initialized_at = max(_true_since(placed), _true_since(initialized))
    return Pod(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        role=role,
        revision=str(labels.get(names.LABEL_REVISION, "")),
        created_at=_moment(meta.get("creationTimestamp")),
        resource_version=str(meta.get("resourceVersion", "")),
        ready=ready.get("status") == "True",
        ready_changed_at=_moment(ready.get("lastTransitionTime")),
        started=bool(main.get("started")) and "running" in _object(main.get("state")),
        serving={"True": True, "False": False}.get(str(gate.get("status"))),
        serving_changed_at=_moment(gate.get("lastTransitionTime")),
        node=str(spec.get("nodeName", "")),
        scheduled_at=_true_since(placed),
        initialized_at=initialized_at,
        starting_at=max(initialized_at, *map(_last_change, lives)),
        init_container="" if init is None else str(init.get("name", "")),
        sidecar="" if beside is None else str(beside.get("name", "")),
        runs="running" in _object(at_work.get("state")),
        unschedulable=str(placed.get("message", "")) if placed.get("status") == "False" else "",
        waiting_reason=str(waiting.get("reason", "")),
        waiting_message=str(waiting.get("message", "")),
        restarts=_count(at_work.get("restartCount")),
        last_life_s=_last_life_s(at_work),
        # One that has failed for good (evicted) is replaced by its ReplicaSet, and never comes back.
        terminating="deletionTimestamp" in meta or status.get("phase") in ("Failed", "Succeeded"),
        gone_by=_moment(meta.get("deletionTimestamp")),
        quarantined=names.LABEL_QUARANTINED in labels,
        terminations=tuple(_terminations(main)),
        helper_terminations=() if helper is None else tuple(_terminations(helper)),
        ended_by_node=_ended_by_node(status) if "deletionTimestamp" not in meta else "",
    )


def _ended_by_node(status: Object) -> str:
    """Containers that restart always bring no pod to an end: what does gives its reason."""
    if status.get("phase") != "Failed":
        return ""
    told = [str(status.get(key) or "") for key in ("reason", "message")]
    return ": ".join(part for part in told if part) or "its phase is Failed"


def _init_in_work(statuses: list[Object], sidecars: frozenset[str]) -> Object | None:
    """The first that bars those after it, for they begin one after the other: one that has not ended well, or of
    `sidecars` one that does not run, for those never end."""
    for status in statuses:
        ended = _object(_object(status.get("state")).get("terminated"))
        has_ended_well = bool(ended) and ended.get("exitCode") == 0
        is_let_run = str(status.get("name")) in sidecars and status.get("started") is True
        if not (has_ended_well or is_let_run):
            return status
    return None


def _sidecar_at_fault(statuses: list[Object], main: Object) -> Object | None:
    """The first container beside the main one that cannot run, if the main one can; else one that is not ready although
    the main one is."""
    others = [status for status in statuses if status.get("name") != names.MAIN_CONTAINER]
    if _is_barred(main):
        return None
    barred = [status for status in others if _is_barred(status)]
    late = [status for status in others if status.get("ready") is False and main.get("ready") is True]
    return next(iter((*barred, *late)), None)


def _is_barred(status: Object) -> bool:
    """It waits for something else than its turn."""
    reason = _object(_object(status.get("state")).get("waiting")).get("reason")
    return bool(reason) and reason not in ("ContainerCreating", "PodInitializing")


def _sidecars(spec: Object) -> frozenset[str]:
    """Names of init containers that run beside the main one; a service mesh may inject such."""
    return frozenset(
        str(c.get("name")) for c in _list(spec.get("initContainers")) if c.get("restartPolicy") == "Always"
    )


def _last_change(container: Object) -> float:
    """When it began to run, or has ended."""
    begun = _object(_object(container.get("state")).get("running")).get("startedAt")
    ends = (_object(_object(container.get(part)).get("terminated")) for part in ("state", "lastState"))
    return max(_moment(begun), *(_moment(ended.get("finishedAt")) for ended in ends))


def _true_since(condition: Object) -> float:
    return _moment(condition.get("lastTransitionTime")) if condition.get("status") == "True" else 0.0


def _last_life_s(container: Object) -> float | None:
    ended = [_object(_object(container.get(part)).get("terminated")) for part in ("state", "lastState")]
    last: Object = next((life for life in ended if life), {})
    begun = _moment(last.get("startedAt"))
    return max(0.0, _moment(last.get("finishedAt")) - begun) if begun else None


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _terminations(container: Object) -> Iterable[Termination]:
    """Its last end, and the one it is in."""
    restarts = _count(container.get("restartCount"))
    for part, restart in (("lastState", restarts - 1), ("state", restarts)):
        ended = _object(_object(container.get(part)).get("terminated"))
        if ended:
            at = _moment(ended.get("finishedAt"))
            told = str(ended.get("message", ""))
            yield Termination(restart, int(ended.get("exitCode", 0)), str(ended.get("reason", "")), told, at)


def _container(statuses: list[Object]) -> Object:
    return next((s for s in statuses if s.get("name") == names.MAIN_CONTAINER), {})


def _conditions(item: Object) -> Mapping[str, Object]:
    """By type."""
    told = _list(_object(item.get("status")).get("conditions"))
    return {str(condition.get("type")): condition for condition in told}


def _role(meta: Object) -> PodRole | None:
    told = _object(meta.get("labels")).get(names.LABEL_ROLE)
    return PodRole(told) if told in set(PodRole) else None


def _moment(value: object) -> float:
    return (seconds(str(value)) if value else None) or 0.0


def _object(value: object) -> Object:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Object]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
