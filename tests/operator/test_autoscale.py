"""The autoscaler over simulated time: engines of fixed size under a load that somebody draws."""

from __future__ import annotations

import pytest

from sluice_operator.api.enums import PolicyType, SelectPolicy
from sluice_operator.api.spec import AutoSpec, BehaviorSpec, ScalingPolicy, ScalingRules
from sluice_operator.decide.autoscale import GONE_NODE_S, WARM_UP_S, Inputs, decide, gather
from sluice_operator.decide.observed import EngineReport, GatewayReport, Load, Memory, Observed, Pod, Wish
from sluice_operator.decide.scaling_rules import bound, remember
from sluice_operator.names import PodRole

TICK_S = 10.0
PAGES = 100
PENDING_S = 120.0


class Sim:
    """`demand`: pages that running sequences want, as a function of time; what does not fit waits in the queue."""

    def __init__(self, auto, replicas=1, demand=lambda t: 0, start_s=60.0, room=100):
        self.auto, self.replicas, self.demand, self.start_s, self.room = auto, replicas, demand, start_s, room
        self.now = 0.0
        self.memory = Memory(-10_000.0)
        self.born = [-10_000.0] * replicas
        self.history: list[tuple[float, int, str]] = []
        self.missing = self.rolling = False
        self.waiting = 0

    def inputs(self):
        placed = self.born[: self.room]
        ready = [b for b in placed if self.now - b >= self.start_s]
        warm = [b for b in ready if self.now - b >= self.start_s + WARM_UP_S]
        pages = self.demand(self.now)
        room = len(ready) * PAGES
        served, behind = min(pages, room), max(pages - room, 0)
        return Inputs(
            replicas=self.replicas,
            engines=len(warm),
            warming=self.replicas - len(warm),
            pending=sum(self.now - b > self.auto.pending_max_seconds for b in self.born[self.room :]),
            running=int(served),
            waiting=self.waiting,
            running_pages=int(served * len(warm) / max(len(ready), 1)),
            pages_per_engine=PAGES,
            queued=int(behind),
            queue_age_ms=2000.0 if behind else 0.0,
            prefill_ready=2,
            rolling=self.rolling,
            missing="no report from gateway g" if self.missing else "",
        )

    def step(self):
        decision, self.memory = decide(self.inputs(), self.auto, self.memory, self.now)
        if decision.replicas != self.replicas or not self.history or self.history[-1][2] != decision.reason:
            self.history.append((self.now, decision.replicas, decision.reason))
        while len(self.born) < decision.replicas:
            self.born.append(self.now)
        del self.born[decision.replicas :]
        self.replicas = decision.replicas
        self.now += TICK_S
        return decision

    def run(self, seconds):
        seen = []
        end = self.now + seconds
        while self.now < end:
            seen.append(self.step().replicas)
        return seen


def auto(low=1, high=8, **rest):
    return AutoSpec(max_replicas=high, min_replicas=low, **rest)


def test_a_burst_grows_to_what_it_needs_and_shrinks_after_the_window():
    sim = Sim(auto(), 1, lambda t: 300 if 600 <= t < 3000 else 30)
    sim.run(600)
    assert sim.replicas == 1
    grown = sim.run(2400)
    assert max(grown) == grown[-1] == 5  # 300 pages at 70 of 100 each
    assert grown == sorted(grown)
    sim.run(290)
    assert sim.replicas == 5
    sim.run(900)
    assert sim.replicas == 1


def test_a_sawtooth_faster_than_the_window_does_not_flap():
    sim = Sim(auto(), 1, lambda t: 300 if int(t / 120) % 2 else 60)
    sim.run(3600)
    sim.history.clear()
    assert set(sim.run(4 * 3600)) == {5}


def test_constant_load_between_two_sizes_stays_for_a_day():
    for pages in range(50, 500, 7):
        sim = Sim(auto(), 4, lambda t, pages=pages: pages)
        sim.run(3600)
        settled = set(sim.run(24 * 3600 / 12))
        assert len(settled) == 1, pages


def test_slow_starts_ask_for_no_more_than_is_needed():
    sim = Sim(auto(high=16), 1, lambda t: 300, start_s=900.0)
    seen = sim.run(3 * 3600)
    assert max(seen) <= 7
    assert seen[-1] in (5, 6)


def test_engines_that_only_just_started_say_nothing():
    warming = Inputs(replicas=2, engines=1, warming=1, running_pages=95, pages_per_engine=PAGES)
    decision, _ = decide(warming, auto(), Memory(0.0), 1e6)
    assert (decision.replicas, decision.reason) == (2, "WarmingUp")


def test_a_pod_without_a_node_is_given_back_and_not_asked_for_at_once():
    sim = Sim(auto(pending_max_seconds=120), 2, lambda t: 500, room=3)
    sim.run(1800)
    assert max(n for _, n, _ in sim.history) > 3
    assert "PendingGivenBack" in [reason for _, _, reason in sim.history]
    given = next(i for i, (_, _, reason) in enumerate(sim.history) if reason == "PendingGivenBack")
    assert sim.history[given][1] == 3
    again = next((t for t, n, _ in sim.history[given + 1 :] if n > 3), None)
    assert again is None or again - sim.history[given][0] >= 300


def test_missing_figures_hold():
    sim = Sim(auto(), 3, lambda t: 300)
    sim.missing = True
    assert set(sim.run(7200)) == {3}
    assert {reason for _, _, reason in sim.history} == {"MetricsMissing"}
    sim.missing = False
    sim.demand = lambda t: 0
    # What was not known is no reason to shrink: the window begins anew.
    assert set(sim.run(290)) == {3}


def test_a_prefill_bottleneck_does_not_grow_decode():
    inputs = Inputs(
        replicas=2, engines=2, running=2, waiting=30, running_pages=20, reserved_pages=170, pages_per_engine=PAGES,
        queued=50, queue_age_ms=9000, prefill_ready=1,
    )  # fmt: skip
    decision, _ = decide(inputs, auto(), Memory(0.0), 1e6)
    assert (decision.replicas, decision.reason) == (2, "PrefillBound")
    assert "prefill.replicas above 1" in decision.hint


def test_requests_that_no_prefill_engine_has_room_for_do_not_grow_decode():
    """They wait in the gateway, so nothing of them is on decode."""
    held = Inputs(replicas=2, engines=2, pages_per_engine=PAGES, prefill_queued=7, prefill_queue_age_ms=900.0)
    decision, _ = decide(held, auto(), Memory(0.0), 1e6)
    assert (decision.replicas, decision.reason) == (2, "PrefillBound")
    assert "7 of 7 sequences wait for prefill" in decision.hint


def test_requests_that_wait_for_decode_as_well_as_others_for_prefill_grow_it():
    mixed = Inputs(
        replicas=2,
        engines=2,
        running=20,
        running_pages=170,
        pages_per_engine=PAGES,
        queued=3,
        queue_age_ms=900.0,
        prefill_queued=7,
        prefill_queue_age_ms=900.0,
    )
    decision, _ = decide(mixed, auto(), Memory(0.0), 1e6)
    assert decision.reason == "LoadAboveTarget"
    assert decision.replicas > 2


def test_reports_of_all_gateways_count_together():
    pods = tuple(Pod(f"g{i}", f"u{i}", PodRole.GATEWAY, "", 0.0, ready=True) for i in range(2))
    reports = (
        GatewayReport("g0", 0.0, 1, 100.0, prefill_queued=2, prefill_queue_age_ms=700.0),
        GatewayReport("g1", 0.0, 3, 50.0, prefill_queued=4, prefill_queue_age_ms=20.0),
    )
    seen = Observed("ns", "m", "u", 1, Memory(0.0), pods=pods, gateways=reports)
    told = gather(seen, 1, False, PENDING_S, 0.0)
    assert (told.queued, told.queue_age_ms, told.prefill_queued, told.prefill_queue_age_ms) == (4, 100.0, 6, 700.0)


def test_running_load_grows_decode_even_if_some_wait_for_prefill():
    inputs = Inputs(replicas=2, engines=2, running=20, waiting=5, running_pages=190, pages_per_engine=PAGES, queued=9)
    decision, _ = decide(inputs, auto(), Memory(0.0), 1e6)
    assert (decision.replicas, decision.reason) == (3, "LoadAboveTarget")


def test_one_engine_fewer_must_be_able_to_carry_it_all():
    for pages, wanted in ((65, 2), (60, 1)):
        inputs = Inputs(replicas=2, engines=2, running=1, running_pages=pages, pages_per_engine=PAGES)
        decision, _ = decide(inputs, auto(), Memory(0.0, (Wish(0, 1),)), 1e6)
        assert decision.replicas == wanted


def test_nothing_shrinks_while_engines_that_were_asked_for_are_not_warm():
    inputs = Inputs(replicas=3, engines=2, warming=1, running=1, running_pages=5, pages_per_engine=PAGES)
    decision, _ = decide(inputs, auto(), Memory(0.0, (Wish(0, 1),)), 1e6)
    assert (decision.replicas, decision.reason) == (3, "AtTarget")


def test_slow_tokens_grow_and_forbid_to_shrink():
    spec = auto(inter_token_p95_milliseconds=50)
    slow = Inputs(replicas=2, engines=2, running=9, running_pages=20, pages_per_engine=PAGES, inter_token_p95_ms=80)
    assert decide(slow, spec, Memory(0.0), 1e6)[0].replicas == 3
    fair = Inputs(replicas=2, engines=2, running=9, running_pages=20, pages_per_engine=PAGES, inter_token_p95_ms=30)
    assert decide(fair, spec, Memory(0.0, (Wish(0, 1),)), 1e6)[0].replicas == 2


def test_nothing_shrinks_in_a_rollout_and_a_burst_still_grows():
    sim = Sim(auto(), 4, lambda t: 30)
    sim.rolling = True
    assert set(sim.run(3600)) == {4}
    sim.demand = lambda t: 390
    sim.run(600)
    assert sim.replicas > 4


def test_an_idle_deployment_sleeps_and_wakes():
    sim = Sim(auto(low=0), 1, lambda t: 0)
    sim.run(600)
    assert sim.replicas == 0
    sim.demand = lambda t: 40
    sim.run(30)
    assert sim.replicas == 1
    never = Sim(auto(low=1), 1, lambda t: 0)
    assert set(never.run(3600)) == {1}


def test_bounds_rule_over_everything():
    sim = Sim(auto(2, 3), 8, lambda t: 800)
    assert sim.step().replicas == 3
    low = Sim(auto(2, 3), 1, lambda t: 0)
    assert low.step().replicas == 2


def test_an_operator_that_has_just_started_takes_nothing_away_before_a_whole_window():
    sim = Sim(auto(), 5, lambda t: 10)
    sim.memory = Memory(0.0)
    assert set(sim.run(290)) == {5}
    sim.run(60)
    assert sim.replicas < 5


def test_growth_is_limited_per_period():
    rules = ScalingRules(policies=(ScalingPolicy(PolicyType.PODS, 1, 60),))
    sim = Sim(auto(high=8, behavior=BehaviorSpec(scale_up=rules)), 1, lambda t: 60 if t < 10 else 800, start_s=0.0)
    sim.step()
    seen = sim.run(1200)
    assert seen[-1] > 4
    for early, late in zip(seen, seen[6:]):
        assert late - early <= 1


def test_disabled_never_moves_and_min_takes_the_smaller():
    disabled = BehaviorSpec(scale_up=ScalingRules(select_policy=SelectPolicy.DISABLED))
    assert bound(2, 9, disabled, Memory(0.0, (Wish(100, 9),)), 1000).replicas == 2
    both = (ScalingPolicy(PolicyType.PODS, 1, 15), ScalingPolicy(PolicyType.PERCENT, 300, 15))
    least = BehaviorSpec(scale_up=ScalingRules(select_policy=SelectPolicy.MIN, policies=both))
    most = BehaviorSpec(scale_up=ScalingRules(policies=both))
    memory = Memory(0.0, (Wish(1000, 9),))
    assert bound(2, 9, least, memory, 1000).replicas == 3
    assert bound(2, 9, most, memory, 1000).replicas == 8
    half = BehaviorSpec(scale_down=ScalingRules(0, policies=(ScalingPolicy(PolicyType.PERCENT, 50, 60),)))
    assert bound(8, 1, half, Memory(0.0, (Wish(1000, 1),)), 1000).replicas == 4


def test_wishes_are_bounded_and_their_windows_survive_it():
    memory = Memory(0.0)
    for second in range(0, 20_000, 10):
        memory = Memory(0.0, remember(memory, Wish(second, 3)))
    assert len(memory.wishes) <= 3


def engine(name, ready_at=0.0, **rest):
    return Pod(
        name, name, PodRole.DECODE, "r", 0.0, ready=True, ready_changed_at=ready_at, node="n", started=True, **rest
    )


def gateway(name):
    return Pod(name, name, PodRole.GATEWAY, "", 0.0, ready=True, node="n", started=True)


def report(name, at, load, pods=("d0",)):
    engines = tuple(EngineReport(pod, PodRole.DECODE, "f", load) for pod in pods)
    return GatewayReport(name, at, 1, 100.0, engines)


def observed(pods, gateways):
    return Observed("ns", "m", "u", 1, Memory(0.0), pods=tuple(pods), gateways=tuple(gateways))


def test_an_engine_that_two_gateways_report_counts_once_and_the_newer_report_rules():
    seen = observed(
        [engine("d0"), gateway("g0"), gateway("g1")],
        [
            report("g0", 999.0, Load(4, 1, 40, 10, 100)),
            report("g1", 990.0, Load(9, 9, 90, 10, 100)),
        ],
    )
    told = gather(seen, 1, False, PENDING_S, 1000.0)
    assert (told.running, told.waiting, told.running_pages, told.engines) == (4, 1, 40, 1)
    assert (told.queued, told.queue_age_ms) == (2, 100.0)


@pytest.mark.parametrize(
    ("gateways", "why"),
    [
        ([report("g0", 999.0, Load())], "no report from gateway g1"),
        ([report("g0", 999.0, Load()), report("g1", 900.0, Load())], "no report from gateway g1"),
        ([report("g0", 999.0, Load(), ()), report("g1", 999.0, Load(), ())], "no load of d0"),
    ],
)
def test_a_silent_gateway_or_an_unknown_engine_is_missing(gateways, why):
    seen = observed([engine("d0"), gateway("g0"), gateway("g1")], gateways)
    assert gather(seen, 1, False, PENDING_S, 1000.0).missing == why


def test_warming_and_pending_pods_are_told_apart():
    pending = Pod("d2", "d2", PodRole.DECODE, "r", 0.0)
    seen = observed(
        [engine("d0"), engine("d1", ready_at=990.0), pending, gateway("g0")],
        [report("g0", 999.0, Load(total_pages=100), ("d0", "d1"))],
    )
    told = gather(seen, 3, False, PENDING_S, 1000.0)
    assert (told.engines, told.warming, told.pending) == (1, 2, 1)


def test_a_pod_that_was_given_back_and_is_still_there_is_not_given_back_again():
    """The number is written first; until the Deployment has shrunk, the pod without a node is one too many already."""
    pending = Pod("d2", "d2", PodRole.DECODE, "r", 0.0)
    reports = [report("g0", 999.0, Load(), ("d0", "d1"))]
    seen = observed([engine("d0"), engine("d1"), pending, gateway("g0")], reports)
    assert gather(seen, 3, False, PENDING_S, 1000.0).pending == 1
    assert gather(seen, 2, False, PENDING_S, 1000.0).pending == 0


def test_a_pod_that_waits_for_the_place_of_one_that_goes_is_no_want_of_nodes():
    """One was deleted in a full cluster: its drain takes five minutes, and after two its successor was given back."""
    now = 10_000.0

    def observed(*others):
        waits = Pod("d1", "d1", PodRole.DECODE, "r", now - PENDING_S - 1)
        return Observed("ns", "m", "u", 1, Memory(0.0), pods=(waits, *others))

    old = Pod("d0", "d0", PodRole.DECODE, "r", 0.0, node="n", terminating=True, gone_by=now + 60)
    assert gather(observed(), 1, False, PENDING_S, now).pending == 1
    assert gather(observed(old), 1, False, PENDING_S, now).pending == 0
    # Its node is gone: nobody will ever say that the place is free.
    assert gather(observed(old), 1, False, PENDING_S, now + 60 + GONE_NODE_S).pending == 1
    kept = Pod("d0", "d0", PodRole.DECODE, "r", 0.0, node="n", quarantined=True)
    assert gather(observed(kept), 1, False, PENDING_S, now).pending == 0
    evicted = Pod("d0", "d0", PodRole.DECODE, "r", 0.0, node="n", terminating=True, ended_by_node="Evicted")
    assert gather(observed(evicted), 1, False, PENDING_S, now).pending == 1
    other = Pod("p0", "p0", PodRole.PREFILL, "r", 0.0, node="n", terminating=True, gone_by=now + 60)
    assert gather(observed(other), 1, False, PENDING_S, now).pending == 1
