"""Raw objects into values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator import names
from sluice_operator.decide.observed import Owner, Termination
from sluice_operator.decide.reading import owner_of, read_pod, read_workload
from sluice_operator.live.cluster import encode
from sluice_operator.names import PodRole

NAME, UID = "m", "uid-1"


def owned(**reference):
    base = {"apiVersion": "sluice.dev/v1alpha1", "kind": "ModelDeployment", "name": NAME, "uid": UID}
    return {"metadata": {"ownerReferences": [base | reference]}}


def test_whose_an_object_is():
    assert owner_of(owned(), NAME, UID) is Owner.OURS
    assert owner_of(owned(uid="older"), NAME, UID) is Owner.NAMESAKE
    assert owner_of(owned(uid="older", name="other"), NAME, UID) is Owner.STRANGER
    assert owner_of(owned(uid="older", apiVersion="else.dev/v1"), NAME, UID) is Owner.STRANGER
    assert owner_of({"metadata": {}}, NAME, UID) is Owner.STRANGER
    labelled = {"metadata": {"labels": {names.LABEL_DEPLOYMENT: NAME}}}
    assert owner_of(labelled, NAME, UID) is Owner.ORPHAN


def pod(**status):
    labels = {names.LABEL_ROLE: "decode", names.LABEL_REVISION: "r1"}
    meta = {"name": "p", "uid": "u", "labels": labels, "creationTimestamp": "1970-01-01T00:00:10Z"}
    return {"metadata": meta, "spec": {"nodeName": "n"}, "status": status}


def condition(kind, status, second, message=""):
    at = f"1970-01-01T00:00:{second}Z"
    return {"type": kind, "status": status, "lastTransitionTime": at, "message": message}


def test_a_pod_that_serves():
    main = {"name": "main", "started": True, "state": {"running": {}}, "restartCount": 2}
    told = [condition("PodScheduled", "True", 11), condition("Ready", "True", 20)]
    read = read_pod(pod(conditions=[*told, condition(names.READINESS_GATE, "True", 15)], containerStatuses=[main]))
    assert (read.role, read.revision, read.node, read.created_at) == (PodRole.DECODE, "r1", "n", 10.0)
    assert (read.ready, read.ready_changed_at, read.serving, read.serving_changed_at) == (True, 20.0, True, 15.0)
    assert (read.started, read.restarts, read.scheduled_at, read.terminating) == (True, 2, 11.0, False)


def test_a_pod_whose_container_crashed_has_its_last_words():
    ended = {"exitCode": 3, "reason": "Error", "message": "Wedged", "finishedAt": "1970-01-01T00:00:30Z"}
    main = {
        "name": "main",
        "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": ended},
    }
    read = read_pod(pod(containerStatuses=[{"name": "sidecar"}, main]))
    assert read.terminations == (Termination(0, 3, "Error", "Wedged", 30.0),)
    assert (read.waiting_reason, read.waiting_message, read.started) == ("CrashLoopBackOff", "back-off", False)


def test_an_init_container_that_is_not_done_is_what_the_pod_waits_for():
    pulling = {"name": "download", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}
    main = {"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}
    read = read_pod(pod(initContainerStatuses=[pulling], containerStatuses=[main]))
    assert (read.init_container, read.waiting_reason, read.waiting_message) == ("download", "ErrImagePull", "no such")
    ended = {"exitCode": 1, "startedAt": "1970-01-01T00:00:20Z", "finishedAt": "1970-01-01T00:00:25Z"}
    crashed = {"name": "download", "restartCount": 12, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    read = read_pod(
        pod(initContainerStatuses=[crashed | {"lastState": {"terminated": ended}}], containerStatuses=[main])
    )
    assert (read.restarts, read.waiting_reason, read.last_life_s) == (12, "CrashLoopBackOff", 5.0)
    assert (read.terminations, read.helper_terminations) == ((), (Termination(11, 1, "", "", 25.0),))
    done = {"name": "copy", "state": {"terminated": ended | {"exitCode": 0, "finishedAt": "1970-01-01T00:00:50Z"}}}
    waits = {"name": "download", "state": {"waiting": {"reason": "PodInitializing"}}}
    read = read_pod(pod(initContainerStatuses=[done, waits], containerStatuses=[main]))
    assert (read.init_container, read.runs, read.starting_at) == ("download", False, 50.0)
    runs = {"name": "download", "state": {"running": {"startedAt": "1970-01-01T00:00:51Z"}}}
    read = read_pod(pod(initContainerStatuses=[done, runs], containerStatuses=[main]))
    assert (read.init_container, read.runs, read.starting_at) == ("download", True, 51.0)


def test_a_sidecar_among_init_containers_never_ends_and_hides_nothing_once_it_has_started():
    """Such as a service mesh injects: it was named for ever, and no crash of the engine was seen."""
    main = {"name": "main", "restartCount": 9, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    proxy = {"name": "proxy", "started": True, "state": {"running": {}}}
    raw = pod(initContainerStatuses=[proxy], containerStatuses=[main])
    assert read_pod(raw).init_container == "proxy"  # one that is to end, and has begun
    raw["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}]
    read = read_pod(raw)
    assert (read.init_container, read.waiting_reason, read.restarts) == ("", "CrashLoopBackOff", 9)
    pulling = {"name": "proxy", "started": False, "state": {"waiting": {"reason": "ErrImagePull"}}}
    raw["status"]["initContainerStatuses"] = [pulling]
    read = read_pod(raw)
    assert (read.init_container, read.waiting_reason) == ("proxy", "ErrImagePull")


def beside(main, proxy, **rest):
    return read_pod(pod(containerStatuses=[{"name": "main"} | main, {"name": "proxy"} | proxy], **rest))


RUNS = {"started": True, "ready": True, "state": {"running": {}}}


def test_a_container_beside_the_main_one_that_cannot_run_is_what_the_pod_waits_for():
    """A sidecar of the template whose image is misspelled: the pod was not ready, and nothing was said."""
    pulling = {"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such"}}}
    for main in (RUNS, {"ready": False, "state": {"running": {}}}):
        read = beside(main, pulling)
        assert (read.sidecar, read.waiting_reason, read.waiting_message) == ("proxy", "ImagePullBackOff", "no such")
        assert read.started is bool(main.get("started"))
    crashed = {"exitCode": 2, "message": "no config", "finishedAt": "1970-01-01T00:00:25Z"}
    loops = {
        "ready": False,
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": crashed},
    }
    read = beside(RUNS, loops)
    assert (read.sidecar, read.restarts, read.terminations) == ("proxy", 4, ())
    assert read.helper_terminations == (Termination(3, 2, "", "no config", 25.0),)


def test_one_that_is_not_ready_is_named_once_the_main_one_is_and_one_that_runs_never():
    late = {"ready": False, "state": {"running": {}}}
    assert beside(RUNS, late).sidecar == "proxy"
    assert beside({"ready": False, "state": {"running": {}}}, late).sidecar == ""
    assert beside(RUNS, RUNS).sidecar == ""
    creating = {"ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert beside(creating, creating).sidecar == ""


def test_what_bars_the_main_container_is_told_before_what_bars_one_beside_it():
    pulling = {"state": {"waiting": {"reason": "ErrImagePull"}}}
    read = beside({"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}, pulling)
    assert (read.sidecar, read.waiting_reason, read.restarts) == ("", "CrashLoopBackOff", 3)


def test_a_native_sidecar_that_ends_beside_a_running_engine_is_no_init_container_in_work():
    raw = pod(
        initContainerStatuses=[
            {"name": "mesh", "started": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        ],
        containerStatuses=[{"name": "main"} | RUNS],
    )
    raw["spec"]["initContainers"] = [{"name": "mesh", "restartPolicy": "Always"}]
    read = read_pod(raw)
    assert (read.init_container, read.sidecar, read.waiting_reason) == ("", "mesh", "CrashLoopBackOff")


def test_the_time_to_start_begins_when_init_is_done_and_anew_with_each_life():
    done = {"name": "download", "state": {"terminated": {"exitCode": 0}}}
    told = [condition("PodScheduled", "True", 11), condition("Initialized", "True", 40)]
    read = read_pod(pod(conditions=told, initContainerStatuses=[done], containerStatuses=[{"name": "main"}]))
    assert (read.init_container, read.scheduled_at, read.initialized_at, read.starting_at) == ("", 11.0, 40.0, 40.0)
    running = {"name": "main", "restartCount": 1, "state": {"running": {"startedAt": "1970-01-01T00:00:55Z"}}}
    read = read_pod(pod(conditions=told, initContainerStatuses=[done], containerStatuses=[running]))
    assert (read.initialized_at, read.starting_at) == (40.0, 55.0)


def test_a_pod_that_nobody_can_place_quotes_the_scheduler():
    read = read_pod(pod(conditions=[condition("PodScheduled", "False", 11, "0/3 nodes are available")]))
    assert (read.unschedulable, read.scheduled_at) == ("0/3 nodes are available", 0.0)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        ({"phase": "Failed", "reason": "OutOfcpu"}, "OutOfcpu"),
        ({"phase": "Failed"}, "its phase is Failed"),
        ({"phase": "Running", "reason": "x"}, ""),
    ],
)
def test_a_pod_that_its_node_has_ended_says_why(status, words):
    assert read_pod(pod(**status)).ended_by_node == words
    going = pod(**status)
    going["metadata"]["deletionTimestamp"] = "1970-01-01T00:00:09Z"
    assert read_pod(going).ended_by_node == ""


def test_a_pod_that_was_evicted_never_comes_back():
    assert read_pod(pod(phase="Failed")).terminating
    assert not read_pod(pod(phase="Running")).terminating


def test_what_has_no_role_of_ours_is_nothing_of_ours():
    bare = {"metadata": {"name": "x", "uid": "u", "labels": {names.LABEL_ROLE: "router"}}}
    assert read_pod(bare) is None
    assert read_workload(bare) is None


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "state", "type"]), inner),
    max_leaves=6,
)


@given(junk, junk, junk, junk, junk)
def test_a_status_of_no_shape_reads_as_nothing(conditions, containers, init, phase, wanted):
    told = {"conditions": conditions, "containerStatuses": containers, "initContainerStatuses": init, "phase": phase}
    raw = pod(**told)
    raw["spec"]["initContainers"] = wanted
    read = read_pod(raw)
    assert not read.ready


def test_json_is_as_go_writes_it():
    told = encode({"c": "é\u2028\n", "b": [1, None], "a": "<&>"})
    assert told == '{"a":"\\u003c\\u0026\\u003e","b":[1,null],"c":"é\\u2028\\n"}'.encode()


def test_a_deployment_whose_replicaset_may_make_no_pod_says_why():
    labels = {names.LABEL_ROLE: "decode", names.LABEL_REVISION: "r1"}
    meta = {"name": "m-decode-r1", "uid": "u", "resourceVersion": "5", "labels": labels}
    words = "exceeded quota: q"
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": words}
    item = {"metadata": meta, "spec": {"replicas": 1}, "status": {"conditions": [failed]}}
    assert read_workload(item).refused == words
    assert read_workload(item | {"status": {"conditions": [failed | {"status": "False"}]}}).refused == ""
    assert read_workload(item | {"status": {}}).refused == ""
