"""Actions, carried out. Nothing is written over that is not ours; what changed meanwhile is left to the next plan."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator import names
from sluice_operator.api.crd import API_VERSION, KIND
from sluice_operator.api.value import to_json
from sluice_operator.decide import actions
from sluice_operator.decide.actions import Action
from sluice_operator.decide.diff import additions
from sluice_operator.decide.moments import rfc3339
from sluice_operator.decide.observed import Child, Observed
from sluice_operator.keys import certificates, keyring
from sluice_operator.keys.certificates import AUTHORITIES, Authorities, NotOurs
from sluice_operator.keys.rotation import BeginRotation, FinishRotation, IssueLeaf, MakeAuthority, SetTrust, Step
from sluice_operator.live.cluster import (
    APPLY,
    JSON_PATCH,
    KINDS,
    MERGE,
    STRATEGIC,
    Cluster,
    ClusterError,
    Conflict,
    Invalid,
    NotFound,
)
from sluice_operator.live.fleet import Fleet
from sluice_operator.live.observe import Known
from sluice_operator.names import FIELD_MANAGER
from sluice_operator.render.children import OwnerRef

Object = dict[str, Any]
KEY_BYTES = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`stale`: what says that something was not as it had been seen, so that plan has to look again. `idle`: nothing
    changed."""

    stale: ClusterError | None = None
    idle: bool = False


DONE, IDLE = Outcome(), Outcome(idle=True)
STALE = Outcome(stale=ClusterError("it is not as it was seen"))


class Applier:
    """For one ModelDeployment and one look at it."""

    def __init__(self, cluster: Cluster, fleet: Fleet, observed: Observed, known: Known) -> None:
        self.cluster, self.fleet, self.observed, self.known = cluster, fleet, observed, known
        self.namespace, self.name, self.uid = observed.namespace, observed.name, observed.uid
        self.owner = OwnerRef(self.namespace, self.name, self.uid, observed.metadata)
        self.children = {(child.kind, child.name): child for child in observed.children}

    async def obey(self, action: Action) -> Outcome:
        """Raises ClusterError for what the next attempt may cure."""
        level = logging.DEBUG if isinstance(action, actions.Remember) else logging.INFO
        log.log(level, "%s/%s: %s", self.namespace, self.name, action)
        try:
            return await self._obey(action)
        except (Conflict, NotFound) as error:
            log.info("%s/%s: %s: %s", self.namespace, self.name, action, error)
            return Outcome(stale=error)

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
                annotations = {names.ANNOTATION_VERDICT_DETAIL: action.detail or None}
                await self.cluster.patch(path, MERGE, {"metadata": {"labels": labels, "annotations": annotations}})
            case actions.Hold():
                meta = {"resourceVersion": action.resource_version}
                body = {"metadata": meta, "spec": {"paused": True}}
                await self.cluster.patch(self._path("Deployment", action.workload), MERGE, body)
            case actions.Adopt():
                meta = {"uid": action.uid, "resourceVersion": action.resource_version}
                body = {"metadata": {**meta, "ownerReferences": [self.owner.reference]}}
                await self.cluster.patch(self._path(action.kind, action.name), MERGE, body)
            case actions.PutBack():
                patch = [
                    {"op": "test", "path": "/metadata/resourceVersion", "value": action.resource_version},
                    {"op": "replace", "path": "/spec/template", "value": dict(action.template)},
                ]
                await self.cluster.patch(self._path("Deployment", action.workload), JSON_PATCH, patch)
            case actions.Label():
                body = {"metadata": {**action.change, "uid": action.uid}}
                await self.cluster.patch(self._path(action.kind, action.name), MERGE, body)
            case actions.EnsureSecret():
                return await self._ensure_secret(action)
            case actions.Certify():
                return await self._certify(action)
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
            return DONE
        await self._own_fields(child)
        if added := additions(child.object, item):
            told = {**added, "metadata": {**added.get("metadata", {}), "uid": child.uid}}
            await self.cluster.patch(self._path(*key), MERGE, told)
        seen = {**item, "metadata": {**item["metadata"], "uid": child.uid}}
        now = await self.cluster.patch(self._path(*key), APPLY, seen, force="true")
        # Where a webhook has the last word, or the API server another spelling, it would be sent at once, for ever.
        return IDLE if now["metadata"]["resourceVersion"] == child.resource_version else DONE

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
        key = self.known.key or secrets.token_hex(KEY_BYTES)
        return await self._write_secret(action.name, {"key": key.encode()}, self.keyring.versions.get(action.name, ""))

    async def _certify(self, action: actions.Certify) -> Outcome:
        try:
            return await self._carry_out(action.step)
        except (Invalid, NotOurs) as error:  # somebody made it immutable, or changed it this moment
            log.warning("%s/%s: %s: %s", self.namespace, self.name, action, error)
            return IDLE

    async def _carry_out(self, step: Step) -> Outcome:
        """Raises NotOurs for what has changed since it was read."""
        match step:
            case MakeAuthority():
                made = certificates.new_authority(self.name, self.namespace, step.not_after)
                return await self._write_authorities(Authorities(made), self.keyring.versions.get(self._authority, ""))
            case BeginRotation():
                there, version = await self._authorities()
                if there.current.id != step.current or there.next is not None:
                    return STALE
                fresh = certificates.new_authority(self.name, self.namespace, step.not_after)
                return await self._write_authorities(Authorities(there.current, fresh), version)
            case FinishRotation():
                there, version = await self._authorities()
                if there.next is None or (there.current.id, there.next.id) != (step.current, step.next):
                    return STALE
                return await self._write_authorities(Authorities(there.next), version)
            case IssueLeaf():
                return await self._issue(step)
            case SetTrust():
                name = names.certificate_secret(self.name, step.role)
                item = await self.cluster.get(self._path("Secret", name))
                data = keyring.decode(item) | {AUTHORITIES: b"".join(self.keyring.bundle(step.trusted))}
                return await self._write_secret(name, data, self.keyring.versions.get(name, ""))

    async def _issue(self, step: IssueLeaf) -> Outcome:
        there, _ = await self._authorities()
        signer = there.by_id(step.signer)
        if signer is None:
            return STALE
        known = {a.id: a.certificate for a in (there.current, there.next) if a is not None}
        bundle = [known.get(id_) or self.keyring.bundle(frozenset({id_}))[0] for id_ in sorted(step.trusted)]
        issued = certificates.issue(signer, bundle, step.role.value, self.name, self.namespace, step.not_after)
        name = names.certificate_secret(self.name, step.role)
        return await self._write_secret(name, issued.data(), self.keyring.versions.get(name, ""))

    @property
    def keyring(self) -> keyring.Keyring:
        return self.known.keyring

    @property
    def _authority(self) -> str:
        return names.authority_secret(self.name)

    async def _authorities(self) -> tuple[Authorities, str]:
        """With the resourceVersion. Raises NotFound, NotOurs."""
        item = await self.cluster.get(self._path("Secret", self._authority))
        return certificates.read_authorities(keyring.decode(item)), item["metadata"]["resourceVersion"]

    async def _write_authorities(self, told: Authorities, version: str) -> Outcome:
        return await self._write_secret(self._authority, told.data(), version)

    async def _write_secret(self, name: str, data: Mapping[str, bytes], version: str) -> Outcome:
        """`version`: as it was read; empty: there was none. Raises Conflict when it is another one now."""
        meta = self.owner.meta(name, names.base_labels(self.name))
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": keyring.encode(data)}
        self.known.secrets.discard(name)
        if not version:
            await self.cluster.create(body)
        else:
            await self.cluster.replace({**body, "metadata": {**meta, "resourceVersion": version}})
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
