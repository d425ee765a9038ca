"""Conditions: one small function each, over what plan has found out. The first broken link is the reason of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sluice_operator.api.enums import Allocation, ConditionStatus, ScalingMode
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.status import MAX_MESSAGE, Condition
from sluice_operator.decide import rollout
from sluice_operator.decide.accept import Objection
from sluice_operator.decide.failing import FAILED_RESTARTS, describe_ended, ended_by_nodes, why_not_ready
from sluice_operator.decide.groups import RolloutView, allowed, capacity
from sluice_operator.decide.moments import rfc3339, seconds
from sluice_operator.decide.observed import Observed, Pod, Revision
from sluice_operator.decide.reasons import Reason, cut, sentence, tell
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.placement.placement import Placement

CHAIN = ("Accepted", "Placed", "PrefillReady", "DecodeReady", "GatewayReady", "Routable")
RECENT_S = 600.0
# From an engine's readiness to its first requests: gateways look every second, and connect again after a few.
ROUTE_S = 60.0
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


@dataclass(frozen=True, slots=True)
class Findings:
    """What plan has found out. `spec` None: it could not be read. `objection`: why the spec is not accepted.

    `target`: the revision of engines that serves or is being rolled out; `held`: the wanted one, taken back.
    `gateways`: the gateways' own revision.
    """

    observed: Observed
    now: float
    spec: ModelDeploymentSpec | None
    wanted: Mapping[PodRole, int]
    target: str = ""
    objection: Objection | None = None
    placement: Placement | None = None
    view: RolloutView | None = None
    held: Revision | None = None
    incident_times: tuple[str, ...] = field(default=())
    gateways: str = ""

    def updated(self, role: PodRole) -> tuple[Pod, ...]:
        """Pods of what was asked for; all there are where nothing was, for a spec that is not accepted."""
        return self.observed.members(role, self.revision_of(role) or None)

    def revision_of(self, role: PodRole) -> str:
        """What was asked for; empty where nothing was."""
        return self.gateways if role is PodRole.GATEWAY else self.target

    @property
    def startup_max_s(self) -> float:
        return float(self.spec.probes.startup_max_seconds) if self.spec is not None else 1800.0


@dataclass(frozen=True, slots=True)
class Finding:
    type: str
    status: ConditionStatus
    reason: Reason
    message: str


def conditions(found: Findings) -> tuple[Finding, ...]:
    links = (
        _accepted(found),
        _placed(found),
        *(_role_ready(found, role) for role in PodRole),
        _routable(found),
    )
    return (*links, _progressing(found), _degraded(found), _ready(found, links))


def _sentence(words: str) -> str:
    return sentence(f"{words[0].upper()}{words[1:]}")


def first_broken(findings: Iterable[Finding]) -> Finding | None:
    links = {finding.type: finding for finding in findings}
    return next((links[name] for name in CHAIN if links[name].status is not TRUE), None)


def dated(findings: Iterable[Finding], old: Iterable[Condition], generation: int, now: float) -> tuple[Condition, ...]:
    """With the time of the last transition, which is now only where the status has changed."""
    before = {condition.type: condition for condition in old}
    told = []
    for finding in findings:
        last = before.get(finding.type)
        keeps = last is not None and last.status is finding.status and seconds(last.last_transition_time) is not None
        since = last.last_transition_time if keeps and last is not None else rfc3339(now)
        message = finding.message[:MAX_MESSAGE]
        told.append(Condition(finding.type, finding.status, finding.reason.value, message, generation, since))
    return tuple(told)


def _accepted(found: Findings) -> Finding:
    if found.objection is None:
        return Finding("Accepted", TRUE, Reason.ACCEPTED, tell(Reason.ACCEPTED, found.observed.warning))
    reason, problem = found.objection
    remedy = tell(reason)
    return Finding("Accepted", FALSE, reason, f"{sentence(cut(str(problem), MAX_MESSAGE - len(remedy) - 2))} {remedy}")


def _placed(found: Findings) -> Finding:
    placement = found.placement
    if placement is None:
        return Finding("Placed", UNKNOWN, Reason.NOT_ACCEPTED, tell(Reason.NOT_ACCEPTED))
    why = found.observed.absent.get("ResourceClaimTemplate", "")
    gpu = found.spec.accelerator.gpu if found.spec is not None else None
    if why and gpu is not None and gpu.allocation is Allocation.RESOURCE_CLAIM:
        return Finding("Placed", FALSE, Reason.CLAIMS_UNAVAILABLE, tell(Reason.CLAIMS_UNAVAILABLE, _sentence(why)))
    if placement.status is UNKNOWN and _has_place(found):
        return Finding("Placed", TRUE, Reason.PLACED, "Pods of each role have found nodes.")
    return Finding("Placed", placement.status, placement.reason, placement.message)


def _has_place(found: Findings) -> bool:
    """Without a right to see nodes, that the scheduler has found some and complains of none is all there is to know."""
    wanted = [role for role in ENGINE_ROLES if found.wanted.get(role, 0)]
    return all(any(pod.node for pod in found.observed.members(role)) for role in wanted)


def _role_ready(found: Findings, role: PodRole) -> Finding:
    """Only pods of the target count: older ones serve, but they are not what was asked for."""
    name = f"{role.value.capitalize()}Ready"
    members = found.updated(role)
    wanted, ready = found.wanted.get(role, 0), [pod for pod in members if pod.ready]
    if not wanted:
        return _unwanted(found, role, name)
    if len(ready) >= wanted:
        return Finding(name, TRUE, Reason.ALL_READY, f"{len(ready)} of {wanted} pods are ready.")
    counted = f"{len(ready)} of {wanted} pods are ready."
    reason, detail = _worst(members, found)
    if reason in (Reason.STARTING, Reason.UNSCHEDULABLE) and (refused := _refused(found, role)):
        return Finding(name, FALSE, Reason.PODS_REFUSED, f"{counted} {tell(Reason.PODS_REFUSED, refused)}")
    if reason in (Reason.STARTING, Reason.UNSCHEDULABLE) and (ended := _ended(found, role)):
        return Finding(name, FALSE, Reason.ENDED_BY_NODE, f"{counted} {tell(Reason.ENDED_BY_NODE, ended)}")
    if reason in (Reason.STARTING, Reason.UNSCHEDULABLE) and _serves_elsewhere(found, role):
        return Finding(name, FALSE, Reason.ROLLING_OUT, f"{counted} {tell(Reason.ROLLING_OUT, detail)}")
    if role is PodRole.DECODE and reason is Reason.STARTING and len(ready) >= _least(found.spec):
        return Finding(name, TRUE, Reason.SCALING, f"{counted} {detail}")
    return Finding(name, FALSE, reason, f"{counted} {tell(reason, detail)}")


def _unwanted(found: Findings, role: PodRole, name: str) -> Finding:
    """Of a role of which no pod is wanted: because the spec is not accepted, to save what an idle model costs, or
    because somebody wrote a zero."""
    if found.objection is not None or found.spec is None:
        return Finding(name, FALSE, Reason.NOT_ACCEPTED, tell(Reason.NOT_ACCEPTED, "No pod of this role runs."))
    scaling = found.spec.decode.scaling
    remedy = f"Raise spec.{role.value}.replicas."
    if role is PodRole.DECODE and scaling.mode is ScalingMode.AUTO:
        remedy = "It sleeps while it is idle (scaling.auto.minReplicas is 0); the next request starts a pod."
    elif role is PodRole.DECODE and scaling.mode is ScalingMode.EXTERNAL:
        remedy = "Scale it up with what writes its /scale (scaling.mode is External)."
    return Finding(name, FALSE, Reason.SCALED_TO_ZERO, tell(Reason.SCALED_TO_ZERO, "", remedy))


def _refused(found: Findings, role: PodRole) -> str:
    """Why there are fewer pods than a Deployment of what is wanted asks for; empty if nobody has refused any."""
    for workload in found.observed.workloads:
        is_wanted = workload.role is role and (role is PodRole.GATEWAY or workload.revision == found.target)
        if is_wanted and workload.refused and len(found.updated(role)) < workload.replicas:
            return sentence(f"Deployment {workload.name}: {workload.refused}")
    return ""


def _ended(found: Findings, role: PodRole) -> str:
    """Of several pods of what is wanted that nodes have ended; empty where there are few: their successors may fare
    better."""
    mine = [pod for pod in found.observed.pods if pod.role is role and pod.revision == found.revision_of(role)]
    ended = ended_by_nodes(mine, found.now)
    return describe_ended(ended) if len(ended) >= FAILED_RESTARTS else ""


def _worst(members: Iterable[Pod], found: Findings) -> tuple[Reason, str]:
    """What is least likely to pass by itself, in the order of Reason."""
    told = [why_not_ready(pod, found.now, found.startup_max_s) for pod in members if not pod.ready]
    order = (
        Reason.CONTAINER_CONFIG_ERROR,
        Reason.IMAGE_PULL_FAILED,
        Reason.CRASH_LOOP,
        Reason.STARTUP_TIMED_OUT,
        Reason.NOT_READY,
        Reason.UNSCHEDULABLE,
        Reason.STARTING,
    )
    return min(told, key=lambda pair: (order.index(pair[0]), pair[1]), default=(Reason.STARTING, ""))


def _serves_elsewhere(found: Findings, role: PodRole) -> bool:
    if role is PodRole.GATEWAY:
        return len(found.observed.members(role)) > len(found.updated(role))
    return found.view is not None and rollout.is_rolling(found.view)


def _least(spec: ModelDeploymentSpec | None) -> int:
    """With a number that others change all the time, a pod that is still starting is no fault."""
    if spec is None or spec.decode.scaling.mode is ScalingMode.STATIC:
        return 1 << 30
    auto = spec.decode.scaling.auto
    return max(1, auto.min_replicas if auto is not None else 1)


def _routable(found: Findings) -> Finding:
    observed = found.observed
    if observed.routed is None:
        silent = sorted(observed.ready_gateways - {report.pod for report in observed.gateways})
        detail = f"{silent[0]} has not reported." if silent else "No gateway is ready."
        remedy = None if silent else "See GatewayReady."
        return Finding("Routable", UNKNOWN, Reason.NO_GATEWAY_REPORT, tell(Reason.NO_GATEWAY_REPORT, detail, remedy))
    told = observed.fingerprints
    seen = {
        role: {told[p.name] for p in observed.members(role, found.target) if observed.is_useful(p) and p.name in told}
        for role in ENGINE_ROLES
    }
    pairs = seen[PodRole.PREFILL] & seen[PodRole.DECODE]
    if pairs:
        return Finding("Routable", TRUE, Reason.ROUTED, tell(Reason.ROUTED))
    return Finding("Routable", FALSE, Reason.NO_PAIR, tell(Reason.NO_PAIR))


def _progressing(found: Findings) -> Finding:
    def told(status: ConditionStatus, reason: Reason, detail: str = "") -> Finding:
        return Finding("Progressing", status, reason, tell(reason, detail))

    if found.objection is not None or found.view is None:
        return told(FALSE, Reason.NOT_ACCEPTED)
    if found.spec is not None and found.spec.paused:
        return told(UNKNOWN, Reason.PAUSED)
    if found.observed.refused:
        return told(FALSE, Reason.WRITE_REFUSED, sentence(found.observed.refused))
    if found.held is not None:
        return told(FALSE, Reason.ROLLED_BACK, f"Revision {found.held.hash}: {_why_held(found)}")
    if rollout.is_complete(found.view):
        return told(TRUE, Reason.COMPLETE if _are_gateways_complete(found) else Reason.ROLLING_OUT)
    if why := _unrouted(found):
        return told(FALSE, Reason.NOT_ROUTED, why)
    if rollout.is_rolling(found.view):
        placeless = [p for role in ENGINE_ROLES for p in found.observed.members(role, found.target) if not p.node]
        if waiting := [pod for pod in placeless if pod.unschedulable]:
            detail = sentence(f"Pod {waiting[0].name}: {waiting[0].unschedulable}")
            text = tell(Reason.SURGE_UNSCHEDULABLE, detail, _room_remedy(found, placeless))
            return Finding("Progressing", FALSE, Reason.SURGE_UNSCHEDULABLE, text)
        return told(TRUE, Reason.ROLLING_OUT)
    return told(TRUE, Reason.SCALING)


def _room_remedy(found: Findings, placeless: Iterable[Pod]) -> str:
    """What a rollout waits for whose new pods find no node, and how it would do without, if it can."""
    counts = Counter(pod.role for pod in placeless)
    needed = " and ".join(f"{counts[role]} {role.value} {_pods(counts[role])}" for role in ENGINE_ROLES if counts[role])
    assert found.spec is not None  # a rollout is that of a spec
    gpu, surge = found.spec.accelerator.gpu, found.spec.rollout
    if gpu is not None:
        each = found.spec.decode.parallelism.tensor
        needed += f" ({each} GPU{'s' if each > 1 else ''} each)"
    if not surge.max_surge:
        return f"Make room for {needed}: maxSurge is 0, and the places that older pods left do not fit. See Placed."
    less = max(1, surge.max_unavailable)
    return (
        f"Make room for {needed}, or set rollout.maxSurge to 0 and rollout.maxUnavailable to {less}: an older pod then"
        " ends first."
    )


def _pods(count: int) -> str:
    return "pod" if count == 1 else "pods"


def _unrouted(found: Findings) -> str:
    """An engine that has been ready for long enough, and that a gateway does not route to; empty if there is none."""
    for role in ENGINE_ROLES:
        for pod in found.observed.members(role):
            is_due = pod.ready and not pod.is_leaving and found.now - pod.ready_changed_at >= ROUTE_S
            if is_due and (why := found.observed.why_unrouted(pod)):
                return sentence(f"Pod {pod.name}: {why}")
    return ""


def _are_gateways_complete(found: Findings) -> bool:
    """Nothing is left of older ones, and all that are wanted are ready."""
    new = found.updated(PodRole.GATEWAY)
    ready = sum(pod.ready for pod in new)
    return len(found.observed.members(PodRole.GATEWAY)) == len(new) and ready >= found.wanted.get(PodRole.GATEWAY, 0)


def _why_held(found: Findings) -> str:
    """A sentence: the reason, and the pod with its last words if they are still known."""
    told = (found.held.verdict_reason, found.held.verdict_detail) if found.held is not None else ()
    return sentence(": ".join(filter(None, told)) or "its pods failed")


def _degraded(found: Findings) -> Finding:
    def told(status: ConditionStatus, reason: Reason, detail: str = "") -> Finding:
        return Finding("Degraded", status, reason, tell(reason, detail))

    kept = sorted(pod.name for pod in found.observed.pods if pod.quarantined and not pod.terminating)
    if kept:
        return told(TRUE, Reason.PODS_QUARANTINED, f"{', '.join(kept)}.")
    view = found.view
    if view is not None and all(view.wanted[role] for role in ENGINE_ROLES):
        has, least = capacity(view.groups, view.wanted), allowed(view.wanted, view.max_unavailable)
        if has < least and _is_broken(found):
            share = f"{float(has):.0%} of the wanted capacity serves, and it should be at least {float(least):.0%}."
            detail = f"{share} {_unrouted(found)}".rstrip()
            return told(TRUE, Reason.BELOW_CAPACITY, detail)
    recent = [t for text in found.incident_times if (t := seconds(text)) is not None and found.now - t < RECENT_S]
    if recent:
        return told(TRUE, Reason.RECENT_INCIDENTS, f"{len(recent)} of them.")
    why = found.observed.absent.get("PodMonitor", "")
    if why and found.spec is not None and found.spec.monitoring.pod_monitor:
        return told(TRUE, Reason.MONITORING_UNAVAILABLE, _sentence(why))
    return told(FALSE, Reason.HEALTHY)


def _is_broken(found: Findings) -> bool:
    """Some engine that should serve does not, and not because it has only been asked for."""
    if any(_refused(found, role) for role in ENGINE_ROLES) or _unrouted(found):
        return True
    engines = [
        pod for role in ENGINE_ROLES for pod in found.observed.members(role) if not pod.ready and not pod.is_leaving
    ]
    return any(why_not_ready(pod, found.now, found.startup_max_s)[0] is not Reason.STARTING for pod in engines)


def _ready(found: Findings, links: Iterable[Finding]) -> Finding:
    broken = first_broken(links)
    if found.observed.refused and (broken is None or broken.type != "Accepted"):
        told = tell(Reason.WRITE_REFUSED, sentence(found.observed.refused))
        return Finding("Ready", FALSE, Reason.WRITE_REFUSED, f"Progressing: {told}")
    if broken is not None:
        return Finding("Ready", FALSE, broken.reason, f"{broken.type}: {broken.message}")
    if found.held is not None:
        return Finding("Ready", FALSE, Reason.ROLLED_BACK, tell(Reason.ROLLED_BACK, _why_held(found)))
    return Finding("Ready", TRUE, Reason.READY, tell(Reason.READY))
