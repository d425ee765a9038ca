"""Actions, carried out. Nothing is written over that is not ours; what changed meanwhile is left to the next plan."""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator import actions, certificates, names
from sluice_operator.actions import Action
from sluice_operator.api.crd import API_VERSION, KIND
from sluice_operator.api.value import to_json
from sluice_operator.cluster import (
    APPLY,
    FIELD_MANAGER,
    JSON_PATCH,
    KINDS,
    MERGE,
    STRATEGIC,
    Cluster,
    Conflict,
    Forbidden,
    NotFound,
)
from sluice_operator.fleet import Fleet
from sluice_operator.moments import rfc3339
from sluice_operator.observe import OPTIONAL, Known
from sluice_operator.observed import Child, Observed
from sluice_operator.render.children import OwnerRef

Object = dict[str, Any]
KEY_BYTES = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`stale`: something was not as it had been seen, so plan has to look again. `idle`: nothing was sent."""

    stale: bool = False
    idle: bool = False


DONE, STALE, IDLE = Outcome(), Outcome(stale=True), Outcome(idle=True)


class Applier:
    """For one ModelDeployment and one look at it."""

    def __init__(self, cluster: Cluster, fleet: Fleet, observed: Observed, known: Known) -> None:
        self.cluster, self.fleet, self.observed, self.known = cluster, fleet, observed, known
        self.namespace, self.name, self.uid = observed.namespace, observed.name, observed.uid
        self.owner = OwnerRef(self.namespace, self.name, self.uid)
        self.children = {(child.kind, child.name): child for child in observed.children}

    async def obey(self, action: Action) -> Outcome:
        """Raises ClusterError for what the next attempt may cure."""
        level = logging.DEBUG if isinstance(action, actions.Remember) else logging.INFO
        log.log(level, "%s/%s: %s", self.namespace, self.name, action)
        try:
            return await self._obey(action)
        except (Conflict, NotFound) as error:
            log.info("%s/%s: %s: %s", self.namespace, self.name, action, error)
            return STALE

    async def _obey(self, action: Action) -> Outcome:
        match action:
            case actions.Apply():
                return await self._apply(action.object)
            case actions.Scale():
                meta = {"resourceVersion": action.resource_version}
                body = {"metadata": meta, "spec": {"replicas": action.replicas}}
                await self.cluster.patch(self._path("Deployment", action.workload), MERGE, body)
            case actions.Drain():
                return await self._drain(action)
            case actions.SetServing():
                await self._set_serving(action)
            case actions.ReleasePod():
                await self._release(action)
            case actions.Delete():
                await self.cluster.delete(self._path(action.kind, action.name), action.uid, action.resource_version)
            case actions.MarkRevision():
                labels = {names.LABEL_VERDICT: action.verdict.value, names.LABEL_VERDICT_REASON: action.reason or None}
                path = self._path("ControllerRevision", action.name)
                await self.cluster.patch(path, MERGE, {"metadata": {"labels": labels}})
            case actions.EnsureSecret():
                return await self._ensure_secret(action)
            case actions.SetDecodeReplicas():
                await self._set_decode_replicas(action)
            case actions.Tell():
                await self._tell(action)
            case actions.WriteStatus():
                await self._write_status(action)
            case actions.Remember():
                self.known.memory = action.memory
                return IDLE
        return DONE

    async def _apply(self, item: Mapping[str, Any]) -> Outcome:
        """What was not seen is created, never patched: so nothing can be seized that appeared meanwhile."""
        key = (item["kind"], item["metadata"]["name"])
        child = self.children.get(key)
        if item["kind"] in self.known.absent:
            return IDLE
        if child is None:
            try:
                await self.cluster.create(item)
            except Conflict:
                self.known.taken.add(key)
                raise
            except (NotFound, Forbidden) as error:
                if item["kind"] not in OPTIONAL:
                    raise
                why = "may not make any" if isinstance(error, Forbidden) else "this cluster has no"
                log.warning("%s/%s: %s %s", self.namespace, self.name, why, item["kind"])
                self.known.absent.add(item["kind"])
                return IDLE
            return DONE
        await self._own_fields(child)
        seen = {**item, "metadata": {**item["metadata"], "uid": child.uid}}
        await self.cluster.patch(self._path(*key), APPLY, seen, force="true")
        return DONE

    async def _own_fields(self, child: Child) -> None:
        """Creation leaves its fields to an Update of ours; an Apply would share them, and never remove one."""
        entries = child.object["metadata"].get("managedFields", [])
        if any(e.get("manager") == FIELD_MANAGER and e.get("operation") == "Apply" for e in entries):
            return
        told: list[Object] = [{"op": "test", "path": "/metadata/uid", "value": child.uid}]
        for index, entry in enumerate(entries):
            if entry.get("manager") == FIELD_MANAGER and "subresource" not in entry:
                told.append({"op": "test", "path": f"/metadata/managedFields/{index}/time", "value": entry.get("time")})
                told.append({"op": "replace", "path": f"/metadata/managedFields/{index}/operation", "value": "Apply"})
        if len(told) > 1:
            await self.cluster.patch(self._path(child.kind, child.name), JSON_PATCH, told)

    async def _drain(self, action: actions.Drain) -> Outcome:
        """Told by whoever leads only, as anything that cannot be taken back."""
        pod = next((pod for pod in self.observed.pods if pod.uid == action.uid), None)
        if pod is None:
            return STALE
        self.cluster.check_leading()
        await self.fleet.drain(self.known.contact, pod)
        return DONE

    async def _set_serving(self, action: actions.SetServing) -> None:
        condition = {
            "type": names.READINESS_GATE,
            "status": "True" if action.serving else "False",
            "reason": "Serving" if action.serving else "Draining",
            "lastTransitionTime": rfc3339(time.time()),
        }
        body = {"metadata": {"uid": action.uid}, "status": {"conditions": [condition]}}
        await self.cluster.patch(f"{self._path('Pod', action.pod)}/status", STRATEGIC, body)

    async def _release(self, action: actions.ReleasePod) -> None:
        reference = {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": self.uid, "controller": True}
        meta = {
            "uid": action.uid,
            "resourceVersion": action.resource_version,
            "labels": {names.LABEL_REVISION: None, names.LABEL_QUARANTINED: "true"},
            "ownerReferences": [reference],
        }
        await self.cluster.patch(self._path("Pod", action.pod), MERGE, {"metadata": meta})

    async def _ensure_secret(self, action: actions.EnsureSecret) -> Outcome:
        if action.role is None:
            data = {"key": secrets.token_hex(KEY_BYTES).encode()}
        else:
            authority = await self._authority()
            if authority is None:
                return STALE
            data = certificates.issue(authority, action.role.value, self.name, self.namespace).data()
        return await self._create_secret(action.name, data)

    async def _authority(self) -> certificates.Issued | None:
        """The CA of this ModelDeployment, made when it is first wanted. None: another look is needed."""
        name = names.authority_secret(self.name)
        there = await self.cluster.find(self._path("Secret", name))
        if there is None:
            made = certificates.new_authority(self.name, self.namespace)
            done = await self._create_secret(name, made.data())
            return None if done.stale else made
        if not any(r["uid"] == self.uid for r in there["metadata"].get("ownerReferences", [])):
            self.known.taken.add(("Secret", name))
            return None
        return certificates.Issued.read({key: base64.b64decode(value) for key, value in there["data"].items()})

    async def _create_secret(self, name: str, data: Mapping[str, bytes]) -> Outcome:
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        meta = self.owner.meta(name, names.base_labels(self.name))
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": encoded}
        await self.cluster.create(body)
        return DONE

    async def _set_decode_replicas(self, action: actions.SetDecodeReplicas) -> None:
        """A zero is left out of a Scale, so that there is nothing to test then."""
        test = [{"op": "test", "path": "/spec/replicas", "value": action.was}] if action.was else []
        change = {"op": "add", "path": "/spec/replicas", "value": action.replicas}
        await self.cluster.patch(f"{self._path(KIND, self.name)}/scale", JSON_PATCH, [*test, change])

    async def _tell(self, action: actions.Tell) -> None:
        """An Event of a name that equal news has again: telling it twice changes nothing."""
        key = hashlib.sha256(f"{self.uid} {action.id}".encode()).hexdigest()[:16]
        now = rfc3339(time.time())
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{self.name}.{key}", "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": self.name,
                "namespace": self.namespace,
                "uid": self.uid,
            },
            "reason": action.reason,
            "message": action.message[:1024],
            "type": "Warning" if action.warning else "Normal",
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self.cluster.create(body)
        except Conflict:
            return

    async def _write_status(self, action: actions.WriteStatus) -> None:
        meta = {"name": self.name, "namespace": self.namespace, "uid": self.uid}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": to_json(action.status)}
        await self.cluster.patch(f"{self._path(KIND, self.name)}/status", APPLY, body, force="true")

    def _path(self, kind: str, name: str) -> str:
        return KINDS[kind].path(self.namespace, name)
