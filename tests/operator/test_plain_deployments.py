"""At no point are fewer ready pairs served than a plain Deployment per role with the same surge would serve."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_cluster import Cluster, manifest, with_tag
from plain_deployments import PlainDeployments, ready_pairs

from sluice_operator.decide import rollout
from sluice_operator.decide.actions import Remember, Tell, WriteStatus
from sluice_operator.names import PodRole

pytestmark = pytest.mark.slow

sizes = st.integers(1, 4)
role = st.sampled_from([PodRole.PREFILL, PodRole.DECODE])
events = st.one_of(
    st.tuples(st.just("template"), st.sampled_from("ABC")),
    st.tuples(st.just("unplaceable"), st.sampled_from("BC"), st.booleans()),
    st.tuples(st.sampled_from(["delete", "restart"]), role, st.sampled_from("ABC"), st.integers(0, 3)),
    st.tuples(st.just("blind"), role, st.integers(0, 7)),
)
traces = st.lists(st.tuples(st.integers(1, 12), events), min_size=1, max_size=14)
exact = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def both(prefill, decode, surge):
    spec = manifest(
        image=with_tag("A"),
        prefill={"replicas": prefill},
        decode={"replicas": decode},
        gateway={"replicas": 1},
        rollout={"maxSurge": surge, "maxUnavailable": 0},
    )
    ours, plain = Cluster(dict(spec)), PlainDeployments(dict(spec))
    ours.work = plain.work = dict.fromkeys(ours.work, 0)
    ours.run_until_quiet(3000)
    plain.run(ours.now - plain.now)
    assert ready_pairs(ours) == ready_pairs(plain) == 1
    return ours, plain


def happen(ours, plain, event):
    match event:
        case ("template", tag):
            ours.unknown.clear()
            for cluster in (ours, plain):
                cluster.change(image=with_tag(tag))
        case ("unplaceable", tag, is_so):
            for cluster in (ours, plain):
                (cluster.unplaceable.add if is_so else cluster.unplaceable.discard)(tag)
        case ("blind", role, n):
            # Of old pods: a plain Deployment knows nothing of routes, and would not wait for a target's.
            ours.unknown.clear()
            target = ours.spec["image"]["tag"]
            if pods := [name for tag in {"A", "B", "C"} - {target} for name in ready(ours, role, tag)]:
                ours.unknown.add(sorted(pods)[n % len(pods)])
        case (what, role, tag, n):
            strike(ours, plain, what, role, tag, n)


def strike(ours, plain, what, role, tag, n):
    """The same pod of both, counted from the oldest of its revision; nothing where one of them has not as many."""
    there = [ready(cluster, role, tag) for cluster in (ours, plain)]
    if all(n < len(names) for names in there):
        for cluster, names in zip((ours, plain), there):
            getattr(cluster, what)(names[n])


def ready(cluster, role, tag=None):
    pods = [p for p in cluster.pods.values() if p.role is role and p.ready and p.gone_at is None]
    return [p.name for p in pods if tag is None or cluster.tag_of(p.revision) == tag]


def play(ours, plain, trace):
    for turns, event in [*trace, (40, None)]:
        for _ in range(turns):
            looks(ours)
            ours.tick()
            plain.step()
            assert ready_pairs(ours) >= ready_pairs(plain), state(ours, plain)
        if event is not None:
            happen(ours, plain, event)
    assert ours.broken == []


def looks(ours):
    """As long as there is something to do: a busy operator looks every 0.2 s, and no pod gets ready so fast."""
    for _ in range(8):
        actions = ours.plan()
        for action in actions:
            ours.obey(action)
        if all(isinstance(action, WriteStatus | Remember | Tell) for action in actions):
            return


def state(ours, plain):
    return {"ours": ours.engines(), "plain": plain.engines(), "log": ours.log[-12:]}


@settings(exact, max_examples=20)
@given(sizes, sizes, st.integers(1, 2), traces)
def test_any_trace_serves_as_many_ready_pairs_as_plain_deployments(prefill, decode, surge, trace):
    ours, plain = both(prefill, decode, surge)
    play(ours, plain, trace)


@pytest.mark.timeout(600)
@settings(exact, max_examples=60)
@given(sizes, sizes, st.integers(1, 2), traces)
def test_many_traces_serve_as_many_ready_pairs_as_plain_deployments(prefill, decode, surge, trace):
    ours, plain = both(prefill, decode, surge)
    play(ours, plain, trace)


def test_the_comparison_can_fail(monkeypatch):
    """An operator that lets not-ready old pods go at once, as ours did, serves less than plain Deployments."""
    monkeypatch.setattr(rollout, "clean_up_budget", lambda *_: 99)
    monkeypatch.setattr(rollout, "_keeps", lambda *_: True)
    monkeypatch.setattr(rollout, "_needed", lambda *_: 0)
    ours, plain = both(2, 3, 1)
    losses = [(10, ("delete", PodRole.DECODE, "A", 0))] * 3
    with pytest.raises(AssertionError, match="ours"):
        play(ours, plain, [(1, ("unplaceable", "B", True)), (1, ("template", "B")), *losses])


def test_the_model_of_the_deployment_controller_rolls_one_pod_at_a_time_and_keeps_what_is_wanted():
    _, plain = both(2, 3, 1)
    plain.change(image=with_tag("B"))
    seen = set()
    for _ in range(60):
        plain.step()
        pods = [p for p in plain.pods.values() if p.role is PodRole.DECODE and p.gone_at is None]
        seen.add((len(pods), sum(p.ready for p in pods) >= 3))
    assert {count for count, _ in seen} <= {3, 4}
    assert {is_whole for _, is_whole in seen} == {True}
    assert plain.engines() == {("prefill", "B"): 2, ("decode", "B"): 3}
