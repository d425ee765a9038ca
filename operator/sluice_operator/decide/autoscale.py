"""How many decode engines mode Auto wants. Load comes from the ready gateways' reports, each engine counted once.

Decode has two kinds of load: what runs, and what is reserved and waits for prefill. More decode engines help the first
only, so a prefill bottleneck holds. Engines that have only just become ready say nothing yet. What is not known holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice_operator.api.spec import AutoSpec
from sluice_operator.decide.observed import Load, Memory, Observed, Pod, Wish
from sluice_operator.decide.scaling_rules import bound, remember
from sluice_operator.names import PodRole

# As in autoscaling/v2: a deviation that is not worth a change.
TOLERANCE = 0.1
# A first step compiles and a cache is cold: so long an engine's figures are not those of its kind.
WARM_UP_S = 60.0
STALE_S = 30.0
# After pods that found no node were given back, no other is asked for.
GIVE_BACK_HOLD_S = 300.0
# A node that does not say that a pod has ended is gone so long after that pod's grace.
GONE_NODE_S = 120.0
# A latency says which way, hardly how far.
MAX_LATENCY_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Inputs:
    """`engines`: decode engines whose figures count. `warming`: ready or starting, not among them. Pages are sums over
    `engines`; `pages_per_engine` is their mean capacity. `pending`: pods without a node for too long.
    `prefill_queued` requests wait in gateways although decode has room for them; `queued` are the others that wait
    there. `missing`: why the figures cannot be trusted; empty if they can."""

    replicas: int
    engines: int = 0
    warming: int = 0
    pending: int = 0
    running: int = 0
    waiting: int = 0
    running_pages: int = 0
    reserved_pages: int = 0
    pages_per_engine: float = 0.0
    queued: int = 0
    queue_age_ms: float = 0.0
    prefill_queued: int = 0
    prefill_queue_age_ms: float = 0.0
    inter_token_p95_ms: float = 0.0
    prefill_ready: int = 0
    rolling: bool = False
    missing: str = ""

    def kv_percent(self, engines: float) -> float:
        """Of pages of running sequences, were they spread over so many engines."""
        room = engines * self.pages_per_engine
        return 100 * self.running_pages / room if room else 0.0

    def __str__(self) -> str:
        return (
            f"{self.engines} engines (+{self.warming} warming, {self.pending} pending): {self.running} running,"
            f" {self.waiting + self.prefill_queued} waiting for prefill,"
            f" {_fives(self.kv_percent(self.engines))} % of pages in use,"
            f" queue age {self.queue_age_ms:.0f} ms, inter-token p95 {self.inter_token_p95_ms:.0f} ms"
            + (f"; {self.missing}" if self.missing else "")
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason`: CamelCase, see VERDICTS. `hint`: on the ratio of prefill to decode."""

    replicas: int
    reason: str
    detail: str = ""
    hint: str = ""


VERDICTS = {
    "AtTarget": "Load is within 10 % of its targets.",
    "LoadAboveTarget": "Load per engine is above a target, so more engines are wanted.",
    "LoadBelowTarget": "Fewer engines would do, and the rest would stay below its targets.",
    "PrefillBound": "Requests wait for prefill: more decode engines would not help.",
    "MetricsMissing": "A ready gateway has not reported, or an engine is not in any report.",
    "WarmingUp": "Engines that were asked for are not warm yet.",
    "PendingGivenBack": "Pods found no node, so their number was given back.",
    "AfterGiveBack": "Pods found no node lately; no others are asked for yet.",
    "RollingOut": "A rollout goes on: nothing shrinks meanwhile.",
    "FromZero": "Requests wait and no engine runs.",
    "Idle": "Nothing runs and nothing waits.",
    "OutOfBounds": "replicas lies outside minReplicas and maxReplicas.",
}


def gather(observed: Observed, replicas: int, rolling: bool, pending_max_s: float, now: float) -> Inputs:
    """`replicas`: spec.decode.replicas. `pending_max_s`: how long a pod may wait for a node."""
    decode = observed.members(PodRole.DECODE)
    ready = [pod for pod in decode if pod.ready and not pod.is_leaving]
    warm = [pod for pod in ready if now - pod.ready_changed_at >= WARM_UP_S]
    loads, missing = _loads(observed, warm, now)
    capacity = sum(load.total_pages for load in loads)
    reports = [report for report in observed.gateways if report.pod in observed.ready_gateways]
    waiting = sum(not pod.node and now - pod.created_at > pending_max_s for pod in decode)
    # Whoever is above the number has been given back already, and those without a node go first. Nor is it want of
    # nodes where one that goes, or is kept for somebody to look at, has the place for a while yet.
    places = sum(_holds_a_place(pod, now) for pod in observed.pods if pod.role is PodRole.DECODE)
    pending = max(waiting - max(len(decode) - replicas, 0) - places, 0)
    return Inputs(
        replicas=replicas,
        engines=len(loads),
        warming=max(replicas - len(warm), 0),
        pending=pending,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        running_pages=sum(load.running_pages for load in loads),
        reserved_pages=sum(load.reserved_pages for load in loads),
        pages_per_engine=capacity / len(loads) if loads else 0.0,
        queued=sum(report.queued for report in reports),
        queue_age_ms=max((report.queue_age_ms for report in reports), default=0.0),
        prefill_queued=sum(report.prefill_queued for report in reports),
        prefill_queue_age_ms=max((report.prefill_queue_age_ms for report in reports), default=0.0),
        inter_token_p95_ms=max((load.inter_token_p95_ms for load in loads), default=0.0),
        prefill_ready=sum(pod.ready for pod in observed.members(PodRole.PREFILL)),
        rolling=rolling,
        missing=missing,
    )


def _holds_a_place(pod: Pod, now: float) -> bool:
    """One that does not count any more, and whose node has it still; not for ever, should the node be gone."""
    is_going = bool(pod.gone_by) and now < pod.gone_by + GONE_NODE_S
    return bool(pod.node) and (is_going or (pod.quarantined and not pod.terminating))


def _loads(observed: Observed, warm: list[Pod], now: float) -> tuple[list[Load], str]:
    """(one load per engine, what is missing). Of several gateways' reports on an engine the newest counts."""
    reports = sorted(
        (r for r in observed.gateways if r.pod in observed.ready_gateways and now - r.at <= STALE_S),
        key=lambda report: report.at,
    )
    if silent := sorted(observed.ready_gateways - {report.pod for report in reports}):
        return [], f"no report from gateway {silent[0]}"
    if not reports:
        return [], "no gateway is ready"
    newest = {engine.pod: engine.load for report in reports for engine in report.engines}
    if lost := sorted(pod.name for pod in warm if pod.name not in newest):
        return [], f"no load of {lost[0]}"
    return [newest[pod.name] for pod in warm], ""


def decide(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> tuple[Decision, Memory]:
    """What replicas should be, and what to remember of it. Pure: the same for the same values."""
    wish = next(told for check in CHECKS if (told := check(inputs, auto, memory, now)) is not None)
    wish = replace(wish, replicas=_clamp(wish.replicas, auto))
    if wish.reason in ("PendingGivenBack", "OutOfBounds"):
        return wish, _changed(memory, wish, inputs.replicas, now)
    known = inputs.replicas if wish.reason in _HOLDS else wish.replicas
    memory = replace(memory, wishes=remember(memory, Wish(now, known)))
    limited = bound(inputs.replicas, wish.replicas, auto.behavior, memory, now)
    wish = replace(wish, replicas=limited.replicas, detail=f"{wish.detail} {limited.why}".strip())
    return wish, _changed(memory, wish, inputs.replicas, now)


def _clamp(replicas: int, auto: AutoSpec) -> int:
    return min(max(replicas, auto.min_replicas), auto.max_replicas)


_HOLDS = ("MetricsMissing", "RollingOut", "WarmingUp", "PrefillBound", "AfterGiveBack")


def _changed(memory: Memory, wish: Decision, before: int, now: float) -> Memory:
    if wish.replicas == before:
        return memory
    kept = tuple(change for change in memory.changes if now - change.at <= 1800)
    gave_back_at = now if wish.reason == "PendingGivenBack" else memory.gave_back_at
    return replace(memory, changes=(*kept, Wish(now, before)), gave_back_at=gave_back_at)


# -- checks: the first that says something rules ----------------------------------------------------------------------

Check = Callable[[Inputs, AutoSpec, Memory, float], Decision | None]


def _pending(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    """Not in a rollout: there the surge is what finds no node, and SurgeUnschedulable says so."""
    if not inputs.pending or inputs.rolling:
        return None
    left = max(inputs.replicas - inputs.pending, auto.min_replicas)
    detail = f"{inputs.pending} pods have had no node for {auto.pending_max_seconds} s (pendingMaxSeconds)."
    return Decision(left, "PendingGivenBack", detail) if left < inputs.replicas else None


def _bounds(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    """Somebody has moved them: no window speaks against following."""
    if _clamp(inputs.replicas, auto) == inputs.replicas:
        return None
    return Decision(inputs.replicas, "OutOfBounds", f"{auto.min_replicas} to {auto.max_replicas} are allowed.")


def _from_zero(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    if inputs.replicas:
        return None
    return Decision(1, "FromZero", f"{inputs.queued} requests wait.") if inputs.queued else Decision(0, "Idle")


def _missing(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    return Decision(inputs.replicas, "MetricsMissing", inputs.missing) if inputs.missing else None


def _no_figures(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    return None if inputs.engines else Decision(inputs.replicas, "WarmingUp", "no engine is warm")


def _prefill_bound(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    """The queue is too old or pages are short, and what runs is not the reason: what is reserved and waits is, or no
    prefill engine has room."""
    late = inputs.waiting + inputs.prefill_queued
    if not late or _running_factor(inputs, auto) > 1 + TOLERANCE:
        return None
    room = inputs.engines * inputs.pages_per_engine
    all_pages = 100 * (inputs.running_pages + inputs.reserved_pages) / room if room else 0.0
    age_ms = max(inputs.queue_age_ms if inputs.waiting else 0.0, inputs.prefill_queue_age_ms)
    if age_ms <= auto.queue_age_milliseconds and all_pages <= auto.kv_utilization_percent:
        return None
    hint = (
        f"{late} of {inputs.running + late} sequences wait for prefill: raise"
        f" prefill.replicas above {inputs.prefill_ready}, or lower decode.replicas"
    )
    return Decision(inputs.replicas, "PrefillBound", f"{late} sequences wait for prefill.", hint)


def _up(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    """More engines, if those that are warming would not be enough."""
    factor = max(_running_factor(inputs, auto), _queue_factor(inputs, auto))
    if factor <= 1 + TOLERANCE:
        return None
    wanted = math.ceil(inputs.engines * factor - 1e-9)
    if wanted <= inputs.replicas:
        return Decision(inputs.replicas, "WarmingUp", f"{wanted} engines are wanted.") if inputs.warming else None
    if memory.gave_back_at is not None and now - memory.gave_back_at < GIVE_BACK_HOLD_S:
        return Decision(inputs.replicas, "AfterGiveBack")
    return Decision(wanted, "LoadAboveTarget", f"{factor:.2f} times the target.")


def _rolling(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    return Decision(inputs.replicas, "RollingOut") if inputs.rolling else None


def _down(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    """To as many as would still be below every target, with the tolerance to spare, if they had all the load."""
    if inputs.warming:
        return None
    least = next((n for n in range(inputs.replicas) if _would_do(inputs, auto, n)), inputs.replicas)
    if least == inputs.replicas:
        return None
    return Decision(least, "LoadBelowTarget" if least else "Idle", f"{least} would do.")


def _at_target(inputs: Inputs, auto: AutoSpec, memory: Memory, now: float) -> Decision | None:
    return Decision(inputs.replicas, "AtTarget")


CHECKS: tuple[Check, ...] = (
    _bounds,
    _pending,
    _from_zero,
    _missing,
    _no_figures,
    _prefill_bound,
    _up,
    _rolling,
    _down,
    _at_target,
)


def _running_factor(inputs: Inputs, auto: AutoSpec) -> float:
    kv = inputs.kv_percent(inputs.engines) / auto.kv_utilization_percent
    target = auto.inter_token_p95_milliseconds
    latency = min(inputs.inter_token_p95_ms / target, MAX_LATENCY_FACTOR) if target else 0.0
    return max(kv, latency)


def _queue_factor(inputs: Inputs, auto: AutoSpec) -> float:
    return min(inputs.queue_age_ms / auto.queue_age_milliseconds, MAX_LATENCY_FACTOR)


def _would_do(inputs: Inputs, auto: AutoSpec, engines: int) -> bool:
    if engines == 0:
        return not (inputs.running or inputs.waiting or inputs.queued or inputs.prefill_queued)
    grown = inputs.engines / engines
    target = auto.inter_token_p95_milliseconds
    return (
        inputs.kv_percent(engines) <= auto.kv_utilization_percent * (1 - TOLERANCE)
        and (target is None or inputs.inter_token_p95_ms * grown <= target * (1 - TOLERANCE))
        and inputs.queue_age_ms * grown <= auto.queue_age_milliseconds * (1 - TOLERANCE)
    )


def _fives(percent: float) -> int:
    """In steps of 5, so that status does not change with every token."""
    return min(100, int(percent + 2.5) // 5 * 5)
