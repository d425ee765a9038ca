"""No rollout takes away what serves before its successor does: the outages found in use, and all like them."""

from __future__ import annotations

import pytest
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.names import PodRole

TRUE = ConditionStatus.TRUE
LOOK_S = 0.2
D, P = PodRole.DECODE, PodRole.PREFILL


def served(prefill=2, decode=3, **rest):
    """A deployment of revision A that is complete."""
    cluster = Cluster(manifest(image=with_tag("A"), prefill={"replicas": prefill}, decode={"replicas": decode}) | rest)
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is TRUE
    return cluster


def stuck(**rest):
    """One whose rollout to B finds no node."""
    cluster = served(**rest)
    cluster.unplaceable.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run(120)
    return cluster


def ready(cluster, role, tag="A"):
    return sorted(
        p.name for p in cluster.pods.values() if p.role is role and p.ready and cluster.tag_of(p.revision) == tag
    )


def wanted(cluster, role, tag="A"):
    return sum(d.replicas for d in cluster.deployments.values() if d.role is role and cluster.tag_of(d.revision) == tag)


def drained(cluster, since=0):
    return [line for line in cluster.log[since:] if line.startswith(("drain", "close", "delete Pod"))]


def test_a_gateway_that_is_blind_to_an_engine_for_one_look_costs_no_engine():
    cluster = stuck()
    told = len(cluster.log)
    cluster.unknown.add(ready(cluster, D)[0])
    cluster.step(LOOK_S)
    cluster.unknown.clear()
    cluster.run(120)
    assert drained(cluster, told) == []
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}


@pytest.mark.parametrize("role", [P, D])
def test_nor_does_one_that_stays_blind_while_the_floor_needs_the_engine(role):
    cluster = stuck()
    told = len(cluster.log)
    cluster.unknown.add(ready(cluster, role)[0])
    cluster.run(300)
    assert drained(cluster, told) == []
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}


def test_an_engine_that_is_not_routed_to_takes_no_partner_along():
    """Decode looked short for a moment, so that one prefill engine seemed to be too many."""
    cluster = stuck(prefill=3, decode=3)
    told = len(cluster.log)
    cluster.unknown.add(ready(cluster, D)[0])
    cluster.run(300)
    assert drained(cluster, told) == []


def test_losing_old_pods_one_by_one_while_the_target_finds_no_node_costs_none_of_them():
    cluster = stuck()
    for _ in range(4):
        cluster.delete(ready(cluster, D)[0])
        cluster.run(120)
        assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}
    assert cluster.broken == []


def test_a_lost_decode_engine_takes_no_prefill_engine_along():
    cluster = stuck(prefill=3, decode=3)
    cluster.delete(ready(cluster, D)[0])
    cluster.run(120)
    assert cluster.engines() == {("prefill", "A"): 3, ("decode", "A"): 3}


def test_a_container_that_was_killed_for_its_memory_has_its_place_back():
    cluster = stuck()
    for role in (D, P):
        cluster.restart(ready(cluster, role)[0])
        cluster.run(120)
        assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}


def test_a_drained_pod_is_made_anew_when_its_successor_is_lost_meanwhile():
    cluster = served(1, 2)
    cluster.work[D] = 4
    cluster.change(image=with_tag("B"))
    while not any(p.draining for p in cluster.pods.values() if p.role is D):
        cluster.step()
    cluster.unplaceable.add("B")
    for name in ready(cluster, D, "B") + ready(cluster, P, "B"):
        cluster.delete(name)
    cluster.run(300)
    assert cluster.engines() == {("prefill", "A"): 1, ("decode", "A"): 2}


def crash(cluster, *names):
    for name in names:
        cluster.pods[name].bad, cluster.pods[name].started = True, False


def test_a_failed_old_pod_makes_room_for_a_target_that_finds_none():
    """All GPUs are held by pods of the old revision, and these have failed for good."""
    cluster = served(2, 2)
    cluster.room = 4
    crash(cluster, *ready(cluster, P), *ready(cluster, D))
    cluster.run(60)
    cluster.bad.add("A")
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}


def test_the_place_of_a_failed_old_pod_is_not_lost_when_the_target_cannot_use_it():
    cluster = stuck()
    crash(cluster, ready(cluster, D)[0])
    cluster.run(600)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}
    assert wanted(cluster, D) == 3
    assert cluster.broken == []


def test_what_was_lost_to_an_earlier_fault_grows_again_while_the_target_is_of_no_use():
    """An operator of before has let all of decode go, Deployment and all."""
    cluster = stuck()
    for name in [n for n, d in cluster.deployments.items() if d.role is D and cluster.tag_of(d.revision) == "A"]:
        del cluster.deployments[name]
    for name in ready(cluster, D):
        cluster.lose(name)
    cluster.run(300)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}
    assert cluster.broken == []


def test_more_decode_engines_are_of_the_good_revision_while_the_target_is_of_no_use():
    cluster = stuck()
    cluster.change(decode={"replicas": 5})
    cluster.run(300)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 5}
    cluster.unplaceable.clear()
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 5}
    assert cluster.broken == []


def test_a_gateway_that_does_not_report_costs_nothing_that_may_come_back():
    cluster = stuck()
    cluster.routing = False
    cluster.delete(ready(cluster, D)[0])
    cluster.run(120)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 3}


NOTHING = [({"prefill": 0, "decode": 0}), ({"decode": 0}), ({"prefill": 0})]


@pytest.mark.parametrize("nothing", NOTHING, ids=lambda nothing: "+".join(nothing))
@pytest.mark.parametrize("at_once", [False, True], ids=["edit, then wake", "edit and wake in one"])
@pytest.mark.parametrize("finds_nodes", [True, False], ids=["well", "nowhere to run"])
def test_a_revision_that_has_given_up_its_last_place_does_not_come_back_beside_another(nothing, at_once, finds_nodes):
    """The spec was edited while nothing was wanted: on the wish for pods the old revision grew beside the new one."""
    cluster = served()
    cluster.change(prefill={"replicas": 0}, decode={"replicas": 0})
    cluster.run_until_quiet(3000)
    if len(nothing) == 1 and not at_once:  # a new revision that has completed with one role alone
        cluster.change(image=with_tag("B"), prefill={"replicas": nothing.get("prefill", 2)},
                       decode={"replicas": nothing.get("decode", 3)})  # fmt: skip
        cluster.run_until_quiet(3000)
    if not finds_nodes:
        cluster.unplaceable.add("B")
    if not at_once:
        cluster.change(image=with_tag("B"))
        cluster.run_until_quiet(3000)
    grown = {}

    def look():
        cluster.step()
        for role in (P, D):
            grown[role] = max(grown.get(role, 0), wanted(cluster, role))

    cluster.change(image=with_tag("B"), prefill={"replicas": 2}, decode={"replicas": 3})
    for _ in range(300):
        look()
    assert grown == {P: 0, D: 0}
    assert (wanted(cluster, P, "B"), wanted(cluster, D, "B")) == (2, 3)
    if finds_nodes:
        assert cluster.condition("Ready").status is TRUE
