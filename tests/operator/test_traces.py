"""Joint traces: rollouts, scaling, lost pods, pauses, in any order, and an operator that dies all the time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus

pytestmark = pytest.mark.slow

QUIET_S = 3000.0

sizes = st.integers(1, 4)
limits = st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0)])
events = st.one_of(
    st.tuples(st.just("image"), st.sampled_from("ABC")),
    st.tuples(st.just("prefill"), sizes),
    st.tuples(st.just("decode"), st.integers(0, 4)),
    st.tuples(st.just("lose"), st.integers(0, 20)),
    st.tuples(st.just("restart"), st.integers(0, 20)),
    st.tuples(st.just("wedge"), st.integers(0, 20)),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("gateways"), st.booleans()),
    st.tuples(st.just("room"), st.integers(0, 12)),
    st.tuples(st.just("bad"), st.sampled_from("BC")),
)
# In mode Auto the number is the operator's, and load is what happens.
loads = st.one_of(events.filter(lambda event: event[0] != "decode"), st.tuples(st.just("pages"), st.integers(0, 3000)))
traces = st.lists(st.tuples(st.integers(1, 16), events), max_size=8)
loaded = st.lists(st.tuples(st.integers(1, 30), loads), max_size=8)


def start(prefill, decode, limit):
    surge, unavailable = limit
    return Cluster(
        manifest(
            image=with_tag("A"),
            prefill={"replicas": prefill},
            decode={"replicas": decode},
            gateway={"replicas": 1},
            rollout={"maxSurge": surge, "maxUnavailable": unavailable},
        )
    )


def happen(cluster, event):
    match event:
        case ("image", tag):
            cluster.change(image=with_tag(tag))
        case ("prefill", n):
            cluster.change(prefill={"replicas": n})
        case ("decode", n):
            cluster.change(decode={"replicas": n})
        case ("pause", paused):
            cluster.change(paused=paused)
        case ("room", room):
            cluster.room = room
        case ("bad", tag):
            cluster.bad.add(tag)
        case ("pages", pages):
            cluster.pages = pages
        case ("gateways", routing):
            cluster.routing = routing
        case (what, n):
            engines = [p for p in cluster.pods.values() if p.role.value != "gateway" and p.gone_at is None]
            if engines:
                strike(cluster, what, engines[n % len(engines)])


def strike(cluster, what, pod):
    if what == "lose":
        cluster.lose(pod.name)
    elif what == "wedge" and pod.started:
        pod.wedged = True
    elif what == "restart":
        pod.started = pod.ready = pod.draining = False
        pod.scheduled = cluster.now


def heal(cluster):
    """What is wrong with the world ends; what was asked for is asked for once more, if it was taken back."""
    cluster.routing, cluster.room = True, 1000
    cluster.change(paused=False)
    if cluster.spec["image"]["tag"] in cluster.bad:
        cluster.change(image=with_tag("D"))
    cluster.bad.clear()


def play(cluster, trace, step):
    for turns, event in trace:
        for _ in range(turns):
            step()
        happen(cluster, event)
    heal(cluster)
    cluster.run_until_quiet(QUIET_S, step)
    if cluster.condition("Progressing").reason == "RolledBack":
        # Held for what is over by now: only a change of the spec ends that.
        cluster.change(image=with_tag("E"))
        cluster.run_until_quiet(QUIET_S, step)
    return cluster


def assert_served(cluster):
    spec = cluster.spec
    tag, wanted = spec["image"]["tag"], {"prefill": spec["prefill"]["replicas"], "decode": spec["decode"]["replicas"]}
    assert cluster.broken == []
    assert cluster.engines() == {(role, tag): n for role, n in wanted.items() if n}
    assert [d.revision for d in cluster.deployments.values() if d.role.value == "prefill"] == [cluster.status.revision]
    assert all(p.gone_at is None and not p.quarantined for p in cluster.pods.values())


# Deterministic: a failure that nobody can repeat helps nobody.
exact = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@settings(exact, max_examples=12)
@given(sizes, sizes, limits, traces)
def test_any_trace_ends_in_what_was_asked_for_and_breaks_no_invariant(prefill, decode, limit, trace):
    cluster = start(prefill, decode, limit)
    play(cluster, trace, cluster.step)
    assert_served(cluster)


@settings(exact, max_examples=6)
@given(sizes, sizes, limits, traces)
def test_an_operator_that_dies_and_forgets_after_every_action_ends_in_the_same_state(prefill, decode, limit, trace):
    steady, killed = start(prefill, decode, limit), start(prefill, decode, limit)
    play(steady, trace, steady.step)
    play(killed, trace, killed.step_killed)
    assert_served(killed)
    assert killed.end_state() == steady.end_state()


def auto(prefill, limit):
    cluster = start(prefill, 2, limit)
    scaling = {"mode": "Auto", "auto": {"minReplicas": 1, "maxReplicas": 6}}
    cluster.change(decode={"replicas": 2, "scaling": scaling})
    return cluster


@settings(exact, max_examples=6)
@given(sizes, limits, loaded, st.booleans())
def test_with_an_autoscaler_that_changes_the_number_all_the_time_too(prefill, limit, trace, killed):
    cluster = auto(prefill, limit)
    play(cluster, trace, cluster.step_killed if killed else cluster.step)
    assert_served(cluster)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(exact, max_examples=80)
@given(sizes, limits, loaded)
def test_many_traces_with_an_autoscaler(prefill, limit, trace):
    for killed in (False, True):
        cluster = auto(prefill, limit)
        play(cluster, trace, cluster.step_killed if killed else cluster.step)
        assert_served(cluster)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(exact, max_examples=120)
@given(sizes, sizes, limits, traces)
def test_many_traces(prefill, decode, limit, trace):
    for killed in (False, True):
        cluster = start(prefill, decode, limit)
        play(cluster, trace, cluster.step_killed if killed else cluster.step)
        assert_served(cluster)


def test_once_all_is_as_it_should_be_nothing_is_done():
    cluster = start(2, 2, (1, 0))
    cluster.run(600)
    assert cluster.condition("Ready").status is ConditionStatus.TRUE
    writes, told = cluster.status_writes, len(cluster.log)
    cluster.run(3600)
    assert (cluster.status_writes, len(cluster.log)) == (writes, told)
