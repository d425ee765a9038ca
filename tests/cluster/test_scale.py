"""Many ModelDeployments at once. Figures go to stdout (`pytest -s`); what is asserted is generous or exact."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from audit_log import most_at_once
from cluster_client import Refused
from cluster_deployment import Served, condition
from control_plane import ControlPlane
from operator_process import OperatorProcess

from sluice_operator.live.cluster import KINDS, MAX_IN_FLIGHT
from sluice_operator.live.reconcile import WORKERS

# Deployments of 10 pods each: `make e2e-scale` asks for more. Auto: decode engines as the operator wants them.
COUNT = int(os.environ.get("SLUICE_SCALE", "50"))
MODE = os.environ.get("SLUICE_SCALE_MODE", "Static")
SCALING = {"Static": {}, "Auto": {"scaling": {"mode": "Auto", "auto": {"minReplicas": 5, "maxReplicas": 8}}}}[MODE]
PODS = 10
CONVERGE_S = 12.0 * COUNT
MAX_RSS_MIB = 300
IDLE_S = 20.0

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(2 * CONVERGE_S + 200)]


@pytest.fixture
def plane(tools, tmp_path):
    with ControlPlane(tmp_path, kwok=True) as running:
        running.install_crd()
        running.add_nodes(COUNT // 10 + 1)
        yield running


def until_all(client, is_so, timeout_s):
    """Listed, not asked for one by one."""

    def told(there):
        return len(there["items"]) == COUNT and all(is_so(item) for item in there["items"])

    # A listing of all is what costs the API server most here.
    client.until(KINDS["ModelDeployment"].path("default"), told, timeout_s, every_s=1.0)


def is_complete(item):
    return condition(item, "Progressing").get("reason") == "Complete" and condition(item, "Ready")["status"] == "True"


def cpu_s(pid):
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_many_deployments_converge_and_then_cost_nothing(plane):
    client = plane.client()
    with OperatorProcess(plane, "op", "default", is_forked=False) as operator:
        operator.wait_for("leading")
        before = {name: cpu_s(pid) for name, pid in plane.pids.items()} | {"operator": cpu_s(operator.pid)}
        began, began_at = time.monotonic(), time.time()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: make(client, f"m{n:03d}"), range(COUNT)))
        made_s = time.monotonic() - began
        until_all(client, is_complete, CONVERGE_S)
        took = time.monotonic() - began
        after = {name: cpu_s(pid) for name, pid in plane.pids.items()} | {"operator": cpu_s(operator.pid)}
        asked = [r for r in plane.requests() if r.user == "op" and r.resource != "leases" and r.at >= began_at]
        looks = operator.status()["reconciles"]
        rss = psutil.Process(operator.pid).memory_info().rss >> 20
        print(f"\n{COUNT} deployments, {COUNT * PODS} pods: made in {made_s:.1f} s, complete after {took:.1f} s")
        print("CPU seconds:", {name: round(after[name] - before[name], 1) for name in after})
        print(f"operator: {rss} MiB, {looks} reconciles, {operator.status()}")
        print(
            f"requests: {len(asked)}, of them writes {sum(r.writes for r in asked)}; each look {len(asked) / looks:.1f}"
        )
        assert rss < MAX_RSS_MIB
        assert operator.status()["failures"].get("Defect", 0) == 0
        assert [r for r in asked if r.code == 429] == []
        # The client's own limit: without it, eight workers would ask for a hundred lists at one time. An answer may be
        # read, and the next question asked, before the API server has noted its end.
        at_once = most_at_once(r for r in asked if r.verb != "watch")
        print(f"most requests at one time: {at_once}")
        assert 8 < at_once < MAX_IN_FLIGHT + WORKERS
        quiet(plane, 15.0)
        used, looks, since = cpu_s(operator.pid), operator.status()["reconciles"], time.monotonic()
        quiet(plane, IDLE_S)
        lasted, looks = time.monotonic() - since, operator.status()["reconciles"] - looks
        share = (cpu_s(operator.pid) - used) / lasted
        print(f"{IDLE_S:.0f} idle seconds: no writes, {looks / lasted:.1f} looks a second, {share:.0%} of a core")


def quiet(plane, seconds):
    """Until nothing but the lease was written for so long."""
    deadline = time.monotonic() + 300
    while True:
        since = time.time() - seconds
        late = [r for r in plane.requests() if r.user == "op" and r.writes and r.resource != "leases" and r.at > since]
        if not late:
            return
        assert time.monotonic() < deadline, late[:5]
        time.sleep(1.0)


def make(client, name):
    served = Served(client, "default", name)
    try:
        served.create(prefill={"replicas": 4}, decode={"replicas": 5, **SCALING}, gateway={"replicas": 1})
    except Refused as error:
        raise AssertionError(name) from error
