"""What is written to status, and when: on change only, and for load alone at most once in a while."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice_operator import names
from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.status import (
    MAX_DECISIONS,
    MAX_MESSAGE,
    MAX_REASONS,
    DecisionStatus,
    IncidentStatus,
    ModelDeploymentStatus,
    PlacementStatus,
    RolesStatus,
    RoleStatus,
    ScalingStatus,
)
from sluice_operator.decide import incidents
from sluice_operator.decide.autoscale import Decision, Inputs
from sluice_operator.decide.conditions import Findings, conditions, dated
from sluice_operator.decide.moments import rfc3339
from sluice_operator.decide.observed import Memory, Observed
from sluice_operator.names import PodRole

LOAD_PERIOD_S = 30.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """What the autoscaler looked at and decided."""

    inputs: Inputs
    decision: Decision


def build(found: Findings, url: str, scaled: Scaled | None) -> ModelDeploymentStatus:
    observed, old = found.observed, found.observed.status
    told = conditions(found)
    by_type = {finding.type: finding for finding in told}
    decode = observed.members(PodRole.DECODE)
    ready = by_type["Ready"]
    return ModelDeploymentStatus(
        observed_generation=observed.generation,
        revision=found.target,
        fingerprint=_fingerprint(found),
        url=url,
        reason="" if ready.status is ConditionStatus.TRUE else ready.reason.value,
        conditions=dated(told, old.conditions, observed.generation, found.now),
        roles=RolesStatus(*(_role(found, role) for role in PodRole)),
        routable=sum(observed.is_useful(pod) for pod in decode) if observed.routed is not None else 0,
        kv_utilization_percent=kv_percent(observed),
        decode_replicas=len(decode),
        decode_selector=names.selector_text(names.selector(observed.name, PodRole.DECODE)),
        scaling=_scaling(old.scaling, scaled, found.now),
        incidents=all_incidents(observed),
        placement=_placement(found),
    )


def all_incidents(observed: Observed) -> tuple[IncidentStatus, ...]:
    return incidents.merge(observed.status.incidents, incidents.seen(observed.pods))


def kv_percent(observed: Observed) -> int:
    """Pages of running and reserved sequences, all decode engines, each once, in steps of 5."""
    loads = {e.pod: e.load for r in observed.gateways for e in r.engines if e.role is PodRole.DECODE}
    total = sum(load.total_pages for load in loads.values())
    used = sum(load.running_pages + load.reserved_pages for load in loads.values())
    return min(100, int(100 * used / total + 2.5) // 5 * 5) if total else 0


def must_write(old: ModelDeploymentStatus, new: ModelDeploymentStatus, memory: Memory, now: float) -> bool:
    """Load alone is no news within LOAD_PERIOD_S of the last time. `old`: see `without_strangers`."""
    if old == new:
        return False
    if _without_load(old) != _without_load(new):
        return True
    return memory.load_written_at is None or now - memory.load_written_at >= LOAD_PERIOD_S


def without_strangers(old: ModelDeploymentStatus, new: ModelDeploymentStatus) -> ModelDeploymentStatus:
    """What others write beside us is no news: applying ours leaves conditions of other types where they are."""
    ours = {condition.type for condition in new.conditions}
    return replace(old, conditions=tuple(condition for condition in old.conditions if condition.type in ours))


def is_load_only(old: ModelDeploymentStatus, new: ModelDeploymentStatus) -> bool:
    return old != new and _without_load(old) == _without_load(new)


def _without_load(status: ModelDeploymentStatus) -> ModelDeploymentStatus:
    """Holds are load too; a change of replicas is news. Messages hold ages and counts: the reason is the news."""
    changes = tuple(d for d in status.scaling.decisions if d.from_replicas != d.to_replicas)
    bare = tuple(replace(condition, message="") for condition in status.conditions)
    scaling = replace(status.scaling, decisions=changes, hint="")
    return replace(status, kv_utilization_percent=0, scaling=scaling, conditions=bare)


def _fingerprint(found: Findings) -> str:
    told = {
        found.observed.fingerprints[pod.name]
        for pod in found.observed.pods
        if pod.revision == found.target and pod.name in found.observed.fingerprints
    }
    return ",".join(sorted(told))[:128]


def _role(found: Findings, role: PodRole) -> RoleStatus:
    members = found.observed.members(role)
    wanted, ready = found.wanted.get(role, 0), sum(pod.ready for pod in members)
    return RoleStatus(
        desired=wanted,
        ready=ready,
        updated=len(found.updated(role)),
        quarantined=sum(pod.role is role and pod.quarantined and not pod.terminating for pod in found.observed.pods),
        summary=f"{min(ready, wanted)}/{wanted}",
    )


def _scaling(old: ScalingStatus, scaled: Scaled | None, now: float) -> ScalingStatus:
    """A decision is told when it changes something, or when its reason is another than the last one's."""
    if scaled is None:
        return ScalingStatus()
    before, decision = scaled.inputs.replicas, scaled.decision
    verdict = "Up" if decision.replicas > before else "Down" if decision.replicas < before else "Hold"
    last = old.decisions[0] if old.decisions else None
    if last is not None and verdict == "Hold" == last.verdict and last.reason == decision.reason:
        return replace(old, hint=decision.hint)
    text = f"{decision.detail} {scaled.inputs}".strip()[:MAX_MESSAGE]
    told = DecisionStatus(rfc3339(now), before, decision.replicas, verdict, decision.reason, text)
    return ScalingStatus((told, *old.decisions)[:MAX_DECISIONS], decision.hint)


def _placement(found: Findings) -> PlacementStatus:
    if found.placement is None:
        return PlacementStatus()
    reasons = tuple(reason[:MAX_MESSAGE] for reason in found.placement.reasons)[:MAX_REASONS]
    return PlacementStatus(found.placement.matching, reasons)
