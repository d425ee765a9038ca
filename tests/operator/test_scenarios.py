"""What happens to a deployment, told with a cluster in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
from operator_cluster import TICK_S, Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.decide.observed import Owner, Termination
from sluice_operator.names import PodRole
from sluice_operator.render.revision import StandardRenderer

TRUE, FALSE = ConditionStatus.TRUE, ConditionStatus.FALSE


def served(prefill=2, decode=2, **rest):
    """A deployment of revision A that is complete."""
    cluster = Cluster(manifest(image=with_tag("A"), prefill={"replicas": prefill}, decode={"replicas": decode}) | rest)
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is TRUE
    return cluster


def taken_back():
    """One whose rollout to B has failed."""
    cluster = served()
    cluster.bad.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(3000)
    return cluster


def pods_of(cluster, role, tag=None):
    return [
        p
        for p in cluster.pods.values()
        if p.role is role and p.gone_at is None and (tag is None or cluster.tag_of(p.revision) == tag)
    ]


def test_a_change_of_the_gateways_that_fails_is_told_and_is_not_complete():
    """The old ones serve on, without what was asked for."""
    cluster = served(gateway={"replicas": 2})
    cluster.new_gateways_fail = True
    cluster.change(gateway={"replicas": 2, "maxQueued": 77})
    cluster.run(300)
    told = cluster.condition("GatewayReady")
    assert (told.status, told.reason) == (FALSE, "CrashLoop")
    assert cluster.condition("Ready").status is FALSE
    assert cluster.condition("Progressing").reason == "RollingOut"
    gateway = cluster.status.roles.gateway
    assert (gateway.desired, gateway.ready, gateway.updated) == (2, 2, 1)
    for pod in pods_of(cluster, PodRole.GATEWAY):
        pod.bad = False
    cluster.new_gateways_fail = False
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is TRUE
    assert cluster.condition("Progressing").reason == "Complete"
    assert cluster.status.roles.gateway.updated == 2


@pytest.mark.slow
def test_a_revision_that_was_taken_back_is_tried_again_when_its_mark_is_taken_away():
    """What its message says of a cause that lay outside of the spec."""
    cluster = taken_back()
    assert cluster.condition("Progressing").reason == "RolledBack"
    assert (
        "kubectl label controllerrevision -n NAMESPACE NAME-REVISION sluice.dev/verdict-"
        in cluster.condition("Ready").message
    )
    cluster.bad.clear()
    (failed,) = [r for r in cluster.revisions.values() if r["metadata"]["labels"].get("sluice.dev/verdict") == "failed"]
    del failed["metadata"]["labels"]["sluice.dev/verdict"]
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}
    assert cluster.condition("Ready").status is TRUE


def test_the_first_broken_link_is_the_reason():
    cluster = Cluster(manifest(image=with_tag("A")))
    reasons = []
    for _ in range(30):
        cluster.step()
        if not reasons or reasons[-1] != cluster.status.reason:
            reasons.append(cluster.status.reason)
    assert reasons[:2] == ["NodesUnknown", "Starting"]
    assert reasons[-1] == ""
    assert cluster.status.roles.decode.summary == "1/1"
    assert cluster.status.routable == 1


@pytest.mark.slow
def test_a_rollout_that_fails_is_taken_back_and_held_until_the_spec_changes():
    cluster = taken_back()
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 2}
    assert pods_of(cluster, PodRole.DECODE, "B") == []
    progressing = cluster.condition("Progressing")
    assert (progressing.status, progressing.reason) == (FALSE, "RolledBack")
    assert "CrashLoop" in progressing.message
    assert cluster.status.reason == "RolledBack"
    grown = [line for line in cluster.log if line.startswith("scale Deployment m-prefill-")]
    cluster.run(3600)
    assert [line for line in cluster.log if line.startswith("scale Deployment m-prefill-")] == grown
    cluster.change(image=with_tag("C"))
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "C"): 2, ("decode", "C"): 2}
    assert cluster.condition("Progressing").reason == "Complete"
    assert cluster.broken == []


def test_a_rollout_whose_sidecar_has_no_image_is_taken_back_and_says_which():
    """The engine runs, the pod is never ready."""
    cluster = served()
    cluster.bad_sidecar.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run(200)
    told = cluster.condition("PrefillReady")
    assert told.reason == "ImagePullFailed"
    assert "container proxy: ImagePullBackOff" in told.message
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 2}
    assert cluster.condition("Progressing").reason == "RolledBack"
    assert cluster.condition("Ready").message.count("ImagePullFailed")
    assert cluster.broken == []


def test_a_hold_outlives_an_operator_that_forgets_everything():
    cluster = served()
    cluster.bad.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(3000, cluster.step_killed)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 2}
    assert cluster.condition("Progressing").reason == "RolledBack"


def test_a_failed_revision_may_be_tried_again_after_another():
    cluster = taken_back()
    cluster.change(image=with_tag("A"))
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is TRUE
    cluster.bad.clear()
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}


def test_a_failed_revision_that_is_still_there_is_tried_again_too():
    cluster = taken_back()
    cluster.bad.clear()
    cluster.change(image=with_tag("A"))
    cluster.step()
    assert "B" in {cluster.tag_of(name.split("-")[1]) for name in cluster.revisions}
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}


def test_a_first_revision_that_fails_has_nothing_to_go_back_to_and_says_why():
    cluster = Cluster(manifest(image=with_tag("A")), bad={"A"})
    cluster.run(600)
    assert cluster.status.reason == "CrashLoop"
    assert "bad weights" in cluster.condition("PrefillReady").message
    assert cluster.status.incidents[0].message == "bad weights"


def test_a_broken_revision_can_be_replaced():
    cluster = Cluster(manifest(image=with_tag("A")), bad={"A"})
    cluster.run(300)
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 1, ("decode", "B"): 1}


@pytest.mark.parametrize("turns", [1, 4, 7, 10, 14, 18, 25])
def test_going_back_in_the_middle_keeps_capacity_at_every_step(turns):
    cluster = served(3, 2)
    cluster.change(image=with_tag("B"))
    for _ in range(turns):
        cluster.step()
    cluster.change(image=with_tag("A"))
    while cluster.condition("Progressing").reason != "Complete" or cluster.engines() != {
        ("prefill", "A"): 3,
        ("decode", "A"): 2,
    }:
        cluster.step()
        has, least, _ = cluster.capacity()
        assert has >= least
        assert cluster.now < 1_010_000
    assert cluster.broken == []


def test_a_surge_without_room_says_so_and_the_remedy():
    cluster = served()
    cluster.room = 4
    cluster.change(image=with_tag("B"))
    cluster.run(600)
    progressing = cluster.condition("Progressing")
    assert progressing.reason == "SurgeUnschedulable"
    assert "Insufficient nvidia.com/gpu" in progressing.message
    assert "maxUnavailable" in progressing.message
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 2}
    cluster.change(rollout={"maxSurge": 0, "maxUnavailable": 1})
    cluster.run_until_quiet(5000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}
    assert cluster.broken == []


def test_an_old_pod_goes_only_after_every_gateway_sees_its_successor():
    cluster = served()
    cluster.routing = False
    cluster.change(image=with_tag("B"))
    cluster.run(900)
    assert cluster.engines()["prefill", "A"] == cluster.engines()["decode", "A"] == 2
    assert cluster.condition("Routable").reason == "NoGatewayReport"
    cluster.routing = True
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}


def test_pause_stops_everything_but_status_and_new_pods_still_get_ready():
    cluster = served()
    cluster.change(paused=True, image=with_tag("B"), decode={"replicas": 4})
    cluster.lose(pods_of(cluster, PodRole.DECODE)[0].name)
    told = len(cluster.log)
    cluster.run(300)
    assert all(line.startswith("open readiness gate") for line in cluster.log[told:])
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 2}
    assert cluster.condition("Progressing").reason == "Paused"


def test_scaling_down_drains_the_pod_with_the_least_work_and_no_other():
    cluster = served(1, 3)
    cluster.work[PodRole.DECODE] = 4
    cluster.run(10)
    lazy = pods_of(cluster, PodRole.DECODE)[1]
    cluster.change(decode={"replicas": 2})
    lazy.running = 1
    cluster.run_until_quiet(3000)
    assert [line for line in cluster.log if line.startswith("drain")] == [f"drain Pod {lazy.name}"]
    assert lazy.name not in cluster.pods
    assert cluster.broken == []


def test_a_drain_that_never_ends_has_its_time():
    cluster = served(1, 2)
    cluster.change(decode={"replicas": 1})
    cluster.step()
    victim = next(p for p in cluster.pods.values() if p.draining)
    began = cluster.now
    while victim.name in cluster.pods and victim.gone_at is None:
        victim.running = 9
        cluster.step()
        assert cluster.now < began + 200
    assert cluster.now - began >= 30 - 2 * TICK_S


def test_a_drain_that_nobody_wants_any_more_ends_in_a_new_pod():
    cluster = served(1, 2)
    cluster.work[PodRole.DECODE] = 3
    cluster.change(decode={"replicas": 1})
    cluster.step()
    victim = next(p for p in cluster.pods.values() if p.draining)
    cluster.change(decode={"replicas": 2})
    cluster.run_until_quiet(3000)
    assert victim.name not in cluster.pods
    assert cluster.engines()["decode", "A"] == 2
    assert cluster.broken == []


def test_a_pod_that_flaps_is_not_killed_in_place_of_the_one_that_was_drained():
    cluster = served(1, 3)
    cluster.work[PodRole.DECODE] = 5
    cluster.run(10)
    cluster.change(decode={"replicas": 2})
    cluster.step()
    victim = next(p for p in cluster.pods.values() if p.draining)
    other = next(p for p in pods_of(cluster, PodRole.DECODE) if p is not victim)
    other.flapping = True
    cluster.run(25)
    assert other.name in cluster.pods
    assert other.gone_at is None
    other.flapping = False
    cluster.run_until_quiet(3000)
    assert other.name in cluster.pods
    assert victim.name not in cluster.pods
    assert cluster.broken == []


def test_a_wedged_pod_is_kept_for_a_while_and_replaced_at_once():
    cluster = served(1, 2)
    wedged = pods_of(cluster, PodRole.DECODE)[0]
    wedged.wedged = True
    wedged.terminations = (Termination(1, 3, "Error", "SchedulerFrozen: leader in plan", cluster.now),)
    cluster.run(60)
    assert cluster.pods[wedged.name].quarantined
    assert cluster.engines()["decode", "A"] == 2
    assert cluster.status.roles.decode.quarantined == 1
    assert cluster.condition("Degraded").reason == "PodsQuarantined"
    assert cluster.status.incidents[0].reason == "Wedged"
    assert {f"incident-{wedged.name}.1", f"kept-{wedged.name}"} <= cluster.events.keys()
    cluster.run_until_quiet(3000)
    assert wedged.name not in cluster.pods


def test_beyond_the_limit_wedged_pods_are_replaced_and_not_kept():
    cluster = served(1, 3)
    wedged = pods_of(cluster, PodRole.DECODE)[:2]
    for pod in wedged:
        pod.wedged = True
    cluster.run(60)
    assert sum(p.quarantined for p in cluster.pods.values()) == 1
    assert cluster.engines()["decode", "A"] == 3


def test_a_strangers_service_stays_untouched_and_is_named():
    cluster = Cluster(manifest(image=with_tag("A")))
    stranger = {"kind": "Service", "metadata": {"name": "m-gateway"}, "spec": {"type": "ExternalName"}}
    cluster.objects["Service", "m-gateway"] = stranger
    cluster.owners["Service", "m-gateway"] = Owner.STRANGER
    before = copy.deepcopy(stranger)
    cluster.run(120)
    assert cluster.objects == {("Service", "m-gateway"): before}
    accepted = cluster.condition("Accepted")
    assert (accepted.status, accepted.reason) == (FALSE, "NameConflict")
    assert "Service m-gateway" in accepted.message
    assert cluster.status.reason == "NameConflict"


def test_children_of_a_deleted_namesake_are_waited_for():
    cluster = Cluster(manifest(image=with_tag("A")))
    cluster.objects["ServiceAccount", "m-engine"] = {"kind": "ServiceAccount"}
    cluster.owners["ServiceAccount", "m-engine"] = Owner.NAMESAKE
    cluster.run(60)
    assert cluster.condition("Accepted").reason == "NamesakeEnding"
    assert cluster.deployments == {}
    del cluster.objects["ServiceAccount", "m-engine"]
    cluster.owners.clear()
    cluster.run_until_quiet(3000)
    assert cluster.condition("Ready").status is TRUE


def test_a_spec_that_is_not_accepted_changes_nothing_that_runs():
    cluster = served()
    cluster.change(prefill={"replicas": 2, "template": {"spec": {"hostNetwork": True}}}, image=with_tag("B"))
    told = len(cluster.log)
    cluster.run(300)
    assert cluster.log[told:] == []
    accepted = cluster.condition("Accepted")
    assert accepted.reason == "TemplateInvalid"
    assert "spec.prefill.template.spec.hostNetwork" in accepted.message
    assert cluster.status.roles.prefill.ready == 2


def test_a_switch_that_is_turned_off_takes_its_child_along():
    cluster = served(monitoring={"podMonitor": True})
    assert ("PodMonitor", "m") in cluster.objects
    cluster.change(monitoring={"podMonitor": False})
    cluster.run_until_quiet(1000)
    assert ("PodMonitor", "m") not in cluster.objects


def test_after_a_rollout_nothing_is_left_of_the_old_revision_but_what_one_could_go_back_to():
    cluster = served()
    for tag in "BCDE":
        cluster.change(image=with_tag(tag))
        cluster.run_until_quiet(3000)
    assert {cluster.tag_of(d.revision) for d in cluster.deployments.values() if d.role is not PodRole.GATEWAY} == {"E"}
    assert len([kind for kind, _ in cluster.objects if kind == "ConfigMap"]) == 2
    assert sorted(cluster.tag_of(name.split("-")[1]) for name in cluster.revisions) == ["D", "E"]


@dataclass(frozen=True)
class OtherRenderer(StandardRenderer):
    """Of an operator that puts something else into every pod."""

    def engine(self, name, spec, revision):
        data = StandardRenderer.engine(self, name, spec, revision)
        for role in data.values():
            role["template"]["spec"]["terminationGracePeriodSeconds"] = 7
        return data


def test_two_operators_with_different_pod_defaults_restart_no_engine():
    cluster = served()
    pods = {p.name for p in cluster.pods.values() if p.role is not PodRole.GATEWAY}
    told = len(cluster.log)
    for turn in range(40):
        cluster.renderer = OtherRenderer("control:1") if turn % 2 else StandardRenderer("control:1")
        cluster.step()
    assert {p.name for p in cluster.pods.values() if p.role is not PodRole.GATEWAY} == pods
    assert cluster.log[told:] == []
    cluster.renderer = OtherRenderer("control:1")
    cluster.change(decode={"replicas": 3})
    cluster.run_until_quiet(3000)
    assert pods < {p.name for p in cluster.pods.values()}


def test_an_operator_that_is_upgraded_in_mid_rollout_goes_on_with_what_was_rendered():
    cluster = served()
    cluster.change(image=with_tag("B"))
    for _ in range(6):
        cluster.step()
    revisions = set(cluster.revisions)
    cluster.renderer = OtherRenderer("control:2")
    cluster.run_until_quiet(3000)
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}
    assert set(cluster.revisions) == revisions


def test_somebody_who_scales_a_child_is_corrected():
    cluster = served()
    deployment = next(d for d in cluster.deployments.values() if d.role is PodRole.DECODE)
    deployment.replicas, deployment.version = 5, deployment.version + 1
    cluster.run_until_quiet(3000)
    assert cluster.engines()["decode", "A"] == 2
    assert cluster.broken == []
