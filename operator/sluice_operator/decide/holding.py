"""Deployments of engines are held (`spec.paused`), so that their controller replaces no pod, whatever is done to the
template: `kubectl rollout restart`, or another edit, would end all engines of a role at once.

A Deployment is held once its ReplicaSet exists, for a paused one makes none. It is still scaled, and its ReplicaSet
still replaces lost pods. A template that was edited is put back, so that letting go would end nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sluice_operator.decide.actions import Action, Hold, PutBack, Tell
from sluice_operator.decide.diff import covers
from sluice_operator.decide.observed import Workload

RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"
# The Deployment controller writes it when the ReplicaSet of a template exists.
_REVISION = "deployment.kubernetes.io/revision"
_REMEDY = (
    "engines are restarted one after the other by another annotation in prefill.template and decode.template of the"
    " ModelDeployment"
)
Object = Mapping[str, Any]


def hold(workload: Workload, live: Object, template: Object) -> Iterator[Action]:
    """`live`: the Deployment. `template`: what its revision keeps."""
    if not workload.paused:
        if _has_replica_set(live):
            yield Hold(workload.name, workload.resource_version)
    elif is_edited(live["spec"]["template"], template):
        yield PutBack(workload.name, workload.resource_version, template)
        text = f"The pod template of Deployment {workload.name} was edited and is put back; {_REMEDY}."
        yield Tell("TemplateEdited", text, f"edited-{workload.uid}-{workload.resource_version}", warning=True)


def is_edited(live: Object, template: Object) -> bool:
    """Whether a restart was asked for in the live template, or another program is to run."""
    return RESTARTED_AT in live.get("metadata", {}).get("annotations", {}) or runs_other(live, template)


def runs_other(live: Object, template: Object) -> bool:
    """Whether another image, command or argument is to run in a container of ours."""
    running, wanted = _programs(live), _programs(template)
    return any(not covers(running.get(name), told) for name, told in wanted.items())


def _programs(template: Object) -> Mapping[str, Object]:
    """What runs, by container: members that the API server keeps word for word. Only what is set: what somebody else
    has added, an Apply would not take away."""
    containers: Iterable[Object] = (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])
    return {c["name"]: {key: c[key] for key in ("image", "command", "args") if c.get(key)} for c in containers}


def _has_replica_set(live: Object) -> bool:
    """Of the template that it has now."""
    meta = live["metadata"]
    is_seen = live.get("status", {}).get("observedGeneration") == meta.get("generation")
    return is_seen and _REVISION in meta.get("annotations", {})
