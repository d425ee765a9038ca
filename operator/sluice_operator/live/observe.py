"""Everything that plan looks at, from live listings: an index would keep ghosts after a relist."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice_operator import names
from sluice_operator.api.spec import MetadataSpec, ModelDeploymentSpec
from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.api.value import Invalid as InvalidValue
from sluice_operator.api.value import from_json
from sluice_operator.decide.observed import Child, Memory, Node, Observed, Owner, Pod
from sluice_operator.decide.reading import owner_uid, read_child, read_pod, read_revision, read_workload
from sluice_operator.keys.keyring import Keyring, read_key
from sluice_operator.live.cluster import KINDS, Cluster, ClusterError, Forbidden, NotFound
from sluice_operator.live.fleet import Contact, Fleet, Heard
from sluice_operator.live.template_check import TemplateCheck
from sluice_operator.placement.node import read_node
from sluice_operator.render.revision import Renderer

Object = Mapping[str, Any]
log = logging.getLogger(__name__)
NODES_AGE_S = 15.0
# One may have 50 KB of labels and names of images.
NODES_A_PAGE = 100
_LISTED = (
    "Deployment",
    "ReplicaSet",
    "ControllerRevision",
    "Pod",
    "ConfigMap",
    "Service",
    "ServiceAccount",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "Role",
    "RoleBinding",
)


@dataclass
class Known:
    """Of one ModelDeployment, between its reconciles. Losing it costs requests, and caution; nothing else.

    `taken`: (kind, name) of what turned out to exist without our label. `secrets`: seen to be ours.
    `absent`: see Observed. `checked`: what dry runs have said of what they were asked. `contact`: how its pods are
    reached. `key`: the last good one that was read; a Secret that is lost or damaged gets it again, for pods keep the
    one that they began with. `refused`: see Observed. `turned_away`: what the API server did not take the last time,
    and in how many looks after each other."""

    uid: str
    memory: Memory
    keyring: Keyring
    taken: set[tuple[str, str]] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)
    absent: dict[str, str] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    contact: Contact = field(default_factory=lambda: Contact("", ""))
    key: str = field(default="", repr=False)
    refused: str = ""
    turned_away: tuple[str, int] = ("", 0)


class Observer:
    """`may_see_nodes`: whether the optional role is installed."""

    def __init__(self, cluster: Cluster, fleet: Fleet, renderer: Renderer, may_see_nodes: bool) -> None:
        self.cluster, self.fleet, self.renderer, self.may_see_nodes = cluster, fleet, renderer, may_see_nodes
        self._nodes: tuple[Node, ...] | None = None
        self._nodes_at = float("-inf")
        self._no_nodes = ""  # why they could not be listed the last time
        self._one_listing = asyncio.Lock()
        self._templates = TemplateCheck(cluster, renderer)

    async def observe(self, item: Object, spec: ModelDeploymentSpec | None, known: Known) -> Observed:
        """`item`: the ModelDeployment, live. `spec` None: it could not be read. Raises ClusterError."""
        meta = item["metadata"]
        name, namespace, uid = meta["name"], meta["namespace"], meta["uid"]
        found = await self._children(namespace, name, spec, known)
        found += await self._taken(namespace, known)
        children = tuple(read_child(child, name, uid) for child in found if child["kind"] not in ("Pod", "ReplicaSet"))
        pods, addresses = _our_pods(found, children, uid)
        strangers = await self._read_secrets(meta, known)
        key, identity = known.contact.key or await self._key(item), known.keyring.identity()
        known.key = key or known.key
        known.contact = Contact(namespace, name, addresses, key, identity)
        heard = await self.fleet.look(known.contact, pods) if key and identity is not None else Heard()
        sets = [child for child in found if child["kind"] == "ReplicaSet"]
        deployments = (c.object for c in children if c.kind == "Deployment" and c.owner is Owner.OURS)
        workloads = [read_workload(deployment, sets) for deployment in deployments]
        revisions = (c.object for c in children if c.kind == "ControllerRevision" and c.owner is Owner.OURS)
        seen = Observed(
            namespace=namespace,
            name=name,
            uid=uid,
            generation=int(meta.get("generation", 0)),
            memory=known.memory,
            status=_status(item),
            workloads=tuple(workload for workload in workloads if workload is not None),
            pods=tuple(replace(pod, load=heard.loads.get(pod.name)) for pod in pods),
            revisions=tuple(read_revision(revision) for revision in revisions),
            gateways=heard.reports,
            nodes=await self.nodes(),
            children=(*children, *strangers),
            metadata=MetadataSpec() if spec is None else spec.metadata,
            secrets=frozenset(known.secrets),
            certificates=known.keyring.seen(),
            refused=known.refused,
            absent=dict(known.absent),
        )
        if spec is None:
            return seen
        return replace(seen, **await self._templates.look(seen, spec, known.checked))

    async def nodes(self) -> tuple[Node, ...] | None:
        """At most NODES_AGE_S old: they are many, and of all deployments alike. None where they may not be seen: all
        else goes on without. Where they cannot be listed now, those that were listed last."""
        async with self._one_listing:
            if self.may_see_nodes and time.monotonic() - self._nodes_at >= NODES_AGE_S:
                try:
                    pages = self.cluster.pages("Node", "", NODES_A_PAGE)
                    self._nodes, why = tuple([read_node(node) async for page in pages for node in page]), ""
                except Forbidden as error:
                    self._nodes, why = None, f"may not be listed: {error}"
                except ClusterError as error:
                    why = f"cannot be listed: {error}"
                if why and not self._no_nodes:
                    log.warning("nodes are asked for (--nodes), and %s", why)
                self._no_nodes, self._nodes_at = why, time.monotonic()
            return self._nodes

    async def _key(self, item: Object) -> str:
        """What the pods of this ModelDeployment want to see; empty while there is none, or none of ours."""
        meta = item["metadata"]
        path = KINDS["Secret"].path(meta["namespace"], names.key_secret(meta["name"]))
        found = await self.cluster.find(path)
        if found is None or owner_uid(found) != meta["uid"]:
            return ""
        return read_key(found)

    async def _children(
        self, namespace: str, name: str, spec: ModelDeploymentSpec | None, known: Known
    ) -> list[Object]:
        label = f"{names.LABEL_DEPLOYMENT}={name}"

        async def listed(kind: str) -> list[Object]:
            # Items of a list do not say what they are.
            found = await self.cluster.items(kind, namespace, labelSelector=label)
            what = {"kind": kind, "apiVersion": KINDS[kind].api_version}
            return [{**what, **item} for item in found]

        async def tried(kind: str) -> list[Object]:
            try:
                there = await listed(kind)
            except (NotFound, Forbidden) as error:
                told = "the operator may not see any" if isinstance(error, Forbidden) else "this cluster has no"
                if kind not in known.absent:
                    log.warning("%s/%s: %s %s", namespace, name, told, kind)
                known.absent[kind] = f"{told} {kind} ({KINDS[kind].api_version})"
                return []
            known.absent.pop(kind, None)
            return there

        tasks = [listed(kind) for kind in _LISTED] + [tried(kind) for kind in _optional_kinds(spec)]
        return [item for part in await asyncio.gather(*tasks) for item in part]

    async def _taken(self, namespace: str, known: Known) -> list[Object]:
        """What has a name that we wanted, as it is now."""
        found: list[Object] = []
        for kind, name in sorted(known.taken):
            item = await self.cluster.find(KINDS[kind].path(namespace, name))
            if item is None:
                known.taken.discard((kind, name))
            else:
                found.append({"kind": kind, **item})
        return found

    async def _read_secrets(self, meta: Object, known: Known) -> list[Child]:
        """By name, for we may not list them: those that are somebody else's. Ours are in the keyring then."""
        strangers: list[Child] = []
        for name in names.secrets(meta["name"]):
            if name in known.secrets:
                continue
            item = await self.cluster.find(KINDS["Secret"].path(meta["namespace"], name))
            if item is None:
                known.keyring.forget(name)
                continue
            child = read_child({"kind": "Secret"} | item, meta["name"], meta["uid"])
            if child.owner is Owner.OURS:
                known.keyring.read(item)
                if name == names.key_secret(meta["name"]) and not read_key(item):
                    log.warning(
                        "%s/%s: Secret %s holds no key: it is written anew", meta["namespace"], meta["name"], name
                    )
                else:
                    known.secrets.add(name)
            else:
                known.keyring.forget(name)
                strangers.append(replace(child, object={}))
        return strangers


def _optional_kinds(spec: ModelDeploymentSpec | None) -> Iterable[str]:
    """There only in some clusters; asked for when the spec needs them."""
    if spec is not None and spec.monitoring.pod_monitor:
        yield "PodMonitor"
    if spec is not None and spec.accelerator.gpu is not None:
        yield "ResourceClaimTemplate"


def _our_pods(found: list[Object], children: Iterable[Child], uid: str) -> tuple[tuple[Pod, ...], dict[str, str]]:
    """Pods of our Deployments and those we have released, and where they are. A deleted namesake's are not ours."""
    deployments = {c.uid for c in children if c.kind == "Deployment" and c.owner is Owner.OURS}
    sets = {
        item["metadata"]["uid"] for item in found if item["kind"] == "ReplicaSet" and owner_uid(item) in deployments
    }
    ours = [item for item in found if item["kind"] == "Pod" and owner_uid(item) in sets | {uid}]
    pods = tuple(pod for item in ours if (pod := read_pod(item)) is not None)
    told = {item["metadata"]["name"]: item.get("status", {}).get("podIP", "") for item in ours}
    return pods, {name: address for name, address in told.items() if address}


def _status(item: Object) -> ModelDeploymentStatus:
    """What we wrote last. Somebody may have written nonsense over it: then nothing is known."""
    try:
        return from_json(ModelDeploymentStatus, item.get("status", {}), "status", is_newer=True)
    except InvalidValue:
        return ModelDeploymentStatus()
