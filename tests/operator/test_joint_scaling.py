"""Autoscaler and rollout together, against a cluster in memory."""

from __future__ import annotations

import pytest
from operator_cluster import PAGES, TICK_S, Cluster, manifest, with_tag

from sluice_operator.api.spec import AutoSpec
from sluice_operator.decide.actions import Delete, Remember, SetDecodeReplicas, Tell, WriteStatus
from sluice_operator.names import PodRole

pytestmark = pytest.mark.slow


def scaled(replicas=2, **rest):
    scaling = {"mode": "Auto", "auto": {"maxReplicas": 6, "minReplicas": 1}}
    return Cluster(
        manifest(image=with_tag("A"), decode={"replicas": replicas, "scaling": scaling}, gateway={"replicas": 1}),
        **rest,
    )


def load(cluster, pages):
    """`pages` wanted by all sequences, spread over the ready decode engines."""
    ready = [p for p in cluster.pods.values() if p.role is PodRole.DECODE and p.ready]
    for pod in ready:
        pod.pages = min(PAGES, pages // len(ready))


def run(cluster, seconds, pages, step=None):
    end = cluster.now + seconds
    while cluster.now < end:
        load(cluster, pages)
        (step or cluster.step)()


def test_a_burst_during_a_rollout_grows_the_new_revision_and_keeps_capacity():
    cluster = scaled()
    run(cluster, 600, 1000)
    cluster.change(image=with_tag("B"))
    run(cluster, 60, 1000)
    run(cluster, 2400, 3000)
    assert cluster.broken == []
    assert cluster.spec["decode"]["replicas"] == 5
    assert cluster.engines() == {("prefill", "B"): 1, ("decode", "B"): 5}


def test_nothing_shrinks_while_a_rollout_goes_on():
    cluster = scaled(4)
    run(cluster, 600, 2400)
    cluster.room = 5  # the surge finds no node, so the rollout does not end
    cluster.change(image=with_tag("B"))
    run(cluster, 1800, 100)
    assert cluster.spec["decode"]["replicas"] == 4
    assert cluster.status.scaling.decisions[0].reason == "RollingOut"


class NodeShop:
    """A cluster autoscaler: buys a node for each pod that finds none, which takes `lead_s`, and gives back one that has
    been empty for a minute."""

    def __init__(self, cluster, lead_s):
        self.cluster, self.lead_s = cluster, lead_s
        self.ordered: list[float] = []
        self.bought = self.unused = 0
        self.empty_s = 0.0

    def look(self, seconds):
        cluster, now = self.cluster, self.cluster.now
        engines = [p for p in cluster.pods.values() if p.role is not PodRole.GATEWAY]
        waiting = sum(bool(p.unschedulable) and not p.node and p.gone_at is None for p in engines)
        arrived = [at for at in self.ordered if now - at >= self.lead_s]
        self.ordered = [at for at in self.ordered if at not in arrived]
        cluster.room += len(arrived)
        self.bought += len(arrived)
        self.ordered += [now] * max(0, waiting - len(self.ordered) - len(arrived))
        free = cluster.room - sum(bool(p.node) for p in engines)
        self.empty_s = self.empty_s + seconds if free > 0 and not waiting else 0.0
        if self.empty_s >= 60:
            cluster.room -= 1
            self.unused += 1
            self.empty_s = 0.0


def test_nodes_that_take_four_minutes_are_waited_for_and_used():
    """Pods were given back after two minutes, so that each node came too late and stood empty."""
    cluster = scaled(2, room=3)
    shop = NodeShop(cluster, 240)

    def step():
        cluster.step()
        shop.look(TICK_S)

    run(cluster, 240, 1000, step)
    run(cluster, 1080, 2500, step)
    assert cluster.engines()["decode", "A"] == cluster.spec["decode"]["replicas"] == 4
    assert (shop.bought, shop.unused) == (2, 0)
    assert "PendingGivenBack" not in [d.reason for d in cluster.status.scaling.decisions]


def test_how_long_a_pod_may_wait_for_a_node_is_the_specs_to_say():
    auto = scaled().spec["decode"]["scaling"]["auto"]
    assert AutoSpec(max_replicas=1).pending_max_seconds > 600
    for limit_s, reason in ((100, "PendingGivenBack"), (300, "LoadAboveTarget")):
        cluster = scaled(2, room=3)
        scaling = {"mode": "Auto", "auto": auto | {"pendingMaxSeconds": limit_s}}
        cluster.change(decode={"replicas": 2, "scaling": scaling})
        run(cluster, 240, 1000)
        told = len(cluster.status.scaling.decisions)
        run(cluster, 240, 2500)
        new = cluster.status.scaling.decisions[: len(cluster.status.scaling.decisions) - told]
        assert reason in [d.reason for d in new]
        assert ("PendingGivenBack" in [d.reason for d in new]) is (limit_s == 100)


def test_pods_that_find_no_node_are_given_back():
    cluster = scaled(2, room=3)
    run(cluster, 240, 1000)
    run(cluster, 2400, 2000)
    assert [d.reason for d in cluster.status.scaling.decisions].count("PendingGivenBack") >= 1
    assert cluster.spec["decode"]["replicas"] in (2, 3)
    assert cluster.engines()["decode", "A"] == 2
    assert cluster.broken == []


def test_a_changed_number_is_told_with_its_inputs_by_the_same_plan_whatever_else_was_to_be_done():
    """An action that turns out stale ends its plan there. The next one finds the number changed and nothing to tell."""
    auto = {"maxReplicas": 6, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
    scaling = {"mode": "Auto", "auto": auto}
    cluster = Cluster(
        manifest(image=with_tag("A"), decode={"replicas": 3, "scaling": scaling}, gateway={"replicas": 1})
    )
    run(cluster, 120, 1900)
    seen = []

    def watched():
        cluster.objects["ConfigMap", "m-decode-gone"] = {"metadata": {"name": "m-decode-gone"}}
        actions = cluster.plan()
        if any(isinstance(action, SetDecodeReplicas) for action in actions):
            seen.append([type(action) for action in actions])
        cluster.step()

    run(cluster, 300, 100, watched)
    assert seen
    for kinds in seen:
        assert Delete in kinds
        assert set(kinds[kinds.index(SetDecodeReplicas) + 1 :]) <= {Tell, WriteStatus, Remember}
        assert WriteStatus in kinds


@pytest.mark.parametrize("killed", [False, True])
def test_steady_load_ends_in_the_same_size_even_if_the_operator_dies_all_the_time(killed):
    cluster = scaled(2)
    step = cluster.step_killed if killed else cluster.step
    run(cluster, 1800, 2500, step)
    assert cluster.spec["decode"]["replicas"] == 4
    run(cluster, 3600, 100, step)
    assert cluster.spec["decode"]["replicas"] == 1
    assert cluster.engines() == {("prefill", "A"): 1, ("decode", "A"): 1}
    assert cluster.broken == []


def test_whoever_scales_from_outside_is_not_contradicted():
    cluster = Cluster(manifest(image=with_tag("A"), decode={"replicas": 2, "scaling": {"mode": "External"}}))
    run(cluster, 1800, 9000)
    assert cluster.spec["decode"]["replicas"] == 2
    cluster.change(decode=cluster.spec["decode"] | {"replicas": 5})
    run(cluster, 600, 0)
    assert cluster.engines()["decode", "A"] == 5
