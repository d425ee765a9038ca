"""Rollouts and drains end to end: a real API server, pods that kwok plays, and fakes of engines and gateways."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from audit_log import seconds
from capacity_watch import CapacityWatch
from cluster_deployment import Served, gate_of, image_of, is_engine, uids
from node_pools import GPU, POOL, node
from operator_cluster import with_tag
from operator_process import OperatorProcess

from sluice_operator.live.cluster import KINDS
from sluice_operator.names import PodRole

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SLOW_START = {"metadata": {"annotations": {"sluice.test/start-delay": "600s"}}}


@pytest.fixture
def operator(plane, namespace, crd, fleet):
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}") as running:
        yield running


@pytest.fixture
def engines(fleet):
    """All that there ever were, each with work that a drain brings to its end."""
    seen = []

    def born(engine):
        engine.running = 3
        seen.append(engine)

    fleet.on_engine = born
    return seen


def tags(pods):
    return [image_of(pod).rpartition(":")[2] for pod in pods if is_engine(pod)]


def test_every_engine_is_replaced_after_a_drain_and_all_the_while_as_many_serve(operator, served, engines):
    served.create(prefill={"replicas": 2}, decode={"replicas": 3})
    served.until_served("1")
    old = list(engines)
    with CapacityWatch(served, prefill=2, decode=3) as watch:
        served.roll_to("2")
        served.until_served("2")
    assert watch.looks > 10
    assert watch.least >= 1
    assert watch.most_pods == {PodRole.PREFILL: 3, PodRole.DECODE: 4}
    assert len(old) == 5
    assert all(engine.drains and engine.running == 0 for engine in old)


def test_back_before_anything_new_served_nothing_old_is_touched(operator, served, engines):
    served.create(prefill={"replicas": 2}, decode={"replicas": 2})
    served.until_served("1")
    before = uids(served.engines())
    with CapacityWatch(served, prefill=2, decode=2) as watch:
        served.change(image=with_tag("2"), prefill={"template": SLOW_START}, decode={"template": SLOW_START})
        served.until_children("Pod", lambda pods: tags(pods).count("2") == 2)
        served.change(image=with_tag("1"), prefill={"template": None}, decode={"template": None})
        served.until_served("1")
    assert uids(served.engines()) == before
    assert watch.least >= 1
    assert not any(engine.drains for engine in engines)


def test_back_from_the_middle_ends_where_it_began_and_keeps_its_capacity(operator, served, engines):
    served.create(prefill={"replicas": 2}, decode={"replicas": 2})
    served.until_served("1")
    with CapacityWatch(served, prefill=2, decode=2) as watch:
        served.roll_to("2")
        served.until_children("Pod", lambda pods: tags(pods).count("2") >= 2 and tags(pods).count("1") <= 3)
        served.roll_to("1")
        served.until_served("1")
    assert watch.least >= 1
    assert len(served.engines()) == 4
    revisions = list(served.children("ControllerRevision"))
    assert {r["metadata"]["labels"]["sluice.dev/revision"] for r in revisions} >= {served.status()["revision"]}


def test_a_failing_revision_is_taken_back_and_held_until_the_spec_changes(plane, operator, served, engines):
    served.create(prefill={"replicas": 1}, decode={"replicas": 2})
    served.until_served("1")
    crashing = {"metadata": {"annotations": {"sluice.test/fail": "bad weights", "sluice.test/restarts": "3"}}}
    with CapacityWatch(served, prefill=1, decode=2) as watch:
        served.change(image=with_tag("2"), decode={"template": crashing})
        served.until("Progressing", "False", "RolledBack")
        served.until_children("Pod", lambda pods: set(tags(pods)) == {"1"} and len(tags(pods)) == 3)
        # Held: neither the operator's next life nor a change that makes no other revision tries it again.
        assert operator.stop() == 0
        operator.start()
        operator.wait_for("leading")
        served.change(gateway={"maxQueued": 512})
        told = served.until("Progressing", "False", "RolledBack")
        assert "CrashLoop" in told["message"]
        assert set(tags(served.children("Pod"))) == {"1"}
    assert watch.least >= 1
    assert watch.most_pods[PodRole.DECODE] <= 3
    served.change(decode={"template": None})
    served.until_served("2")


def test_a_surge_that_finds_no_node_is_said_and_its_remedy_works(client, plane, namespace, crd, fleet, engines):
    client.create("/api/v1/nodes", node(namespace, major=10, product="NVIDIA-B200", gpus=2))
    served = Served(client, namespace)
    template = {"spec": {"nodeSelector": {POOL: namespace}}}
    roles = {role: {"replicas": 1, "template": template} for role in ("prefill", "decode")}
    gateway = {"replicas": 1, "template": template}
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}", "--nodes"):
        served.create(accelerator={"type": "GPU", "gpu": {"computeMajor": [10]}}, gateway=gateway, **roles)
        served.until_served("1")
        with CapacityWatch(served, prefill=1, decode=1) as watch:
            served.roll_to("2")
            told = served.until("Progressing", "False", "SurgeUnschedulable")
            assert f"Insufficient {GPU}" in told["message"]
            assert "set rollout.maxSurge to 0 and rollout.maxUnavailable to 1" in told["message"]
            assert sorted(tags(served.children("Pod"))) == ["1", "1", "2", "2"]
        assert watch.least >= 1
        served.change(rollout={"maxSurge": 0, "maxUnavailable": 1})
        served.until_served("2")


def test_paused_in_its_middle_it_stands_still_and_then_goes_on(plane, operator, served, engines):
    served.create(prefill={"replicas": 2}, decode={"replicas": 2})
    served.until_served("1")
    with CapacityWatch(served, prefill=2, decode=2) as watch:
        served.roll_to("2")
        served.until_children("Pod", lambda pods: tags(pods).count("2") >= 1)
        served.change(paused=True)
        served.until("Progressing", "Unknown", "Paused")
        scaled = replicas(served)
        looked = operator.status()["reconciles"]
        served.client.merge(served.path, {"metadata": {"labels": {"touched": "1"}}})
        operator.until(lambda status: status["reconciles"] >= looked + 3)
        assert replicas(served) == scaled
        assert served.condition("Progressing")["reason"] == "Paused"
        served.change(paused=False)
        served.until_served("2")
    assert watch.least >= 1


def replicas(served):
    return {d["metadata"]["name"]: d["spec"]["replicas"] for d in served.children("Deployment")}


# -- drains -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drained(served, fleet):
    """(the one that is drained and does not finish by itself, the other one), decode on its way from 2 to 1."""

    def start(timeout_s):
        def busy(engine):
            engine.holds, engine.running = True, 2

        fleet.on_engine = busy
        served.create(prefill={"replicas": 1}, decode={"replicas": 2}, drain={"timeoutSeconds": timeout_s})
        served.until("Ready", "True")
        fleet.until(lambda: len(fleet.of("decode")) == 2)
        keeper = fleet.of("decode")[0]
        keeper.running = 9
        served.change(decode={"replicas": 1})
        (victim,) = fleet.until(lambda: [engine for engine in fleet.of("decode") if engine.draining])
        served.until_children("Pod", lambda pods: gate_of(pods, victim.pod) == "False")
        return victim, keeper

    return start


def until_only(served, fleet, keeper):
    def decodes(pods):
        return [p["metadata"]["name"] for p in pods if p["metadata"]["labels"]["sluice.dev/role"] == "decode"]

    served.until_children("Pod", lambda pods: decodes(pods) == [keeper.pod])
    served.until("Progressing", "True", "Complete")
    served.until("Ready", "True")
    assert (keeper.drains, keeper.running) == (0, 9)


def test_a_victim_that_does_not_finish_goes_when_its_time_is_over(operator, served, fleet, drained):
    victim, keeper = drained(timeout_s=6)
    gate = gate_times(served, victim.pod)
    until_only(served, fleet, keeper)
    # Conditions are told in whole seconds.
    assert time.time() - gate >= 5
    assert victim.running == 2


def test_a_victim_whose_container_dies_is_still_the_victim(operator, served, fleet, drained):
    victim, keeper = drained(timeout_s=600)
    pod = KINDS["Pod"].path(served.namespace, victim.pod)
    fleet.on_engine = lambda engine: None
    served.client.merge(pod, {"metadata": {"annotations": {"sluice.test/fail": "out of memory"}}})
    served.client.until(pod, lambda there: there["status"]["containerStatuses"][0]["restartCount"] == 1)
    served.client.merge(pod, {"metadata": {"annotations": {"sluice.test/fail": None}}})
    # Its next life knows of no drain and has no work: it is told again, or found empty.
    until_only(served, fleet, keeper)


def test_a_victim_that_is_gone_is_not_missed(operator, served, fleet, drained):
    victim, keeper = drained(timeout_s=600)
    # Its ReplicaSet may make another one before the Deployment has shrunk: then that one goes, without any work.
    fleet.on_engine = lambda engine: None
    served.client.delete(KINDS["Pod"].path(served.namespace, victim.pod))
    until_only(served, fleet, keeper)


def gate_times(served, name):
    pod = served.client.get(KINDS["Pod"].path(served.namespace, name))
    return next(seconds(c["lastTransitionTime"]) for c in pod["status"]["conditions"] if "serving" in c["type"])


# -- drains of nodes --------------------------------------------------------------------------------------------------


def test_a_node_can_be_drained_while_a_surge_finds_no_place(client, plane, namespace, crd, nodes, fleet):
    """Old and new pods share one budget: counted against the replicas of both Deployments, it let none go."""
    pool = {"nodeSelector": {POOL: namespace}}
    for name in "ab":
        client.create("/api/v1/nodes", node(namespace, f"{namespace}-{name}"))
    going, staying = f"pool-{namespace}-a", f"pool-{namespace}-b"
    served = Served(client, namespace)
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}"):
        roles = {"prefill": {"replicas": 2, "template": {"spec": pool}}}
        roles["decode"] = {"replicas": 3, "template": {"spec": pool}}
        served.create(**roles)
        served.until_served("1")
        nowhere = {"template": {"spec": {"nodeSelector": {POOL: "nowhere"}}}}
        served.change(image=with_tag("2"), prefill=nowhere, decode=nowhere)
        served.until("Progressing", "False", "SurgeUnschedulable")
        before = uids(on(going, served.engines()))
        assert before
        with CapacityWatch(served, prefill=2, decode=3) as watch:
            # Through the Eviction API, one pod after the other, as the budgets allow.
            plane.kubectl("drain", going, "--delete-emptydir-data", "--timeout=50s")
        assert watch.least >= min(Fraction(1, 2), Fraction(2, 3))
        served.until_children("Pod", lambda pods: tags(on(staying, pods)) == ["1"] * 5)
        assert not before & uids(served.engines())
    assert_one_budget_each(client, served)


def on(node_name, pods):
    return [pod for pod in pods if pod["spec"].get("nodeName") == node_name]


def assert_one_budget_each(client, served):
    """The Eviction API refuses a pod that two budgets select."""
    budgets = [b["spec"]["selector"]["matchLabels"] for b in served.children("PodDisruptionBudget")]
    for pod in served.children("Pod"):
        assert sum(labels.items() <= pod["metadata"]["labels"].items() for labels in budgets) == 1


def test_a_budget_that_counts_otherwise_is_put_right_and_follows_the_spec(client, operator, served):
    served.create()
    served.until("Ready", "True")
    path = KINDS["PodDisruptionBudget"].path(served.namespace, "m-decode")
    client.merge(path, {"spec": {"minAvailable": None, "maxUnavailable": 1}})
    told = client.until(path, lambda there: there["spec"] if "minAvailable" in there["spec"] else None)
    assert (told["minAvailable"], told.get("maxUnavailable")) == (0, None)
    served.change(decode={"replicas": 3})
    client.until(path, lambda there: there["spec"]["minAvailable"] == 2)
