"""What the operator has seen: frozen values, all times in seconds since the epoch, all sizes in what their names say.

Made by observe, from live listings; read by everything pure. `None` means not known, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from sluice_operator.api.spec import MetadataSpec
from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.api.value import Problem
from sluice_operator.keys.rotation import SeenCertificates
from sluice_operator.names import PodRole, Verdict

GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Load:
    """Of one engine, from Engine/Load or a gateway's Fleet/Report.

    `waiting`: admitted and reserved, not yet running: waits for prefill. `running_pages`, `reserved_pages`: cache pages
    of running and of waiting sequences. `inter_token_p95_ms`: as a gateway saw it; 0 while nothing runs, and from
    Engine/Load. `incarnation`: of the engine's present life.
    """

    running: int = 0
    waiting: int = 0
    running_pages: int = 0
    reserved_pages: int = 0
    total_pages: int = 0
    inter_token_p95_ms: float = 0.0
    draining: bool = False
    empty: bool = True
    quarantined: bool = False
    incarnation: str = ""

    @property
    def remaining(self) -> int:
        """Work that a drain would have to wait for."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Termination:
    """A container that ended. `restart`: how many did before it."""

    restart: int
    exit_code: int
    reason: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Pod:
    """`ready`: the Ready condition, readiness gate included; `ready_changed_at`: its last transition.

    `serving`: the gate's condition, None while nobody has written it; `serving_changed_at`: its last transition.
    `node`: empty while not scheduled; `scheduled_at`: since when it has one. `unschedulable`: the scheduler's own
    message while it has none, empty if it said nothing.
    `started`: the main container runs and its startup probe has passed, so it may have work.
    `initialized_at`: since when the main container may run, which is not before init containers are done;
    `init_container`: the one that is not done yet, if any. `sidecar`: else one beside the main container that keeps the
    pod from being ready, if any. Of the one or the other, or else of the main container: `runs`;
    `starting_at`: since when it runs or its turn has come; `waiting_reason`: why it does not run (CrashLoopBackOff,
    ErrImagePull, ...); `restarts`; `last_life_s`: how long it ran the last time it ended, None if it never did.
    `gone_by`: when the grace of one that was deleted is over, 0 for others. `terminations`: of the main container;
    `helper_terminations`: of `init_container` or `sidecar`. `ended_by_node`: why its node has ended it for good, or has
    not taken it (Evicted, OutOfcpu, ...), in its words; such a pod is `terminating` too.
    `load`: what the engine answered the operator; None: no answer.
    """

    name: str
    uid: str
    role: PodRole
    revision: str
    created_at: float
    resource_version: str = ""
    ready: bool = False
    ready_changed_at: float = 0.0
    started: bool = False
    serving: bool | None = None
    serving_changed_at: float = 0.0
    node: str = ""
    scheduled_at: float = 0.0
    initialized_at: float = 0.0
    starting_at: float = 0.0
    init_container: str = ""
    sidecar: str = ""
    runs: bool = False
    unschedulable: str = ""
    waiting_reason: str = ""
    waiting_message: str = ""
    restarts: int = 0
    last_life_s: float | None = None
    terminating: bool = False
    gone_by: float = 0.0
    quarantined: bool = False
    load: Load | None = None
    terminations: tuple[Termination, ...] = ()
    helper_terminations: tuple[Termination, ...] = ()
    ended_by_node: str = ""

    @property
    def is_member(self) -> bool:
        """Counted by its ReplicaSet."""
        return not self.terminating and not self.quarantined

    @property
    def is_leaving(self) -> bool:
        """A drain of it has begun."""
        return self.serving is False or (self.load is not None and self.load.draining)

    @property
    def serves(self) -> bool:
        """Ready and in no drain, whether anybody routes to it or not."""
        return self.is_member and self.ready and not self.is_leaving


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment of ours. `replicas`: what its spec says. `refused`: why its ReplicaSet can make no pod, in the words
    of whoever refuses; empty if it can. `paused`: its controller replaces no pods."""

    name: str
    role: PodRole
    revision: str
    replicas: int
    uid: str = ""
    resource_version: str = ""
    refused: str = ""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Revision:
    """A ControllerRevision. `data`: rendered objects by key, see render/revision.py. `number`: order of creation.
    `verdict_detail`: the pod that failed and its last words; empty if they are lost."""

    name: str
    hash: str
    number: int
    data: Mapping[str, Any]
    verdict: Verdict = Verdict.UNKNOWN
    verdict_reason: str = ""
    uid: str = ""
    resource_version: str = ""
    verdict_detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine as a gateway knows it. `routed`: it gets new work from that one."""

    pod: str
    role: PodRole
    fingerprint: str
    load: Load
    routed: bool = True


@dataclass(frozen=True)
class GatewayReport:
    """Fleet/Report of one ready gateway. `prefill_queued`: requests for which decode has room and prefill has not;
    `queued`: all others that have no place to go to. Ages are of the oldest one; 0: none waits. `troubles`: why it does
    not route to an engine that it knows, by pod."""

    pod: str
    at: float
    queued: int = 0
    queue_age_ms: float = 0.0
    engines: tuple[EngineReport, ...] = ()
    prefill_queued: int = 0
    prefill_queue_age_ms: float = 0.0
    troubles: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def routed(self) -> frozenset[str]:
        return frozenset(engine.pod for engine in self.engines if engine.routed)


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Node:
    """`gpus`: allocatable nvidia.com/gpu; `free_gpus`: less what pods asked for; None: not known.
    `others`: allocatable GPUs under other names (nvidia.com/mig-3g.40gb, nvidia.com/gpu.shared)."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    ready: bool = True
    cordoned: bool = False
    gpus: int = 0
    free_gpus: int | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    def offers(self, resource: str) -> int:
        return self.gpus if resource == GPU_RESOURCE else self.others.get(resource, 0)


class Owner(StrEnum):
    """Whose an object is: ours, a deleted ModelDeployment's of the same name, ours by its label though it has no owner
    (as after a restore), or something else's."""

    OURS = "ours"
    ORPHAN = "orphan"
    NAMESAKE = "namesake"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class Child:
    """Any object that is ours or has a name that we want: Deployments, ConfigMaps and ControllerRevisions too."""

    kind: str
    name: str
    uid: str
    resource_version: str
    owner: Owner
    object: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """Decode replicas that were wanted at a time."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Kept by the running operator only; a new one starts with `since` = now and nothing else, which is cautious.

    `wishes`: of the autoscaler, newest last. `changes`: what it wrote, newest last. `gave_back_at`: when pods that
    stayed Pending were given back. `load_written_at`: when status was last written for load alone. `failing_since`:
    when a pod's image or configuration was first seen to fail, by uid, of those for which it still does.
    `unrouted_since`: when a ready engine was first seen that a gateway does not route to, by uid, likewise.
    """

    since: float
    wishes: tuple[Wish, ...] = ()
    changes: tuple[Wish, ...] = ()
    gave_back_at: float | None = None
    load_written_at: float | None = None
    failing_since: Mapping[str, float] = field(default_factory=dict)
    unrouted_since: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """`nodes` None: no right to see them. `secrets`: names of those that exist and are
    ours. `certificates`: what they hold. `dry_run`: what a server-side dry run
    of the children said against the template, None if nothing. `warning`: fields of templates that were accepted
    before although this cluster does not have them. `refused`: what the API server did not take the last
    time, and its words. `absent`: kinds that the spec needs and that cannot be had here, with the reason.
    `metadata`: that of the spec, for Secrets."""

    namespace: str
    name: str
    uid: str
    generation: int
    memory: Memory
    status: ModelDeploymentStatus = field(default_factory=ModelDeploymentStatus)
    workloads: tuple[Workload, ...] = ()
    pods: tuple[Pod, ...] = ()
    revisions: tuple[Revision, ...] = ()
    gateways: tuple[GatewayReport, ...] = ()
    nodes: tuple[Node, ...] | None = None
    children: tuple[Child, ...] = ()
    secrets: frozenset[str] = frozenset()
    certificates: SeenCertificates = field(default_factory=SeenCertificates)
    dry_run: Problem | None = None
    warning: str = ""
    refused: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    metadata: MetadataSpec = field(default_factory=MetadataSpec)

    @cached_property
    def ready_gateways(self) -> frozenset[str]:
        return frozenset(pod.name for pod in self.pods if pod.role is PodRole.GATEWAY and pod.ready and pod.is_member)

    @cached_property
    def routed(self) -> frozenset[str] | None:
        """Engines that every ready gateway routes to; None when one of them has not reported, or none is ready."""
        reports = {report.pod: report for report in self.gateways if report.pod in self.ready_gateways}
        if not reports or reports.keys() != self.ready_gateways:
            return None
        return frozenset.intersection(*(report.routed for report in reports.values()))

    def why_unrouted(self, pod: Pod) -> str:
        """Of a ready gateway that does not route to it; empty where all do, or where one has not reported."""
        if self.routed is None or pod.name in self.routed:
            return ""
        silent = (r for r in self.gateways if r.pod in self.ready_gateways and pod.name not in r.routed)
        told = min(silent, key=lambda report: report.pod)
        return f"gateway {told.pod} {told.troubles.get(pod.name) or 'does not know it'}"

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """Pod -> what its engine says it is."""
        return {engine.pod: engine.fingerprint for report in self.gateways for engine in report.engines}

    def is_useful(self, pod: Pod) -> bool:
        """Takes requests: ready, in no drain, and known to every ready gateway (if anybody knows)."""
        routed = self.routed
        return pod.serves and (routed is None or pod.name in routed)

    def members(self, role: PodRole, revision: str | None = None) -> tuple[Pod, ...]:
        return tuple(
            pod
            for pod in self.pods
            if pod.role is role and pod.is_member and (revision is None or pod.revision == revision)
        )
