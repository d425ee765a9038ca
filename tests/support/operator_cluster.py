"""A cluster in memory under virtual time: Deployments, ReplicaSets, kubelets, engines and gateways as far as the
operator sees them. It obeys actions as apply would, and objects when one breaks an invariant."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

from certificate_secrets import FactSecrets

from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.decide import groups
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import (
    Adopt,
    Apply,
    Certify,
    Delete,
    Drain,
    EnsureSecret,
    Hold,
    Label,
    MarkRevision,
    PutBack,
    ReleasePod,
    Remember,
    Scale,
    SetDecodeReplicas,
    SetServing,
    Tell,
    WriteStatus,
)
from sluice_operator.decide.observed import (
    Child,
    EngineReport,
    GatewayReport,
    Load,
    Memory,
    Observed,
    Owner,
    Pod,
    Revision,
    Termination,
    Workload,
)
from sluice_operator.decide.plan import first_memory, plan
from sluice_operator.names import (
    ANNOTATION_VERDICT_DETAIL,
    ENGINE_ROLES,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_VERDICT,
    LABEL_VERDICT_REASON,
    PodRole,
    Verdict,
)
from sluice_operator.render.revision import StandardRenderer

TICK_S = 5.0
TERMINATING_S = 5.0
PAGES = 1000


def manifest(**changes):
    """A spec that is accepted; `changes` replace whole members of it."""
    return {
        "model": {"uri": "pvc://models/tiny"},
        "image": {"repository": "registry.local/sluice-engine", "tag": "1"},
        "accelerator": {"type": "CPU"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
        "drain": {"timeoutSeconds": 30},
        "probes": {"startupMaxSeconds": 120},
    } | changes


@dataclass
class SimPod:
    name: str
    role: PodRole
    revision: str
    created: float
    node: str = ""
    scheduled: float = 0.0
    unschedulable: str = ""
    started: bool = False
    gate: bool | None = None
    gate_at: float = 0.0
    ready: bool = False
    ready_at: float = 0.0
    draining: bool = False
    wedged: bool = False
    flapping: bool = False
    quarantined: bool = False
    running: int = 0
    waiting: int = 0
    pages: int = 0
    gone_at: float | None = None
    drained_since: float | None = None
    waiting_reason: str = ""
    restarts: int = 0
    terminations: tuple[Termination, ...] = ()
    bad: bool = False
    sidecar: str = ""


@dataclass
class SimDeployment:
    name: str
    role: PodRole
    revision: str
    replicas: int
    version: int = 0
    paused: bool = False
    template: dict = field(default_factory=dict)
    selector: dict = field(default_factory=dict)
    meta: dict = field(default_factory=dict)
    rolled: dict | None = None  # the template of its ReplicaSet, once there is one

    def object(self):
        """As the API server has it."""
        revision = {"deployment.kubernetes.io/revision": "1"} if self.rolled is not None else {}
        annotations = {**self.meta.get("annotations", {}), **revision}
        rest = {"revisionHistoryLimit": 0, "strategy": {"type": "Recreate"}, "selector": self.selector}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self.meta | {"generation": self.version, "annotations": annotations},
            "spec": rest | {"replicas": self.replicas, "paused": self.paused, "template": self.template},
            "status": {"observedGeneration": self.version},
        }


@dataclass
class Cluster:
    """`room`: engine pods that find a node. `bad`: image tags whose pods crash; `bad_sidecar`: those with a sidecar
    whose image cannot be had; `unplaceable`: those that no node takes. `start_s`: time to load."""

    spec: dict
    room: int = 1000
    start_s: float = 20.0
    bad: set = field(default_factory=set)
    bad_sidecar: set = field(default_factory=set)
    unplaceable: set = field(default_factory=set)
    renderer: object = field(default_factory=lambda: StandardRenderer("control:1"))
    now: float = 1_000_000.0

    def __post_init__(self):
        self.name, self.uid, self.generation = "m", "uid-1", 1
        self.status, self.memory = ModelDeploymentStatus(), first_memory(self.now)
        self.pods: dict[str, SimPod] = {}
        self.deployments: dict[str, SimDeployment] = {}
        self.revisions: dict[str, dict] = {}
        self.objects: dict[tuple[str, str], dict] = {}
        self.owners: dict[tuple[str, str], Owner] = {}
        self.secrets: set[str] = set()
        self.certificates = FactSecrets()
        self.events: dict[str, Tell] = {}
        self.log: list[str] = []
        self.broken: list[str] = []
        self.lost: set[str] = set()
        self.routing, self.new_gateways_fail = True, False
        self.unknown: set[str] = set()  # engines of which gateways have not heard
        self.queue_age_ms, self.queued = 0.0, 0
        self.pages: int | None = None  # wanted of decode, by all sequences
        self.work = {PodRole.PREFILL: 2, PodRole.DECODE: 3}
        self.status_writes = 0
        self.quota_is_full = False
        self._numbers = itertools.count()
        self._parsed = None

    def owner(self, kind, name):
        return self.owners.get((kind, name), Owner.OURS)

    # -- what the operator sees -----------------------------------------------------------------------------------

    def observe(self) -> Observed:
        pods = tuple(self._pod(p) for p in sorted(self.pods.values(), key=lambda p: p.name))
        return Observed(
            "ns",
            self.name,
            self.uid,
            self.generation,
            self.memory,
            status=self.status,
            workloads=tuple(
                Workload(d.name, d.role, d.revision, d.replicas, d.name, str(d.version), paused=d.paused)
                for d in self.deployments.values()
                if self.owner("Deployment", d.name) is Owner.OURS
            ),
            pods=pods,
            revisions=tuple(
                Revision(
                    n,
                    o["metadata"]["labels"][LABEL_REVISION],
                    o["revision"],
                    o["data"],
                    Verdict(o["metadata"]["labels"].get(LABEL_VERDICT, Verdict.UNKNOWN)),
                    o["metadata"]["labels"].get(LABEL_VERDICT_REASON, ""),
                    n,
                    verdict_detail=o["metadata"].get("annotations", {}).get(ANNOTATION_VERDICT_DETAIL, ""),
                )
                for n, o in self.revisions.items()
                if self.owner("ControllerRevision", n) is Owner.OURS
            ),
            gateways=self.reports(),
            children=tuple(
                Child(kind, n, f"{kind}-{n}", "1", self.owner(kind, n), o) for (kind, n), o in self.objects.items()
            )
            + tuple(
                Child("Deployment", d.name, d.name, str(d.version), self.owner("Deployment", d.name), d.object())
                for d in self.deployments.values()
                if d.role in ENGINE_ROLES
            )
            + tuple(
                Child("ControllerRevision", n, n, "1", self.owner("ControllerRevision", n), o)
                for n, o in self.revisions.items()
            ),
            secrets=frozenset(self.secrets),
            certificates=self.certificates.seen,
        )

    def _pod(self, p: SimPod) -> Pod:
        # Nobody knows its address at once.
        answers = p.started and p.role in ENGINE_ROLES and (not p.ready or self.now - p.ready_at >= TICK_S)
        return Pod(
            p.name,
            p.name,
            p.role,
            p.revision,
            p.created,
            "1",
            ready=p.ready,
            ready_changed_at=p.ready_at,
            started=p.started,
            serving=p.gate,
            serving_changed_at=p.gate_at,
            node=p.node,
            scheduled_at=p.scheduled,
            unschedulable=p.unschedulable,
            waiting_reason=p.waiting_reason,
            restarts=p.restarts,
            terminating=p.gone_at is not None,
            gone_by=p.gone_at + TERMINATING_S if p.gone_at is not None else 0.0,
            quarantined=p.quarantined,
            load=self.load(p) if answers else None,
            terminations=p.terminations,
            sidecar=p.sidecar,
            runs=p.started and not p.sidecar,
        )

    def load(self, p: SimPod) -> Load:
        empty = p.running + p.waiting == 0
        return Load(p.running, p.waiting, p.pages, 0, PAGES, 20.0, p.draining, empty, p.wedged)

    def reports(self):
        if not self.routing:
            return ()
        engines = tuple(
            EngineReport(p.name, p.role, p.revision, self.load(p))
            for p in self.pods.values()
            if p.role in ENGINE_ROLES
            and p.started
            and p.gone_at is None
            and p.name not in self.unknown
            and p.ready
            and self.now - p.ready_at >= TICK_S
        )
        return tuple(
            GatewayReport(p.name, self.now, self.queued, self.queue_age_ms, engines)
            for p in self.pods.values()
            if p.role is PodRole.GATEWAY and p.ready and p.gone_at is None
        )

    # -- what the operator does -----------------------------------------------------------------------------------

    def plan(self):
        return plan(self.parsed(), self.observe(), self.now, self.renderer)

    def parsed(self):
        if self._parsed is None or self._parsed[0] is not self.spec:
            self._parsed = self.spec, parse(self.name, self.spec)
        return self._parsed[1]

    def obey(self, action) -> None:
        if not isinstance(action, Remember | WriteStatus):
            self.log.append(str(action))
        match action:
            case Apply(item):
                self._apply(copy.deepcopy(dict(item)))
            case Scale():
                deployment = self.deployments[action.workload]
                if action.resource_version == str(deployment.version):
                    self._check_scale(deployment, action.replicas)
                    deployment.replicas = action.replicas
                    deployment.version += 1
            case Drain(pod):
                if self.pods[pod].started:
                    self.pods[pod].draining = True
                    # Its readiness probe fails only at the next look.
                    self.pods[pod].drained_since = self.now
            case SetServing(pod, _, serving):
                self.pods[pod].gate, self.pods[pod].gate_at = serving, self.now
                self._settle(self.pods[pod])
            case ReleasePod(pod):
                self.pods[pod].quarantined = True
            case Delete("Pod", name):
                self._kill(self.pods[name], "deleted")
            case Delete("Deployment", name):
                assert self.deployments.pop(name).replicas == 0
            case Delete("ControllerRevision", name):
                del self.revisions[name]
            case Delete(kind, name):
                del self.objects[kind, name]
            case MarkRevision(name, verdict, reason, detail):
                labels = self.revisions[name]["metadata"]["labels"]
                labels[LABEL_VERDICT], labels[LABEL_VERDICT_REASON] = verdict.value, reason
                self.revisions[name]["metadata"]["annotations"] = {ANNOTATION_VERDICT_DETAIL: detail}
            case Label(kind, name, _, change):
                self._label(kind, name, change)
            case Hold(name, version):
                if version == str(self.deployments[name].version):
                    self.deployments[name].paused = True
                    self.deployments[name].version += 1
            case PutBack(name, version, template):
                if version == str(self.deployments[name].version):
                    self.deployments[name].template = copy.deepcopy(dict(template))
                    self.deployments[name].version += 1
            case Adopt(kind, name):
                self.owners[kind, name] = Owner.OURS
            case EnsureSecret(name):
                self.secrets.add(name)
            case Certify(step):
                self.certificates.obey(step)
            case SetDecodeReplicas(replicas):
                self.change(decode=self.spec["decode"] | {"replicas": replicas})
            case Tell():
                self.events[action.id] = action
            case WriteStatus(status):
                self.status = status
                self.status_writes += 1
            case Remember(memory):
                self.memory = memory

    def forget(self) -> None:
        """The operator was killed, and somebody wiped what it had written."""
        self.status, self.memory = ModelDeploymentStatus(), Memory(self.now)

    def _label(self, kind: str, name: str, change: dict) -> None:
        stored = {"ControllerRevision": self.revisions}.get(kind, {}).get(name) or self.objects.get((kind, name), {})
        meta = self.deployments[name].meta if kind == "Deployment" else stored["metadata"]
        for part, values in change.items():
            there = meta.setdefault(part, {})
            there.update(values)
            meta[part] = {key: value for key, value in there.items() if value is not None}

    def _apply(self, item: dict) -> None:
        kind, name = item["kind"], item["metadata"]["name"]
        assert self.owners.get((kind, name), Owner.OURS) is Owner.OURS, f"seized {kind} {name}"
        if kind == "Deployment":
            labels = item["metadata"]["labels"]
            old = self.deployments.get(name)
            version = old.version + 1 if old else 0
            role, revision = PodRole(labels[LABEL_ROLE]), labels[LABEL_REVISION]
            self.deployments[name] = SimDeployment(
                name,
                role,
                revision,
                item["spec"]["replicas"],
                version,
                template=item["spec"]["template"],
                selector=item["spec"]["selector"],
                meta=item["metadata"],
            )
        elif kind == "ControllerRevision":
            self.revisions[name] = item
        else:
            self.objects[kind, name] = item

    # -- invariants -----------------------------------------------------------------------------------------------

    def capacity(self, wanted=None):
        """(what serves, what must, of how many); nothing must while the spec is not accepted."""
        spec = self.parsed()
        if isinstance(spec, tuple):
            return 0, 0, None
        wanted = wanted or {PodRole.PREFILL: spec.prefill.replicas, PodRole.DECODE: spec.decode.replicas}
        seen = self.observe()
        counted = [
            groups.Group(role, revision, revision, n, n)
            for role in ENGINE_ROLES
            for revision in {p.revision for p in seen.pods}
            for n in [sum(seen.is_useful(p) for p in seen.members(role, revision))]
        ]
        return groups.capacity(counted, wanted), groups.allowed(wanted, spec.rollout.max_unavailable), wanted

    def _check_scale(self, deployment: SimDeployment, replicas: int) -> None:
        if deployment.role not in ENGINE_ROLES or replicas <= deployment.replicas:
            return
        spec = self.parsed()
        wanted = (spec.prefill if deployment.role is PodRole.PREFILL else spec.decode).replicas
        others = [
            d for d in self.deployments.values() if d.role is deployment.role and d is not deployment and d.replicas
        ]
        older = {d.revision for d in self.deployments.values() if d.replicas} - {deployment.revision}
        most = wanted + spec.rollout.max_surge + max(len(older) - 1, 0)
        if replicas > wanted or replicas + sum(d.replicas for d in others) > max(most, wanted):
            self.broken.append(f"surge: {deployment.name} to {replicas}, others {[d.replicas for d in others]}")

    def _kill(self, pod: SimPod, why: str) -> None:
        """By a controller or the operator: work that had no drain must not die."""
        timeout = self.spec["drain"]["timeoutSeconds"]
        drained = pod.drained_since is not None and (pod.running == 0 or self.now - pod.gate_at >= timeout)
        if pod.role in ENGINE_ROLES and pod.started and pod.running and not drained and not pod.wedged:
            self.broken.append(f"no drain: {pod.name} {why} with {pod.running} running")
        pod.gone_at = self.now
        pod.ready = False

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, seconds: float = TICK_S) -> None:
        self.now += seconds
        for deployment in list(self.deployments.values()):
            self._replicate(deployment)
        for pod in list(self.pods.values()):
            if pod.gone_at is not None and self.now - pod.gone_at >= TERMINATING_S:
                del self.pods[pod.name]
            elif pod.gone_at is None:
                self._live(pod)
        if self.pages is not None:
            self._spread()

    def _spread(self) -> None:
        """Load over the ready decode engines."""
        ready = [p for p in self.pods.values() if p.role is PodRole.DECODE and p.ready]
        for pod in ready:
            pod.pages = min(PAGES, (self.pages or 0) // len(ready))

    def edit(self, deployment: SimDeployment) -> None:
        """As `kubectl rollout restart` does, which refuses a paused Deployment, or another tool, which does not."""
        template = copy.deepcopy(deployment.template)
        annotations = template.setdefault("metadata", {}).setdefault("annotations", {})
        annotations["kubectl.kubernetes.io/restartedAt"] = str(self.now)
        deployment.template = template
        deployment.version += 1

    def _roll_engines(self, deployment: SimDeployment) -> None:
        """Strategy Recreate: of another template all pods end at once."""
        if deployment.paused or deployment.rolled == deployment.template:
            return
        if deployment.rolled is not None:
            for pod in self.pods.values():
                if pod.role is deployment.role and pod.revision == deployment.revision and pod.gone_at is None:
                    self._kill(pod, "by its Deployment")
        deployment.rolled = deployment.template

    def _replicate(self, deployment: SimDeployment) -> None:
        if deployment.role in ENGINE_ROLES:
            self._roll_engines(deployment)
            if deployment.rolled is None:  # it was paused before it had a ReplicaSet
                return
        mine = [
            p
            for p in self.pods.values()
            if p.role is deployment.role
            and (p.role is PodRole.GATEWAY or p.revision == deployment.revision)
            and p.gone_at is None
            and not p.quarantined
        ]
        old = [p for p in mine if p.revision != deployment.revision]
        if old:
            self._roll(deployment, mine, old)
            return
        for _ in range(0 if self.quota_is_full else deployment.replicas - len(mine)):
            self._make(deployment)
        # As a ReplicaSet chooses: without a node first, then not started, then not ready, then the youngest.
        victims = sorted(mine, key=lambda p: (bool(p.node), p.started, p.ready, -p.ready_at, p.name))
        for pod in victims[: max(len(mine) - deployment.replicas, 0)]:
            self._kill(pod, "by its ReplicaSet")

    def _roll(self, deployment: SimDeployment, mine: list[SimPod], old: list[SimPod]) -> None:
        """One more at a time, and an old one goes once that is ready."""
        if len(mine) <= deployment.replicas:
            self._make(deployment)
        elif sum(p.ready for p in mine) > deployment.replicas:
            self._kill(min(old, key=lambda p: p.name), "by its Deployment")

    def _make(self, deployment: SimDeployment) -> None:
        name = f"{deployment.name}-{next(self._numbers):03d}"
        bad = deployment.role is PodRole.GATEWAY and self.new_gateways_fail
        self.pods[name] = SimPod(name, deployment.role, deployment.revision, self.now, bad=bad)

    def _live(self, pod: SimPod) -> None:
        if not pod.node:
            used = sum(bool(p.node) and p.role in ENGINE_ROLES for p in self.pods.values())
            if pod.role is PodRole.GATEWAY or (used < self.room and not self._is_of(pod, self.unplaceable)):
                pod.node, pod.unschedulable, pod.scheduled = "node-1", "", self.now
            else:
                pod.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        elif self._is_bad(pod):
            pod.restarts += 1
            pod.waiting_reason = "CrashLoopBackOff"
            pod.terminations = (Termination(pod.restarts, 1, "Error", "bad weights", self.now),)
        elif not pod.started and self.now - pod.scheduled >= self.start_s:
            pod.started = True
        if self._is_of(pod, self.bad_sidecar):
            pod.sidecar, pod.waiting_reason = "proxy", "ImagePullBackOff"
        self._settle(pod)
        if pod.draining:
            pod.running, pod.waiting = max(0, pod.running - 1), 0
        elif pod.ready and pod.role in ENGINE_ROLES:
            pod.running = self.work[pod.role]

    def _is_bad(self, pod: SimPod) -> bool:
        return pod.bad or self._is_of(pod, self.bad)

    def _is_of(self, pod: SimPod, tags: set) -> bool:
        return (
            pod.role in ENGINE_ROLES
            and f"{self.name}-{pod.revision}" in self.revisions
            and self.tag_of(pod.revision) in tags
        )

    def _settle(self, pod: SimPod) -> None:
        gate = True if pod.role is PodRole.GATEWAY else pod.gate
        is_down = pod.draining or pod.wedged or pod.flapping or pod.gone_at or pod.sidecar
        ready = bool(pod.started and gate and not is_down)
        if ready != pod.ready:
            pod.ready, pod.ready_at = ready, self.now

    # -- the world ------------------------------------------------------------------------------------------------

    def change(self, **members) -> None:
        self.spec = self.spec | members
        self.generation += 1

    def lose(self, name: str) -> None:
        """A node has gone with this pod."""
        self.pods.pop(name, None)

    def delete(self, name: str) -> None:
        """Somebody deletes this pod; its ReplicaSet makes another one."""
        self.pods[name].gone_at, self.pods[name].ready = self.now, False

    def restart(self, name: str) -> None:
        """Its container ends (out of memory, say) and starts anew in the same pod."""
        pod = self.pods[name]
        pod.started = pod.ready = pod.draining = False
        pod.ready_at = pod.scheduled = self.now
        pod.restarts += 1

    def step(self, seconds: float = TICK_S) -> None:
        """One turn of the operator that carries everything out, then time."""
        self._carry_out(self.plan())
        self.tick(seconds)

    def step_killed(self, seconds: float = TICK_S) -> None:
        """As `step`, but the operator dies after every single action and is robbed of all it had written."""
        for _ in range(200):
            actions = [a for a in self.plan() if not isinstance(a, WriteStatus | Remember | Tell)]
            if not actions:
                break
            self._carry_out(actions[:1])
            self.forget()
        else:
            self.broken.append(f"never settles: {self.log[-6:]}")
        self._carry_out(self.plan())
        self.tick(seconds)

    def _carry_out(self, actions) -> None:
        """What was wanted when it was planned is the measure of what it costs."""
        before, floor, wanted = self.capacity()
        for action in actions:
            self.obey(action)
        after, _, _ = self.capacity(wanted)
        if after < min(before, floor):
            self.broken.append(f"capacity {before} -> {after}, allowed {floor}: {self.log[-5:]}")

    def run_until_quiet(self, limit_s: float, step=None, quiet_turns: int = 30) -> None:
        """Until nothing is done and nothing moves for so many turns; raises after `limit_s`."""
        end, quiet = self.now + limit_s, 0
        while quiet < quiet_turns:
            assert self.now < end, f"never quiet: {self.log[-8:]}"
            before = len(self.log), {p.name: (p.ready, p.quarantined, p.gone_at) for p in self.pods.values()}
            (step or self.step)()
            after = len(self.log), {p.name: (p.ready, p.quarantined, p.gone_at) for p in self.pods.values()}
            quiet = quiet + 1 if before == after and not any(p.quarantined for p in self.pods.values()) else 0

    def run(self, seconds: float, step=None) -> None:
        end = self.now + seconds
        while self.now < end:
            (step or self.step)()

    def engines(self) -> dict[tuple[str, str], int]:
        """(role, image tag) -> ready pods."""
        told: dict[tuple[str, str], int] = {}
        for pod in self.pods.values():
            if pod.role in ENGINE_ROLES and pod.ready:
                key = (pod.role.value, self.tag_of(pod.revision))
                told[key] = told.get(key, 0) + 1
        return told

    def tag_of(self, revision: str) -> str:
        data = self.revisions[f"{self.name}-{revision}"]["data"]
        return data["prefill"]["template"]["spec"]["containers"][0]["image"].rsplit(":", 1)[1]

    def end_state(self):
        """What must not depend on how often the operator died."""
        deployments = sorted((d.role.value, self.tag_of(d.revision) if d.role in ENGINE_ROLES else "", d.replicas)
                             for d in self.deployments.values())  # fmt: skip
        return deployments, self.engines(), sorted(kind for kind, _ in self.objects), sorted(self.secrets)

    def condition(self, name: str):
        return next(c for c in self.status.conditions if c.type == name)


def with_tag(tag: str) -> dict:
    return {"repository": "registry.local/sluice-engine", "tag": tag}
