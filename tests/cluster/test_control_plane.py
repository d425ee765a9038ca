"""The control plane of the tests itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import control_plane
import psutil
import pytest
from audit_log import seconds
from cluster_client import Refused
from control_plane import ControlPlane, ControlPlaneError

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SUPPORT = Path(control_plane.__file__).parent


def node(client, name, labels=(), allocatable=()):
    body = {"kind": "Node", "metadata": {"name": name, "labels": dict(labels)}}
    if allocatable:
        body["status"] = {kind: dict(allocatable) for kind in ("allocatable", "capacity")}
    client.create("/api/v1/nodes", body)


def pod(client, namespace, name, annotations=(), gates=()):
    spec = {
        "containers": [{"name": "main", "image": "x"}],
        "readinessGates": [{"conditionType": gate} for gate in gates],
    }
    meta = {"name": name, "annotations": dict(annotations)}
    client.create(f"/api/v1/namespaces/{namespace}/pods", {"metadata": meta, "spec": spec})
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def condition(item, kind):
    found = [c["status"] for c in item.get("status", {}).get("conditions", ()) if c["type"] == kind]
    return found[0] if found else None


def is_gone(pid):
    """Nobody, or a zombie that its parent has not asked for yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_listens_on_loopback_only(plane):
    listening = {
        connection.laddr.ip
        for pid in plane.pids.values()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_two_of_them_run_side_by_side_and_leave_nothing(plane, tmp_path):
    with ControlPlane(tmp_path) as other:
        assert other.url != plane.url
        other.client().create("/api/v1/namespaces", {"metadata": {"name": "only-there"}})
        assert plane.client().find("/api/v1/namespaces/only-there") is None
        pids = list(other.pids.values())
        assert len(pids) == 4
    assert all(is_gone(pid) for pid in pids)


def test_it_dies_with_whoever_started_it(tools, tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from control_plane import ControlPlane\n"
        "with ControlPlane(Path(sys.argv[1])) as plane:\n"
        "    print(*plane.pids.values(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        try:
            pids = [int(pid) for pid in starter.stdout.readline().split()]
            assert len(pids) == 4
            assert not any(is_gone(pid) for pid in pids)
        finally:
            starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_that_was_taken_meanwhile_is_chosen_anew(tools, tmp_path, monkeypatch):
    choose = control_plane._free_ports
    with control_plane.socket.create_server(("127.0.0.1", 0)) as held:
        choices = [{"etcd": held.getsockname()[1], "api": choose("api")["api"]}]
        monkeypatch.setattr(control_plane, "_free_ports", lambda *names: choices.pop() if choices else choose(*names))
        with ControlPlane(tmp_path) as plane:
            assert not choices
            assert plane.client().get_text("/readyz") == "ok"


def test_a_process_that_ends_is_named_with_its_log(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(control_plane, "STAGES", tmp_path / "nothing")
    with pytest.raises(ControlPlaneError, match=r"(?s)kwok ended with 1: .*nothing"):
        with ControlPlane(tmp_path, kwok=True) as plane:
            plane.wait_until_ended("kwok")


def test_the_audit_log_tells_who_wrote_what(plane, client, namespace):
    client.create(f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "told"}})
    asked = [r for r in plane.requests() if r.namespace == namespace and r.name == "told"]
    assert [(r.user, r.verb, r.resource, r.code, r.writes) for r in asked] == [
        ("admin", "create", "configmaps", 201, True)
    ]


def test_a_user_may_do_what_his_roles_let_him(plane, client, namespace):
    kubeconfig = plane.user_kubeconfig("visitor")
    refused = plane.kubectl("get", "pods", "-n", namespace, f"--kubeconfig={kubeconfig}", fails=True)
    assert 'User "visitor" cannot list resource "pods"' in refused


def test_what_is_refused_says_why(client):
    with pytest.raises(Refused, match="must be no more than 63") as caught:
        client.create("/api/v1/namespaces", {"metadata": {"name": "x" * 64}})
    assert caught.value.code == 422


def test_a_pod_starts_and_is_ready(client, namespace, nodes):
    path = pod(client, namespace, "p")
    there = client.until(path, lambda p: condition(p, "Ready") == "True" and p)
    assert there["status"]["phase"] == "Running"
    assert there["spec"]["nodeName"]
    client.delete(path)
    client.until(path, lambda p: p is None)


def test_a_closed_readiness_gate_keeps_a_pod_unready(client, namespace, nodes):
    path = pod(client, namespace, "p", gates=["sluice.dev/serving"])
    client.until(path, lambda p: condition(p, "ContainersReady") == "True")
    assert condition(client.get(path), "Ready") == "False"
    for gate, ready in (("True", "True"), ("False", "False")):
        told = {"type": "sluice.dev/serving", "status": gate}
        patch = {"status": {"conditions": [told]}}
        client.call("PATCH", f"{path}/status", patch, "application/strategic-merge-patch+json")
        client.until(path, lambda p, ready=ready: condition(p, "Ready") == ready)


def test_a_slow_start_takes_its_time(client, namespace, nodes):
    path = pod(client, namespace, "p", {"sluice.test/start-delay": "3s"})
    there = client.until(path, lambda p: condition(p, "Ready") == "True" and p)
    told = {c["type"]: seconds(c["lastTransitionTime"]) for c in there["status"]["conditions"]}
    assert told["Ready"] - told["Initialized"] >= 2  # both are cut to seconds


def test_a_failing_pod_crashes_with_its_message_and_recovers(client, namespace, nodes):
    path = pod(client, namespace, "p", {"sluice.test/fail": "bad weights"})
    there = client.until(path, lambda p: p["status"].get("containerStatuses", [{}])[0].get("restartCount") and p)
    container = there["status"]["containerStatuses"][0]
    assert container["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container["lastState"]["terminated"]["message"] == "bad weights"
    client.merge(path, {"metadata": {"annotations": {"sluice.test/fail": None}}})
    healed = client.until(path, lambda p: condition(p, "Ready") == "True" and p)
    assert healed["status"]["containerStatuses"][0]["restartCount"] == 1


def test_an_evicted_pod_has_failed(client, namespace, nodes):
    path = pod(client, namespace, "p")
    client.until(path, lambda p: condition(p, "Ready") == "True")
    client.merge(path, {"metadata": {"annotations": {"sluice.test/evict": "The node was low on memory."}}})
    there = client.until(path, lambda p: p["status"]["phase"] == "Failed" and p)
    assert there["status"]["reason"] == "Evicted"
    assert condition(there, "Ready") == "False"


def test_the_scheduler_looks_at_labels_and_gpus(client, namespace, nodes):
    node(client, "gpu", {"sluice.test/pool": "gpu"}, {"cpu": "64", "pods": "10", "nvidia.com/gpu": "8"})
    spec = {
        "nodeSelector": {"sluice.test/pool": "gpu"},
        "containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}],
    }
    pods = f"/api/v1/namespaces/{namespace}/pods"
    client.create(pods, {"metadata": {"name": "first"}, "spec": spec})
    client.until(f"{pods}/first", lambda p: p["spec"].get("nodeName") == "gpu")
    client.create(pods, {"metadata": {"name": "second"}, "spec": spec})
    waits = client.until(f"{pods}/second", lambda p: condition(p, "PodScheduled") == "False" and p)
    told = next(c["message"] for c in waits["status"]["conditions"] if c["type"] == "PodScheduled")
    assert "Insufficient nvidia.com/gpu" in told
