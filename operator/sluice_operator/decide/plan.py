"""plan(spec, observed, now) -> actions: all decisions of the operator, and nothing else.

Level-based: it looks at what is there, never at what it did. Killed after any action, or with status and annotations
wiped, the next plan goes on from the children alone. `Memory` only makes it less cautious.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sluice_operator import names
from sluice_operator.api.enums import GatewayScalingMode, ScalingMode
from sluice_operator.api.spec import DrainSpec, MetadataSpec, ModelDeploymentSpec
from sluice_operator.api.value import Problem
from sluice_operator.decide import adoption, autoscale, drain, holding, rollout
from sluice_operator.decide.accept import Objection
from sluice_operator.decide.actions import (
    Action,
    Adopt,
    Apply,
    Certify,
    Delete,
    EnsureSecret,
    Label,
    MarkRevision,
    ReleasePod,
    Remember,
    Scale,
    SetDecodeReplicas,
    Tell,
    WriteStatus,
)
from sluice_operator.decide.conditions import Findings
from sluice_operator.decide.counting import Counting, unrouted_since
from sluice_operator.decide.diff import covers, leftovers
from sluice_operator.decide.failing import (
    FAILED_RESTARTS,
    describe_ended,
    ended_by_nodes,
    failing_since,
    has_failed,
    why_not_ready,
)
from sluice_operator.decide.groups import RolloutView
from sluice_operator.decide.incidents import seen
from sluice_operator.decide.observed import Memory, Observed, Owner, Pod, Revision, Workload
from sluice_operator.decide.quarantine import quarantine
from sluice_operator.decide.reasons import Reason
from sluice_operator.decide.rollout import Grow, Move, Regrow, Shrink, Target
from sluice_operator.decide.status import Scaled, all_incidents, build, is_load_only, must_write, without_strangers
from sluice_operator.keys.rotation import Lives, rotate
from sluice_operator.names import ENGINE_ROLES, PodRole, Verdict
from sluice_operator.placement.placement import place
from sluice_operator.render.children import (
    KEPT_KINDS,
    PRUNED_KINDS,
    OwnerRef,
    controller_revision,
    engine_objects,
    gateway_deployment,
    metadata_change,
    standing,
    url_of,
)
from sluice_operator.render.revision import Renderer, gateway_hash, revision_hash, role_data

Object = Mapping[str, Any]
LIVES = Lives()
Parsed = ModelDeploymentSpec | tuple[Objection, ...]


def plan(spec: Parsed, observed: Observed, now: float, renderer: Renderer) -> tuple[Action, ...]:
    """What to do next, in order; nothing when all is as it should be. `spec`: what accept.parse made of it."""
    if isinstance(spec, tuple):
        return _Plan(None, observed, now, renderer).refused(spec[0])
    return _Plan(spec, observed, now, renderer).run(spec)


def defect(error: Exception) -> Objection:
    """What is told of a spec over which `plan` raises: parse should have objected to it."""
    return Reason.OPERATOR_DEFECT, Problem("spec", f"{type(error).__name__}: {error}", "undo its last change")


class _Plan:
    """One run. Values only; the class spares every function the same four arguments."""

    def __init__(self, spec: ModelDeploymentSpec | None, observed: Observed, now: float, renderer: Renderer) -> None:
        self.spec, self.observed, self.now, self.renderer = spec, observed, now, renderer
        extra = MetadataSpec() if spec is None else spec.metadata
        self.owner = OwnerRef(observed.namespace, observed.name, observed.uid, extra)
        self.children = {(child.kind, child.name): child for child in observed.children}
        self.workloads = {(w.role, w.revision): w for w in observed.workloads}
        self.memory = replace(
            observed.memory,
            failing_since=failing_since(observed.pods, observed.memory.failing_since, now),
            unrouted_since=unrouted_since(observed, now),
        )
        self.standing = () if spec is None else standing(self.owner, spec, renderer.api_ports, renderer.dns_ports)
        self.gateways = "" if spec is None else gateway_hash(spec, renderer)

    def run(self, spec: ModelDeploymentSpec) -> tuple[Action, ...]:
        wanted = revision_hash(spec)
        target = rollout.choose_target(wanted, self.observed.revisions, self._useful())
        if adopted := self._adopted(spec, wanted):
            return adopted
        if (objection := self._objection(spec, target)) is not None:
            return self.refused(objection)
        view = self._view(spec, target)
        moves = rollout.step(view)
        scaled = self._scaled(spec, view, target)
        found = self._findings(spec, view, target)
        if spec.paused:
            return (*self._upkeep(), *self._kept_secrets(), *self._told(found, None))
        return (
            *self._upkeep(),
            *self._secrets(),
            *self._certified(),
            *self._standing(),
            *self._labelled(),
            *self._gateway(spec),
            *self._revisions(spec, wanted, target, view),
            *self._quarantined(spec),
            *self._engines(spec, target, moves),
            *self._held(),
            *self._pruned({wanted, target.revision, *(m.revision for m in moves if isinstance(m, Regrow))}),
            *self._events(),
            # What is stale ends a plan: nothing such comes between a change of the number and what is told of it.
            *self._autoscaled(scaled),
            *self._told(found, scaled),
        )

    def refused(self, objection: Objection) -> tuple[Action, ...]:
        """What runs goes on, and status says why nothing else happens."""
        running: Counter[PodRole] = Counter()
        for workload in self.observed.workloads:
            running[workload.role] += workload.replicas
        useful = self._useful()
        target = max(useful, key=lambda revision: (useful[revision], revision), default="")
        found = Findings(
            self.observed, self.now, self.spec, {role: running[role] for role in PodRole}, target, objection,
            incident_times=self._incident_times(),
        )  # fmt: skip
        begun = self._settled()
        return (*self._upkeep(), *self._kept_secrets(), *begun, *self._events(), *self._told(found, None))

    def _settled(self) -> Iterable[Action]:
        """A drain that the last spec began: the pod that it has emptied would serve nobody until a spec is good."""
        timeout = float((DrainSpec() if self.spec is None else self.spec.drain).timeout_seconds)
        for key, workload in sorted(self.workloads.items()):
            if workload.role in ENGINE_ROLES:
                yield from drain.settle(self.observed.members(*key), self.now, timeout)

    # -- what is found ------------------------------------------------------------------------------------------------

    def _objection(self, spec: ModelDeploymentSpec, target: Target) -> Objection | None:
        if self.observed.dry_run is not None:
            return Reason.TEMPLATE_INVALID, self.observed.dry_run
        taken = adoption.conflicts(self.children, (*self.standing, *self._deployments(target)))
        if not taken:
            return None
        is_ending = any(child.owner is Owner.NAMESAKE for child in taken)
        reason = Reason.NAME_IN_USE if is_ending else Reason.NAME_CONFLICT
        return reason, Problem("", adoption.describe(self.owner.namespace, taken), "")

    def _adopted(self, spec: ModelDeploymentSpec, wanted: str) -> tuple[Action, ...]:
        """Restored children that are what would be made now."""
        orphans = {key: child for key, child in self.children.items() if child.owner is Owner.ORPHAN}
        if not orphans:
            return ()
        found = [(orphans[key], item) for item in self._made_now(spec, wanted) if (key := _key(item)) in orphans]
        return tuple(
            Adopt(child.kind, child.name, child.uid, child.resource_version)
            for child, item in found
            if adoption.is_ours(child, item)
        )

    def _made_now(self, spec: ModelDeploymentSpec, wanted: str) -> Iterable[Object]:
        yield from self.standing
        template = self.renderer.gateway(self.owner.name, spec, self.gateways)
        yield gateway_deployment(self.owner, spec.gateway.replicas, self.gateways, template)
        data = self.renderer.engine(self.owner.name, spec, wanted)
        yield controller_revision(self.owner, wanted, 0, data)
        for role in ENGINE_ROLES:
            yield from engine_objects(self.owner, role, wanted, role_data(data, role))

    def _deployments(self, target: Target) -> Iterable[Object]:
        """Names of Deployments and what goes with them, to be held against what is there."""
        for secret in names.secrets(self.owner.name):
            yield {"kind": "Secret", "metadata": {"name": secret}}
        yield {"kind": "Deployment", "metadata": {"name": names.role_name(self.owner.name, PodRole.GATEWAY)}}
        yield {
            "kind": "ControllerRevision",
            "metadata": {"name": names.revision_name(self.owner.name, target.revision)},
        }
        for role in ENGINE_ROLES:
            name = names.engine_name(self.owner.name, role, target.revision)
            for kind in ("Deployment", "ConfigMap", "ResourceClaimTemplate"):
                yield {"kind": kind, "metadata": {"name": name}}

    def _useful(self) -> Mapping[str, int]:
        engines = [pod for role in ENGINE_ROLES for pod in self.observed.members(role)]
        return Counter(pod.revision for pod in engines if self.observed.is_useful(pod))

    def _view(self, spec: ModelDeploymentSpec, target: Target) -> RolloutView:
        classes = rollout.classes({w.revision for w in self.observed.workloads}, self._fingerprints())
        workloads = sorted(self.observed.workloads, key=lambda w: (w.role, w.revision))
        counting = Counting(self.observed, self.memory, self.now, float(spec.probes.startup_max_seconds))
        return RolloutView(
            wanted={PodRole.PREFILL: spec.prefill.replicas, PodRole.DECODE: spec.decode.replicas},
            max_surge=spec.rollout.max_surge,
            max_unavailable=spec.rollout.max_unavailable,
            target=target.revision,
            groups=tuple(counting.group(w, classes[w.revision]) for w in workloads if w.role in ENGINE_ROLES),
            routing_known=self.observed.routed is not None,
            fallback=rollout.choose_fallback(target.revision, self.observed.revisions, workloads),
            homeless=counting.homeless(target.revision),
        )

    def _fingerprints(self) -> Mapping[str, frozenset[str]]:
        told: defaultdict[str, set[str]] = defaultdict(set)
        for pod in self.observed.pods:
            if pod.role in ENGINE_ROLES and pod.is_member and pod.name in self.observed.fingerprints:
                told[pod.revision].add(self.observed.fingerprints[pod.name])
        return {revision: frozenset(reported) for revision, reported in told.items()}

    def _scaled(self, spec: ModelDeploymentSpec, view: RolloutView, target: Target) -> Scaled | None:
        auto = spec.decode.scaling.auto
        if spec.decode.scaling.mode is not ScalingMode.AUTO or auto is None:
            return None
        is_rolling = rollout.is_rolling(view) or target.failed is not None
        inputs = autoscale.gather(
            self.observed, spec.decode.replicas, is_rolling, float(auto.pending_max_seconds), self.now
        )
        decision, self.memory = autoscale.decide(inputs, auto, self.memory, self.now)
        return Scaled(inputs, decision)

    def _findings(self, spec: ModelDeploymentSpec, view: RolloutView, target: Target) -> Findings:
        return Findings(
            observed=self.observed,
            now=self.now,
            spec=spec,
            wanted={**view.wanted, PodRole.GATEWAY: self._num_gateways(spec)},
            target=target.revision,
            gateways=self.gateways,
            placement=place(spec, self.observed.nodes, self.observed.pods),
            view=view,
            held=target.failed,
            incident_times=self._incident_times(),
        )

    def _incident_times(self) -> tuple[str, ...]:
        return tuple(incident.time for incident in all_incidents(self.observed))

    # -- what is done -------------------------------------------------------------------------------------------------

    def _upkeep(self) -> Iterable[Action]:
        """Also while nothing else may change: a pod that was replaced must get ready."""
        for role in ENGINE_ROLES:
            yield from drain.open_new(self.observed.members(role))

    def _secrets(self) -> Iterable[Action]:
        key = names.key_secret(self.owner.name)
        return () if key in self.observed.secrets else (EnsureSecret(key),)

    def _certified(self) -> Iterable[Action]:
        return (Certify(step) for step in rotate(self.observed.certificates, self.now, LIVES))

    def _kept_secrets(self) -> Iterable[Action]:
        """Where nothing else may change: what runs keeps its key, and its certificates must not run out. Somebody
        else's Secret is left alone."""
        if any(c.kind == "Secret" and c.owner is not Owner.OURS for c in self.observed.children):
            return
        if self.observed.workloads:
            yield from self._secrets()
        if self.observed.certificates.leaves:
            yield from self._certified()

    def _standing(self) -> Iterable[Action]:
        return (Apply(item) for item in self.standing if not self._is_there(item))

    def _labelled(self) -> Iterable[Action]:
        """What is made once and never applied again gets later labels and annotations by themselves."""
        for child in self.observed.children:
            is_kept = child.kind in KEPT_KINDS and child.owner is Owner.OURS
            if is_kept and (change := metadata_change(child.object["metadata"], self.owner.extra)):
                yield Label(child.kind, child.name, child.uid, change)

    def _is_there(self, item: Object) -> bool:
        child = self.children.get((item["kind"], item["metadata"]["name"]))
        return (
            child is not None and covers(child.object, item) and not leftovers(child.object, item, names.FIELD_MANAGER)
        )

    def _gateway(self, spec: ModelDeploymentSpec) -> Iterable[Action]:
        """Its template is applied anew when its hash is another, or when somebody else has changed what runs in it; its
        Deployment rolls by itself. Those of engines would not: see docs/kubernetes.md."""
        there = next((w for w in self.observed.workloads if w.role is PodRole.GATEWAY), None)
        template = self.renderer.gateway(self.owner.name, spec, self.gateways)
        if there is None or there.revision != self.gateways or self._runs_other(there.name, template):
            yield Apply(gateway_deployment(self.owner, self._num_gateways(spec), self.gateways, template))
        elif there.replicas != self._num_gateways(spec):
            yield _scale(there, spec.gateway.replicas)

    def _num_gateways(self, spec: ModelDeploymentSpec) -> int:
        """That are wanted: as many as its Deployment says, once there is one, if an autoscaler decides."""
        there = next((w for w in self.observed.workloads if w.role is PodRole.GATEWAY), None)
        is_external = spec.gateway.scaling.mode is GatewayScalingMode.EXTERNAL
        return there.replicas if is_external and there is not None else spec.gateway.replicas

    def _runs_other(self, name: str, template: Object) -> bool:
        child = self.children.get(("Deployment", name))
        if child is None:
            return False
        return holding.runs_other(child.object["spec"]["template"], template)

    def _revisions(self, spec: ModelDeploymentSpec, wanted: str, target: Target, view: RolloutView) -> Iterable[Action]:
        known = {revision.hash: revision for revision in self.observed.revisions}
        if wanted not in known:
            number = 1 + max((revision.number for revision in known.values()), default=0)
            data = self.renderer.engine(self.owner.name, spec, wanted)
            yield Apply(controller_revision(self.owner, wanted, number, data))
        for revision in known.values():
            if revision.verdict is Verdict.FAILED and revision.hash != wanted:
                yield MarkRevision(revision.name, Verdict.UNKNOWN)
        mine = known.get(target.revision)
        if mine is None:
            return
        if mine.verdict is not Verdict.GOOD and rollout.is_complete(view) and all(view.wanted.values()):
            yield MarkRevision(mine.name, Verdict.GOOD)
        elif mine.verdict is Verdict.UNKNOWN and target.failed is None:
            yield from self._taken_back(spec, mine)

    def _taken_back(self, spec: ModelDeploymentSpec, mine: Revision) -> Iterable[Action]:
        """A revision whose pods fail, if there is a good one to hold on to."""
        marked = [replace(r, verdict=Verdict.FAILED) if r.hash == mine.hash else r for r in self.observed.revisions]
        if rollout.choose_target(mine.hash, marked, {}).failed is None:
            return
        startup = float(spec.probes.startup_max_seconds)
        engines = [pod for pod in self.observed.pods if pod.role in ENGINE_ROLES and pod.revision == mine.hash]
        if len(ended := ended_by_nodes(engines, self.now)) >= FAILED_RESTARTS:
            yield from _take_back(mine, Reason.ENDED_BY_NODE, describe_ended(ended))
            return
        for pod in sorted(self._engines_of(mine.hash), key=lambda pod: pod.name):
            if has_failed(pod, self.now, startup, self.memory.failing_since.get(pod.uid, self.now)):
                reason, detail = why_not_ready(pod, self.now, startup)
                yield from _take_back(mine, reason, detail)
                return

    def _engines_of(self, revision: str) -> Sequence[Pod]:
        return [pod for role in ENGINE_ROLES for pod in self.observed.members(role, revision)]

    def _engines(self, spec: ModelDeploymentSpec, target: Target, moves: Sequence[Move]) -> Iterable[Action]:
        known = {revision.hash: revision for revision in self.observed.revisions}
        if (mine := known.get(target.revision)) is not None:
            for role in ENGINE_ROLES:
                yield from self._made(mine, role)
        for move in moves:
            if isinstance(move, Regrow):
                yield from self._made(known[move.revision], move.role)
            if isinstance(move, Grow | Regrow):
                revision = move.revision if isinstance(move, Regrow) else target.revision
                if (workload := self.workloads.get((move.role, revision))) is not None:
                    yield _scale(workload, move.replicas)
        shrinking = {(move.role, move.revision) for move in moves if isinstance(move, Shrink)}
        timeout = float(spec.drain.timeout_seconds)
        for key, workload in sorted(self.workloads.items()):
            if workload.role in ENGINE_ROLES:
                members = self.observed.members(*key)
                if key in shrinking:
                    useful = {pod.name for pod in members if self.observed.is_useful(pod)}
                    yield from drain.shrink(workload, members, self.now, timeout, useful)
                else:
                    yield from drain.settle(members, self.now, timeout)

    def _held(self) -> Iterable[Action]:
        """Engines' Deployments, so that no edit of a template ends pods."""
        known = {revision.hash: revision for revision in self.observed.revisions}
        for (role, revision), workload in sorted(self.workloads.items()):
            live = self.children.get(("Deployment", workload.name))
            if role in ENGINE_ROLES and live is not None and revision in known:
                template = role_data(known[revision].data, role)["template"]
                yield from holding.hold(workload, live.object, template)

    def _made(self, revision: Revision, role: PodRole) -> Iterable[Action]:
        """From what was kept: nothing of a revision is rendered twice."""
        for item in engine_objects(self.owner, role, revision.hash, role_data(revision.data, role)):
            is_there = (item["kind"], item["metadata"]["name"]) in self.children
            if not is_there and not (item["kind"] == "Deployment" and (role, revision.hash) in self.workloads):
                yield Apply(item)

    def _quarantined(self, spec: ModelDeploymentSpec) -> Iterable[Action]:
        for action in quarantine(self.observed.pods, spec.quarantine, self.now):
            yield action
            if isinstance(action, ReleasePod):
                text = f"{action.pod} is wedged and kept for {spec.quarantine.max_seconds} s"
                yield Tell("Quarantined", text, f"kept-{action.uid}", warning=True)

    def _autoscaled(self, scaled: Scaled | None) -> Iterable[Action]:
        if scaled is not None and scaled.decision.replicas != scaled.inputs.replicas:
            before, after = scaled.inputs.replicas, scaled.decision.replicas
            yield SetDecodeReplicas(after, before)
            text = f"decode from {before} to {after}: {scaled.decision.reason}: {scaled.inputs}"
            yield Tell("Scaled", text, f"scaled-{before}-{after}-{int(self.now)}")

    def _pruned(self, needed: set[str]) -> Iterable[Action]:
        """Deployments that have run empty, then what only they needed, then revisions that nobody goes back to."""
        used = set(needed)
        for (role, revision), workload in sorted(self.workloads.items()):
            if role not in ENGINE_ROLES or revision in needed:
                continue
            pods = [p for p in self.observed.pods if p.role is role and p.revision == revision and not p.quarantined]
            used.add(revision)
            if not workload.replicas and not pods:
                yield Delete("Deployment", workload.name, workload.uid, workload.resource_version)
        keep = {("ConfigMap", names.engine_name(self.owner.name, r, h)) for r in ENGINE_ROLES for h in used}
        keep |= {("ResourceClaimTemplate", names.claim_name(self.owner.name, r, h)) for r in ENGINE_ROLES for h in used}
        keep |= {(item["kind"], item["metadata"]["name"]) for item in self.standing}
        for child in self.observed.children:
            if child.kind in PRUNED_KINDS and child.owner is Owner.OURS and (child.kind, child.name) not in keep:
                yield Delete(child.kind, child.name, child.uid)
        good = [r for r in self.observed.revisions if r.verdict is Verdict.GOOD and r.hash not in used]
        if good:
            used.add(max(good, key=lambda revision: revision.number).hash)
        for kept in self.observed.revisions:
            if kept.hash not in used:
                yield Delete("ControllerRevision", kept.name, kept.uid)

    # -- what is told -------------------------------------------------------------------------------------------------

    def _events(self) -> Iterable[Action]:
        known = {incident.id for incident in self.observed.status.incidents}
        for incident in seen(self.observed.pods):
            if incident.id not in known:
                text = f"{incident.pod}: {incident.message}"
                yield Tell(f"Engine{incident.reason}", text, f"incident-{incident.id}", warning=True)
        warning, told = self.observed.warning, self.observed.status.conditions
        if warning and not any(warning in condition.message for condition in told):
            yield Tell("UnknownFields", warning, f"unknown-fields-{self.observed.generation}", warning=True)

    def _told(self, found: Findings, scaled: Scaled | None) -> Iterable[Action]:
        new = build(found, url_of(self.owner), scaled)
        old = without_strangers(self.observed.status, new)
        memory = self.memory
        if must_write(old, new, memory, self.now):
            if is_load_only(old, new):
                memory = replace(memory, load_written_at=self.now)
            yield WriteStatus(new)
        if memory != self.observed.memory:
            yield Remember(memory)


def _take_back(mine: Revision, reason: Reason, detail: str) -> Iterable[Action]:
    yield MarkRevision(mine.name, Verdict.FAILED, reason.value, detail)
    key = f"rollback-{mine.hash}-{mine.resource_version}"  # of this time: it may be tried again
    yield Tell("RolledBack", f"revision {mine.hash}: {detail}", key, warning=True)


def _scale(workload: Workload, replicas: int) -> Scale:
    return Scale(
        workload.name, workload.role, workload.revision, replicas, workload.replicas, workload.resource_version
    )


def first_memory(now: float) -> Memory:
    """Of an operator that has just started: it knows nothing, and waits before it takes anything away."""
    return Memory(since=now)


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]
