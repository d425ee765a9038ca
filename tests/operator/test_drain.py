"""Draining one pod: what is done next, from what is seen alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_cluster import manifest

from sluice_operator.api.spec import QuarantineSpec
from sluice_operator.decide import drain
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import Delete, Drain, MarkRevision, Scale, SetServing, WriteStatus
from sluice_operator.decide.drain import may_die, open_new, settle
from sluice_operator.decide.failing import (
    STARTUP_SLACK_S,
    describe_ended,
    ended_by_nodes,
    failing_since,
    has_failed,
    why_not_ready,
)
from sluice_operator.decide.incidents import merge, seen
from sluice_operator.decide.observed import (
    EngineReport,
    GatewayReport,
    Load,
    Memory,
    Observed,
    Pod,
    Revision,
    Termination,
    Workload,
)
from sluice_operator.decide.plan import plan
from sluice_operator.decide.quarantine import quarantine
from sluice_operator.names import PodRole, Verdict, key_secret
from sluice_operator.render.revision import StandardRenderer, revision_hash

NOW, TIMEOUT = 100_000.0, 30.0
D = Workload("m-decode-r", PodRole.DECODE, "r", 2, "u", "7")


def pod(name, **rest):
    told = {"ready": True, "node": "n", "started": True, "serving": True, "load": Load(3, empty=False)}
    return Pod(name, name, PodRole.DECODE, "r", 0.0, **(told | rest))


def down(name, **rest):
    return pod(name, ready=False, **rest)


def draining(name, since=NOW, **load):
    return down(name, serving=False, serving_changed_at=since, load=Load(1, draining=True, empty=False, **load))


SCALE = Scale("m-decode-r", PodRole.DECODE, "r", 1, 2, "7")


def shrink(workload, members, now, timeout_s, useful=None):
    """`useful` None: all of them take requests."""
    return drain.shrink(workload, members, now, timeout_s, {p.name for p in members} if useful is None else useful)


def choose_victim(members):
    return drain.choose_victim(members, NOW, TIMEOUT, {p.name for p in members})


def test_first_the_drain_then_the_gate():
    assert shrink(D, [pod("a"), pod("b", load=Load(1))], NOW, TIMEOUT) == (Drain("b", "b"), SetServing("b", "b", False))


def test_while_it_drains_nothing_else_happens():
    assert shrink(D, [pod("a"), draining("b")], NOW, TIMEOUT) == ()


def test_empty_or_out_of_time_it_may_go():
    empty = replace(draining("b"), load=Load(draining=True, empty=True))
    assert shrink(D, [pod("a"), empty], NOW, TIMEOUT) == (SCALE,)
    assert shrink(D, [pod("a"), draining("b", NOW - 30)], NOW, TIMEOUT) == (SCALE,)


def test_not_while_another_pod_could_die_in_its_place():
    empty = replace(draining("b"), load=Load(draining=True, empty=True))
    flapping = down("a", ready_changed_at=NOW - 5)
    assert shrink(D, [flapping, empty], NOW, TIMEOUT) == ()
    # But not for ever: after the time of a drain that one is drained too.
    assert shrink(D, [replace(flapping, ready_changed_at=NOW - 40), empty], NOW, TIMEOUT)[0] == Drain("a", "a")


def test_a_pod_that_serves_nobody_needs_no_drain():
    assert shrink(D, [pod("a"), down("b", node="", load=None)], NOW, TIMEOUT) == (SCALE,)
    assert shrink(D, [pod("a"), down("b", started=False, load=None)], NOW, TIMEOUT) == (SCALE,)


def test_a_shrink_that_is_being_carried_out_is_waited_for():
    assert shrink(D, [pod("a"), pod("b"), down("c", started=False)], NOW, TIMEOUT) == ()
    assert shrink(D, [pod("a")], NOW, TIMEOUT) == (SCALE,)


def test_a_victim_that_does_not_answer_is_asked_once_and_then_has_its_time():
    silent = pod("b", load=None)
    assert shrink(D, [pod("a", ready=True), silent], NOW, TIMEOUT)[0] == Drain("a", "a")
    gone = down("b", serving=False, serving_changed_at=NOW, load=None)
    assert shrink(D, [pod("a"), gone], NOW, TIMEOUT) == ()
    assert shrink(D, [pod("a"), gone], NOW + 30, TIMEOUT) == (SCALE,)


def test_a_victim_whose_engine_has_started_anew_is_drained_again():
    fresh = down("b", serving=False, serving_changed_at=NOW, load=Load(1, empty=False))
    assert shrink(D, [pod("a"), fresh], NOW, TIMEOUT) == (Drain("b", "b"),)


def test_the_victim_has_the_least_work_and_is_the_youngest_of_equals():
    young = replace(pod("c"), created_at=5.0)
    assert choose_victim([pod("a"), pod("b"), young]).name == "c"
    assert choose_victim([pod("a", load=Load(1, 1)), pod("b")]).name == "a"
    assert choose_victim([pod("a", load=Load(0)), draining("b")]).name == "b"


def test_one_that_takes_no_requests_goes_before_one_that_does_whatever_is_known_of_its_work():
    """A new pod in the place of a victim that was lost: the one that served was drained in its stead."""
    new = pod("b", load=None)
    assert shrink(D, [pod("a", load=Load(9)), new], NOW, TIMEOUT, {"a"})[0] == SetServing("b", "b", False)
    assert shrink(D, [pod("a", load=Load(9)), new], NOW, TIMEOUT, {"a", "b"})[0] == Drain("a", "a")


def test_a_ready_pod_never_may_die():
    assert not may_die(pod("a", serving=False, load=Load(empty=True)), NOW, TIMEOUT)


def test_new_pods_get_their_gate_opened_and_only_those():
    assert open_new([pod("a", serving=None), pod("b"), pod("c", serving=False)]) == (SetServing("a", "a", True),)


def test_where_nobody_is_to_go_drained_pods_are_replaced_and_restarted_ones_reopened():
    drained = draining("a", NOW - 40)
    restarted = down("b", serving=False, serving_changed_at=NOW, load=Load())
    assert settle([drained, restarted, pod("c")], NOW, TIMEOUT) == (Delete("Pod", "a", "a"), SetServing("b", "b", True))
    assert settle([draining("a")], NOW, TIMEOUT) == ()


def test_a_drain_whose_gate_nobody_came_to_close_is_carried_on():
    """The operator ended between the two, and what it had drained served nobody for ever."""
    told = pod("a", load=Load(draining=True, empty=True))
    assert settle([told, pod("b")], NOW, TIMEOUT) == (SetServing("a", "a", False),)
    assert settle([replace(told, serving=None)], NOW, TIMEOUT) == (SetServing("a", "a", False),)


def test_a_drain_that_had_begun_when_the_spec_was_refused_is_finished():
    """Its pod was empty and gated, and served nobody until somebody wrote a good spec."""
    empty = Load(draining=True, empty=True)
    first = down("d0", serving=False, serving_changed_at=NOW - 900, load=empty)
    others = (pod("d1"), pod("d2"))
    workload = Workload("m-decode-r", PodRole.DECODE, "r", 3, "w", "1")
    kept = frozenset({key_secret("m")})
    observed = Observed("ns", "m", "u", 2, Memory(0.0), workloads=(workload,), pods=(first, *others), secrets=kept)
    refused = parse("m", manifest(decode={"parallelism": {"tensor": 2}}))
    assert isinstance(refused, tuple)
    told = [
        action for action in plan(refused, observed, NOW, StandardRenderer("c")) if not isinstance(action, WriteStatus)
    ]
    assert told == [Delete("Pod", "d0", "d0")]


def test_useful_is_ready_in_no_drain_and_known_to_every_ready_gateway():
    def seen(told, *reports):
        gateways = [Pod(name, name, PodRole.GATEWAY, "", 0.0, ready=True) for name in ("g0", "g1")]
        return Observed("ns", "m", "u", 1, Memory(0.0), pods=(told, *gateways), gateways=reports)

    def report(gateway, *pods):
        return GatewayReport(gateway, NOW, engines=tuple(EngineReport(p, PodRole.DECODE, "f", Load()) for p in pods))

    both = (report("g0", "a"), report("g1", "a"))
    assert seen(pod("a"), *both).is_useful(pod("a"))
    assert not seen(pod("a"), *both).is_useful(pod("a", load=Load(draining=True)))
    assert not seen(pod("a"), *both).is_useful(pod("a", serving=False))
    assert not seen(pod("a"), *both).is_useful(pod("a", quarantined=True))
    assert not seen(pod("a"), *both).is_useful(down("a"))
    assert not seen(pod("a"), report("g0", "a"), report("g1")).is_useful(pod("a"))
    assert seen(pod("a"), report("g0", "a")).routed is None


# -- why pods fail, what is kept of it ---------------------------------------------------------------------------------


def test_each_way_not_to_come_up_has_its_reason():
    fresh = {"started": False, "load": None, "serving": True, "scheduled_at": NOW - 10}
    told = {
        "Starting": down("a", **fresh),
        "Unschedulable": down("a", node="", unschedulable="0/1 nodes", started=False),
        "ImagePullFailed": down("a", **fresh, waiting_reason="ImagePullBackOff"),
        "ContainerConfigError": down("a", **fresh, waiting_reason="CreateContainerConfigError"),
        "CrashLoop": down("a", **fresh, waiting_reason="CrashLoopBackOff", restarts=3),
        "StartupTimedOut": down("a", **(fresh | {"scheduled_at": NOW - 500})),
        "Starting ": down("a", **(fresh | {"scheduled_at": NOW - 5000}), init_container="download", runs=True),
        "StartupTimedOut ": down("a", **(fresh | {"scheduled_at": NOW - 500}), init_container="download"),
        "NotReady": down("a"),
    }
    for reason, seen_pod in told.items():
        assert why_not_ready(seen_pod, NOW, 120.0)[0] == reason.strip()


def test_a_container_that_restarts_after_it_has_served_long_is_no_failed_start():
    """One that ran out of memory in the fifth hour of a long rollout took all of it back."""
    old = {"started": False, "load": None, "scheduled_at": NOW - 18000, "initialized_at": NOW - 18000}
    served = down("a", **old, restarts=1, starting_at=NOW - 5, last_life_s=17990.0)
    assert why_not_ready(served, NOW, 120.0)[0] == "Starting"
    assert not has_failed(served, NOW, 120.0, NOW)
    assert has_failed(served, NOW + 200, 120.0, NOW)  # this life's start is bounded too
    fourth = down("a", **old, restarts=4, starting_at=NOW - 5, last_life_s=4000.0)
    assert not has_failed(fourth, NOW, 120.0, NOW)
    crashing = down("a", **old, restarts=4, waiting_reason="CrashLoopBackOff", last_life_s=3.0)
    assert has_failed(crashing, NOW, 120.0, NOW)
    # Ended by its startup probe: what it had is counted from the first life on.
    never = {"started": False, "load": None, "scheduled_at": NOW - 190, "initialized_at": NOW - 190}
    assert has_failed(down("a", **never, restarts=1, starting_at=NOW - 60, last_life_s=120.0), NOW, 120.0, NOW)


def test_a_pod_that_was_ready_and_restarts_is_no_failed_start_however_young_it_is():
    """A restart between one and two startup budgets after scheduling took all of the rollout back."""
    limit = 1800.0 + STARTUP_SLACK_S
    for age in (limit + 1, 1.5 * limit, 2 * limit - 1):
        restarted = {"started": False, "load": None, "scheduled_at": NOW - age, "initialized_at": NOW - age}
        served = down(
            "a", **restarted, restarts=1, starting_at=NOW - 20, last_life_s=age - 20, ready_changed_at=NOW - 20
        )
        assert not has_failed(served, NOW, 1800.0, NOW)
        assert "has had 20 s" in why_not_ready(served, NOW, 1800.0)[1]
        # This life's start is bounded too, and one that never was ready is held to its first.
        assert has_failed(served, NOW + limit, 1800.0, NOW)
        assert has_failed(replace(served, ready_changed_at=NOW - age), NOW, 1800.0, NOW)


def test_what_an_init_container_does_is_named_and_no_start_of_the_engine():
    download = {"started": False, "load": None, "scheduled_at": NOW - 9000, "init_container": "download"}
    reason, detail = why_not_ready(down("a", **download, waiting_reason="ImagePullBackOff"), NOW, 120.0)
    assert (reason, "init container download" in detail) == ("ImagePullFailed", True)
    assert (
        why_not_ready(down("a", **download, waiting_reason="CrashLoopBackOff", restarts=12), NOW, 120.0)[0]
        == "CrashLoop"
    )
    assert has_failed(down("a", **download, waiting_reason="CrashLoopBackOff", restarts=12), NOW, 120.0, NOW)
    assert not has_failed(down("a", **download, runs=True), NOW, 120.0, NOW)
    told = end(11, 1, "HubRefused: 401: look at model.hf.tokenSecret")
    looping = down("a", **download, waiting_reason="CrashLoopBackOff", restarts=12, helper_terminations=(told,))
    assert "HubRefused: 401" in why_not_ready(looping, NOW, 120.0)[1]
    assert seen([looping]) == ()  # no incident of an engine


def test_an_init_container_that_only_waits_is_no_download():
    """Its volume's Secret was missing: it "had run" for hours, and the rollout was never taken back."""
    waits = {"started": False, "load": None, "scheduled_at": NOW - 9000, "init_container": "copy", "runs": False}
    one = down("a", **waits, starting_at=NOW - 179, waiting_reason="PodInitializing")
    reason, detail = why_not_ready(one, NOW, 120.0)
    assert (reason, "waits (PodInitializing)" in detail) == ("Starting", True)  # the one before it took two hours
    assert not has_failed(one, NOW, 120.0, NOW)
    assert why_not_ready(one, NOW + 2, 120.0)[0] == "StartupTimedOut"
    assert has_failed(one, NOW + 2, 120.0, NOW)


def test_an_init_container_that_fails_after_a_long_time_fails():
    """A download that always ends when the disk is full is no engine that has served."""
    fails = {"started": False, "load": None, "scheduled_at": NOW - 18000, "init_container": "download"}
    loops = down("a", **fails, restarts=3, last_life_s=2400.0, runs=True, helper_terminations=(end(2, 1),))
    assert has_failed(loops, NOW, 120.0, NOW)
    # It began anew with its node, and had ended well each time.
    again = replace(loops, helper_terminations=(end(2, 0),))
    assert why_not_ready(again, NOW, 120.0)[0] == "Starting"
    assert not has_failed(again, NOW, 120.0, NOW)


@pytest.mark.parametrize("init", ["", "download"])
@pytest.mark.parametrize("reason", ["ImagePullBackOff", "CreateContainerConfigError", "CrashLoopBackOff", ""])
def test_what_a_pod_has_had_once_is_no_fault_of_its_revision(init, reason):
    """It served for hours and ran out of memory, or its node began anew, while the registry or the hub was away."""
    here = {"started": False, "load": None, "init_container": init, "waiting_reason": reason, "restarts": 3}
    pod = down("a", **here, scheduled_at=NOW - 18000, initialized_at=NOW - 17000, starting_at=NOW - 400)
    served = replace(pod, ready_changed_at=NOW - 400, last_life_s=3.0)
    is_engine = not init and reason in ("CrashLoopBackOff", "")
    assert has_failed(replace(served, ready_changed_at=NOW - 18000), NOW, 120.0, NOW - 400)
    assert has_failed(served, NOW, 120.0, NOW - 400) == is_engine
    # Its node has begun anew, and init has ended once more.
    if not init:
        assert has_failed(replace(served, initialized_at=NOW - 390), NOW, 120.0, NOW - 400) == is_engine


@pytest.mark.parametrize("started", [True, False])
def test_a_sidecar_that_cannot_run_is_named_and_fails_its_revision_as_an_engine_would(started):
    here = {"sidecar": "proxy", "started": started, "scheduled_at": NOW - 900, "initialized_at": NOW - 900}
    pulls = down("a", **here, waiting_reason="ImagePullBackOff", waiting_message="no such image")
    reason, detail = why_not_ready(pulls, NOW, 1800.0)
    assert (reason, detail) == ("ImagePullFailed", "Pod a, container proxy: ImagePullBackOff: no such image.")
    assert failing_since([pulls], {}, NOW) == {"a": NOW}
    assert not has_failed(pulls, NOW, 1800.0, NOW - 299)
    assert has_failed(pulls, NOW, 1800.0, NOW - 301)
    config = replace(pulls, waiting_reason="CreateContainerConfigError")
    assert why_not_ready(config, NOW, 1800.0)[0] == "ContainerConfigError"
    assert has_failed(config, NOW, 1800.0, NOW - 301)
    loops = replace(pulls, waiting_reason="CrashLoopBackOff", restarts=3, helper_terminations=(end(2, 1, "no config"),))
    assert why_not_ready(loops, NOW, 1800.0) == (
        "CrashLoop",
        "Pod a, container proxy restarted 3 times: exit 1, no config.",
    )
    assert has_failed(loops, NOW, 1800.0, NOW)
    assert not has_failed(replace(loops, restarts=2), NOW, 1800.0, NOW)
    assert seen([loops]) == ()  # no incident of an engine


def test_a_sidecar_that_is_only_late_is_named_and_fails_nothing():
    late = down("a", sidecar="proxy", runs=True, scheduled_at=NOW - 9000)
    assert why_not_ready(late, NOW, 120.0) == ("NotReady", "Pod a, container proxy is not ready.")
    assert not has_failed(late, NOW, 120.0, NOW)


def test_an_image_must_be_refused_for_a_while_that_was_seen():
    pods = [down("a", started=False, load=None, scheduled_at=NOW - 3000, waiting_reason="ErrImagePull"), down("b")]
    since = failing_since(pods, {}, NOW)
    assert since == {"a": NOW}
    assert failing_since(pods, since, NOW + 100) == since
    assert failing_since([down("a")], since, NOW + 100) == {}


def test_a_revision_fails_by_what_lasts_and_not_for_want_of_a_node():
    fresh = {"started": False, "load": None, "scheduled_at": NOW - 10}
    assert not has_failed(down("a", **fresh), NOW, 120.0, NOW)
    assert not has_failed(down("a", **fresh, waiting_reason="ErrImagePull"), NOW + 299, 120.0, NOW)
    assert has_failed(down("a", **fresh, waiting_reason="ErrImagePull"), NOW + 301, 120.0, NOW)
    assert not has_failed(down("a", **fresh, waiting_reason="CrashLoopBackOff", restarts=1), NOW, 120.0, NOW)
    assert has_failed(down("a", **fresh, waiting_reason="CrashLoopBackOff", restarts=3), NOW, 120.0, NOW)
    assert not has_failed(down("a", node="", started=False, unschedulable="x"), NOW + 9999, 120.0, NOW)
    assert not has_failed(down("a"), NOW + 9999, 120.0, NOW)


def ended(name, age_s=10.0, words="Evicted: The node was low on ephemeral-storage.", **rest):
    went = {"started": False, "load": None, "terminating": True, "ended_by_node": words}
    told = down(name, **went, scheduled_at=NOW - age_s, ready_changed_at=NOW - age_s, **rest)
    return replace(told, created_at=NOW - age_s)


def test_pods_that_nodes_end_are_told_of_and_take_their_revision_back():
    """Fifty were evicted as they came, and status said that one was starting."""
    pods = [ended(name) for name in ("a", "b", "c")]
    assert [pod.name for pod in ended_by_nodes(pods, NOW)] == ["c", "b", "a"]
    assert describe_ended(ended_by_nodes(pods, NOW)) == (
        "Pod c: Evicted: The node was low on ephemeral-storage (and 2 more)."
    )
    # Nobody clears them away, and a revision may be tried again.
    assert ended_by_nodes(pods, NOW + 601) == ()
    # One that has served: its node is short of something, which is no fault of the revision.
    assert ended_by_nodes([replace(ended("a", 500.0), ready_changed_at=NOW - 5)], NOW) == ()
    (told, *_) = seen([ended("a")])
    assert (told.id, told.reason, told.message) == ("a.ended", "Evicted", "The node was low on ephemeral-storage.")
    bare = seen([ended("a", words="UnexpectedAdmissionError")])[0]
    assert (bare.reason, bare.message) == ("UnexpectedAdmissionError", "UnexpectedAdmissionError")


@pytest.mark.parametrize(("count", "is_back"), [(2, False), (3, True)])
def test_a_rollout_whose_pods_nodes_end_is_taken_back(count, is_back):
    spec = parse("m", manifest())
    wanted = revision_hash(spec)
    good = Revision("m-good", "good", 1, {}, Verdict.GOOD, uid="r0")
    bad = Revision(f"m-{wanted}", wanted, 2, StandardRenderer("c").engine("m", spec, wanted), uid="r1")
    pods = tuple(replace(ended(f"p{n}"), revision=wanted) for n in range(count))
    observed = Observed("ns", "m", "u", 2, Memory(0.0), revisions=(good, bad), pods=pods)
    told = [action for action in plan(spec, observed, NOW, StandardRenderer("c")) if isinstance(action, MarkRevision)]
    assert told == (
        [MarkRevision(bad.name, Verdict.FAILED, "EndedByNode", describe_ended(ended_by_nodes(pods, NOW)))]
        if is_back
        else []
    )


@pytest.mark.parametrize("message", ["", "\n", "  \n\t", "\x0b"])
def test_a_blank_message_is_none(message):
    """It made every plan fail, and the one that tells of it."""
    told = down("a", terminations=(end(0, message=message),))
    assert [incident.message for incident in seen([told])] == ["exit 3 Error"]


def end(restart, code=3, message="SchedulerFrozen: leader", at=NOW):
    return Termination(restart, code, "Error", message, at)


def test_an_incident_is_told_once_and_the_list_is_bounded():
    wedged = replace(pod("a"), terminations=(end(1), end(2, 0), end(3, 1, "", NOW + 5)))
    told = seen([wedged, replace(wedged, name="b", terminating=True)])
    assert [(i.id, i.reason) for i in told] == [("a.1", "Wedged"), ("a.3", "Died")]
    assert merge(told, told) == (told[1], told[0])
    many = seen([replace(pod("a"), terminations=tuple(end(n, at=NOW + n) for n in range(30)))])
    assert [i.id for i in merge((), many)][:2] == ["a.29", "a.28"]
    assert len(merge((), many)) == 10


def test_an_incidents_message_is_one_line_and_bounded():
    long = replace(pod("a"), terminations=(end(1, message="x" * 5000 + "\nmore"),))
    assert len(seen([long])[0].message) == 512


def held(name, since=NOW, quarantined=True):
    told = down(name, ready_changed_at=since, quarantined=quarantined, load=Load(quarantined=True))
    return replace(told, resource_version="3")


def test_quarantine_keeps_a_few_for_a_while():
    limits = QuarantineSpec(max_pods=1, max_seconds=300)
    (release, delete) = quarantine([held("a", quarantined=False), held("b", quarantined=False)], limits, NOW)
    assert str(release) == "quarantine Pod a"
    assert delete == Delete("Pod", "b", "b")
    assert quarantine([held("a")], limits, NOW + 299) == ()
    assert quarantine([held("a")], limits, NOW + 300) == (Delete("Pod", "a", "a"),)
    assert quarantine([held("a"), held("b", NOW + 1)], limits, NOW + 2) == (Delete("Pod", "b", "b"),)
    none = QuarantineSpec(max_pods=0, max_seconds=300)
    assert quarantine([held("a", quarantined=False)], none, NOW) == (Delete("Pod", "a", "a"),)


def test_a_kept_pod_that_is_over_makes_room_for_the_next():
    told = quarantine([held("a", NOW - 300), held("b", quarantined=False)], QuarantineSpec(1, 300), NOW)
    assert [str(action) for action in told] == ["delete Pod a", "quarantine Pod b"]
