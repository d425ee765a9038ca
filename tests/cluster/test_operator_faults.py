"""The operator when it is stopped, killed, cut off or robbed: the end is the same, and nobody writes who must not."""

from __future__ import annotations

import os
import signal
import time

import pytest
from cluster_deployment import Served, condition, image_of, is_ending, uids
from control_plane import ControlPlane
from operator_process import FAST_LEASE, OperatorProcess
from tcp_proxy import TcpProxy, port_of

from sluice_launch.process import stop_process
from sluice_operator.live.cluster import KINDS
from sluice_operator.live.election import LOST

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

LEASE = "sluice-operator"
# The exit status for a silent watch.
SILENT = 5


def writes(plane, user):
    """Everything that was let through and changes something, the lease too."""
    return [r for r in plane.requests() if r.user == user and r.writes and r.code < 400]


def holder(client, namespace):
    return client.get(KINDS["Lease"].path(namespace, LEASE))["spec"]["holderIdentity"]


def test_a_leader_that_was_stopped_in_a_rollout_writes_nothing_when_it_wakes(plane, served, namespace):
    first, second = f"first-{namespace}", f"second-{namespace}"
    with OperatorProcess(plane, first, namespace, *FAST_LEASE) as old:
        old.wait_for("leading")
        with OperatorProcess(plane, second, namespace, *FAST_LEASE) as new:
            new.wait_for("standby")
            served.create(prefill={"replicas": 2}, decode={"replicas": 2})
            served.until_served("1")
            served.roll_to("2")
            served.until_children("Deployment", lambda found: len(found) == 5)
            stop_process(old.pid)
            new.wait_for("leading")
            led_at = time.time()  # what was on its way when the old one stopped has arrived long since
            served.until_served("2")
            # The world as the old one remembers it is gone; it has work in its queue all the same.
            served.roll_to("3")
            os.kill(old.pid, signal.SIGCONT)
            assert old.wait() == LOST
            served.until_served("3")
            late = [w for w in writes(plane, first) if w.began > led_at]
            assert late == []
            assert any(w.resource.startswith("deployments") for w in writes(plane, second))
            assert "the lease is lost" in old.text()


def test_a_leader_whose_calls_stall_ends_itself_before_another_leads(plane, client, served, namespace):
    """Nothing comes back from the API server, but the process itself runs on."""
    with TcpProxy(port_of(plane.url)) as proxy:
        with OperatorProcess(plane, f"stalled-{namespace}", namespace, *FAST_LEASE, url=proxy.url) as old:
            old.wait_for("leading")
            served.create()
            served.until("Ready", "True")
            proxy.stall()
            served.roll_to("2")
            with OperatorProcess(plane, f"next-{namespace}", namespace, *FAST_LEASE) as new:
                assert old.wait() == LOST
                ended_at = time.time()
                new.wait_for("leading")
                # What was stuck on the way arrives now, at an API server where somebody else leads.
                proxy.flow()
                served.until_served("2")
            late = [w for w in writes(plane, f"stalled-{namespace}") if w.at > ended_at]
            assert late == []


def test_deleted_and_made_again_under_one_name_only_the_last_remains(plane, client, served, namespace):
    with OperatorProcess(plane, f"op-{namespace}", namespace) as operator:
        operator.wait_for("leading")
        for _ in range(5):
            served.create()
            served.until_children("ControllerRevision", bool)
            served.delete()
            client.until(served.path, lambda there: there is None)
        last = served.create()
        served.until("Ready", "True")
        kinds = ("Deployment", "ReplicaSet", "ControllerRevision", "Service", "Secret", "NetworkPolicy", "Role")
        # The collector comes to the last of the old ones in its own time.
        for kind in kinds:
            served.until_children(kind, lambda found: all(is_of(item, last, served) for item in found))


def is_of(item, uid, served):
    """Itself, or by its Deployment; what is ending already is out of anybody's hands."""
    owners = {reference["uid"] for reference in item["metadata"].get("ownerReferences", [])}
    return uid in owners or bool(owners & uids(served.children("Deployment"))) or is_ending(item)


def test_watches_that_are_cut_while_pods_vanish_leave_no_ghosts(plane, client, served, namespace):
    with TcpProxy(port_of(plane.url)) as proxy:
        with OperatorProcess(plane, f"cut-{namespace}", namespace, "--resync-s=5", url=proxy.url) as operator:
            operator.wait_for("leading")
            served.create(prefill={"replicas": 2}, decode={"replicas": 2})
            served.until("Ready", "True")
            for _ in range(3):
                gone = uids(served.engines())
                assert proxy.cut() > 0
                pods = KINDS["Pod"].path(namespace)
                client.call("DELETE", f"{pods}?labelSelector=sluice.dev/role%20in%20(prefill,decode)")
                served.until_children("Pod", lambda found, gone=gone: not uids(found) & gone)
                served.until("Ready", "True")
                client.until(served.path, lambda there: there["status"]["roles"]["decode"]["summary"] == "2/2")
                assert not uids(served.engines()) & gone
            assert operator.status()["failures"].get("Defect", 0) == 0


def test_a_watch_that_is_open_and_silent_ends_the_operator_and_the_next_one_hears_all(plane, served, namespace):
    """Neither an end nor an error: the way to the API server swallows what was open, and lets new calls through."""
    with TcpProxy(port_of(plane.url)) as proxy:
        options = (
            "--constant=live.handlers.SILENT_S=6",
            "--resync-s=1",
            "--lease-duration-s=80",
            "--lease-deadline-s=60",
            "--lease-call-s=8",
        )
        with OperatorProcess(plane, f"deaf-{namespace}", namespace, *options, url=proxy.url) as operator:
            operator.wait_for("leading")
            served.create()
            served.until("Ready", "True")
            # With watches that are heard, changes are no reason to end, for several times as long.
            until = time.monotonic() + 14
            while time.monotonic() < until:
                touch(served)
                assert operator.status()["state"] == "leading"
                time.sleep(0.5)
            assert proxy.swallow() > 5
            touch(served)
            assert operator.wait(60) == SILENT
            assert f"the watch of modeldeployments is silent: no news of {namespace}/m" in operator.text()
            operator.start()
            operator.wait_for("leading")
            served.roll_to("2")
            served.until_served("2")


def all_but_the_watch_of_network_policies():
    """All that an operator does, and one watch fails for good."""
    groups = (
        "",
        "apps",
        "coordination.k8s.io",
        "discovery.k8s.io",
        "policy",
        "rbac.authorization.k8s.io",
        "sluice.dev",
    )
    verbs = ["get", "list", "create", "update", "patch", "delete"]
    return [
        {"apiGroups": list(groups), "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": verbs},
    ]


def test_a_watch_that_fails_for_good_ends_the_operator(plane, client, served, namespace):
    """kopf gave up the one and waited for the others for ever: a leader that heard of nothing, and of no signal."""
    user = f"barred-{namespace}"
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    client.create(
        f"{rbac}/clusterroles", {"metadata": {"name": user}, "rules": all_but_the_watch_of_network_policies()}
    )
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user}
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    binding = {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]}
    client.create(f"{rbac}/clusterrolebindings", binding)
    with OperatorProcess(plane, user, namespace, is_admin=False) as operator:
        operator.wait_for("leading")
        served.create()
        served.until("Ready", "True")
        assert operator.wait(180) == SILENT
        assert "the watches have ended" in operator.text()
        assert "networkpolicies" in operator.text()
        assert holder(client, namespace) == ""
        operator.start()
        operator.wait_for("leading")
        assert operator.stop() == 0


def touch(served):
    served.client.merge(served.path, {"metadata": {"labels": {"touched": str(time.monotonic_ns())}}})


def test_an_api_server_that_starts_anew_over_a_compacted_etcd_leaves_no_ghosts(tools, tmp_path):
    """What a watch would go on from is no longer there: it is told so (410), and nobody of what was deleted."""
    with ControlPlane(tmp_path, kwok=True) as plane:
        client = plane.client()
        plane.install_crd()
        plane.add_nodes(2)
        served = Served(client, "default")
        with OperatorProcess(plane, "op", "default", "--resync-s=5") as operator:
            operator.wait_for("leading")
            served.create(prefill={"replicas": 2}, decode={"replicas": 2})
            served.until("Ready", "True")
            gone = uids(served.engines())
            # Nobody hears of it: the operator stands still, and the API server forgets it.
            stop_process(operator.pid)
            client.call("DELETE", KINDS["Pod"].path("default") + "?labelSelector=sluice.dev/role=decode")
            served.until_children("Pod", lambda found: len(uids(found) & gone) == 2)
            plane.compact()
            plane.restart_api()
            os.kill(operator.pid, signal.SIGCONT)
            served.until_children("Pod", lambda found: len(found) == 5 and all(is_ready(pod) for pod in found))
            client.until(served.path, lambda there: there["status"]["roles"]["decode"]["summary"] == "2/2")
            # What comes later is heard of too.
            served.roll_to("2")
            served.until_served("2")
            assert operator.status()["state"] == "leading"


def is_ready(pod):
    return condition(pod, "Ready").get("status") == "True"


def test_killed_and_robbed_after_every_action_the_end_is_the_same(plane, served, namespace, tmp_path):
    """Each life of the operator carries out one action; then it dies, and somebody wipes status and annotations."""
    served.create(decode={"replicas": 2})
    with OperatorProcess(
        plane, f"mortal-{namespace}", namespace, "--die-after=1", f"--drained={tmp_path / 'd'}"
    ) as one:
        assert live_and_die(one, served, lambda: is_served(served, "1")) > 25
        served.roll_to("2")
        one.start()
        assert live_and_die(one, served, lambda: is_served(served, "2")) > 15
    with OperatorProcess(plane, f"final-{namespace}", namespace) as final:
        final.wait_for("leading")
        served.until_served("2")
        numbers = {kind: len(list(served.children(kind))) for kind in ("Deployment", "ConfigMap", "Secret")}
        assert numbers == {"Deployment": 3, "ConfigMap": 2, "Secret": 5}
        revisions = [r["metadata"]["labels"]["sluice.dev/verdict"] for r in served.children("ControllerRevision")]
        assert revisions == ["good", "good"]


def live_and_die(operator, served, is_done):
    """How many lives it took until only the status was left to be written, which is wiped each time."""
    for life in range(1, 100):
        assert operator.wait(60) == 9, operator.text()[-3000:]
        served.client.merge(served.path, {"metadata": {"annotations": None}})
        served.client.merge(f"{served.path}/status", {"status": None})
        # Nobody else waits for it: a standby would have to.
        served.client.delete(KINDS["Lease"].path(served.namespace, LEASE))
        if "write status" in operator.text().splitlines()[-1] and is_done():
            return life
        operator.start()
    raise AssertionError(operator.text()[-3000:])


def is_served(served, tag):
    """By pods of that image alone, all of them ready."""
    pods = served.engines()
    return len(pods) == 3 and {image_of(pod)[-1] for pod in pods} == {tag} and all(is_ready(pod) for pod in pods)
