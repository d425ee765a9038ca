"""Autoscaling end to end: what fakes of engines and gateways report, and how many pods there are in the end.

Waits of minutes are made short by --constant; windows are the spec's own.
"""

from __future__ import annotations

import pytest
from cluster_deployment import Served
from external_metrics import METRIC, ExternalMetrics
from node_pools import POOL, node
from operator_process import OperatorProcess

from sluice_operator.api.crd import API_VERSION, KIND
from sluice_operator.live.cluster import KINDS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Status tells of holds too, and soon.
FAST = ("--constant=decide.autoscale.WARM_UP_S=2", "--constant=decide.status.LOAD_PERIOD_S=1")
FULL, HALF = 1000, 500


@pytest.fixture
def operator(plane, namespace, crd, fleet):
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}", *FAST) as running:
        yield running


def auto(replicas=1, most=4, window_s=6, least=1, **more):
    rules = {"scaleDown": {"stabilizationWindowSeconds": window_s}}
    limits = {"minReplicas": least, "maxReplicas": most, "behavior": rules} | more
    return {"replicas": replicas, "scaling": {"mode": "Auto", "auto": limits}}


def until_changed(served, reason, verdict):
    """The newest decision for that reason that changed something."""

    def found(status):
        told = status.get("scaling", {}).get("decisions", ())
        return next((d for d in told if (d["reason"], d["verdict"]) == (reason, verdict)), None)

    return served.until_status(found)


def until_held(served, reason):
    """The last decision of all, once it is a hold for that reason."""

    def found(status):
        last = (status.get("scaling", {}).get("decisions") or [{}])[0]
        return last if (last.get("reason"), last.get("verdict")) == (reason, "Hold") else None

    return served.until_status(found)


def until_replicas(served, number):
    served.client.until(served.path, lambda there: there["spec"]["decode"]["replicas"] == number, 240)


def replicas(served):
    return served.client.get(served.path)["spec"]["decode"]["replicas"]


def test_a_burst_grows_decode_and_when_it_is_over_the_idle_engine_goes(operator, served, fleet):
    served.create(decode=auto(window_s=20))
    served.until("Ready", "True")
    (first,) = fleet.until(lambda: fleet.of("decode"))
    first.running, first.running_pages = 10, FULL
    up = until_changed(served, "LoadAboveTarget", "Up")
    assert (up["fromReplicas"], up["toReplicas"]) == (1, 2)
    assert "10 running" in up["inputs"]
    served.until("Ready", "True")
    served.until_status(lambda status: status["roles"]["decode"]["summary"] == "2/2")
    # One engine could not carry it: it stays.
    until_held(served, "AtTarget")
    first.running_pages = 100
    down = until_changed(served, "LoadBelowTarget", "Down")
    assert (down["fromReplicas"], down["toReplicas"]) == (2, 1)
    served.until_status(lambda status: status["roles"]["decode"]["summary"] == "1/1" and status["decodeReplicas"] == 1)
    # The one with the least work went, through a drain.
    assert fleet.until(lambda: [engine.pod for engine in fleet.of("decode")] == [first.pod])
    assert (first.drains, first.running) == (0, 10)
    events = served.client.items(KINDS["Event"].path(served.namespace) + "?fieldSelector=reason=Scaled")
    assert sorted(event["message"].partition(":")[0] for event in events) == [
        "decode from 1 to 2",
        "decode from 2 to 1",
    ]


def test_requests_that_find_no_room_at_decode_grow_it_and_one_step_at_a_time_holds(operator, served, fleet):
    served.create(decode=auto(most=3))
    served.until("Ready", "True")
    (gateway,) = fleet.gateways
    gateway.for_decode, gateway.oldest_for_decode_ms = 5, 900
    until_replicas(served, 2)
    until_replicas(served, 3)
    served.until_status(lambda status: status["roles"]["decode"]["summary"] == "3/3")
    # maxReplicas holds, however old the queue gets.
    gateway.oldest_for_decode_ms = 9000
    looked = operator.status()["reconciles"]
    operator.until(lambda status: status["reconciles"] >= looked + 3)
    assert replicas(served) == 3


def test_what_is_not_known_holds(operator, served, fleet):
    served.create(decode=auto(), gateway={"replicas": 2})
    served.until("Ready", "True")
    (engine,) = fleet.of("decode")
    one, _ = fleet.gateways
    until_held(served, "Idle")
    one.silent = True
    held = until_held(served, "MetricsMissing")
    engine.running, engine.running_pages = 10, FULL
    looked = operator.status()["reconciles"]
    operator.until(lambda status: status["reconciles"] >= looked + 3)
    assert replicas(served) == 1
    assert one.pod in held["inputs"]
    one.silent = False
    until_replicas(served, 2)


def test_a_prefill_bottleneck_does_not_grow_decode_and_is_named(operator, served, fleet):
    served.create(decode=auto())
    served.until("Ready", "True")
    (engine,) = fleet.of("decode")
    (gateway,) = fleet.gateways
    engine.running, engine.running_pages = 1, 100
    engine.waiting, engine.reserved_pages = 12, 880
    gateway.for_prefill, gateway.oldest_for_prefill_ms = 6, 5000
    until_held(served, "PrefillBound")
    hint = served.status()["scaling"]["hint"]
    assert "raise prefill.replicas above 1" in hint
    assert replicas(served) == 1
    # With prefill in time again there is nothing to hint at.
    engine.waiting = engine.reserved_pages = gateway.for_prefill = gateway.oldest_for_prefill_ms = 0
    until_held(served, "AtTarget")
    served.until_status(lambda status: not status["scaling"].get("hint"))


def test_pods_that_find_no_node_are_given_back_and_not_asked_for_again_at_once(client, plane, namespace, crd, fleet):
    client.create("/api/v1/nodes", node(namespace, major=10, product="NVIDIA-B200", gpus=3))
    served = Served(client, namespace)
    template = {"spec": {"nodeSelector": {POOL: namespace}}}
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}", *FAST) as operator:
        served.create(
            accelerator={"type": "GPU", "gpu": {}},
            gateway={"replicas": 1, "template": template},
            prefill={"replicas": 1, "template": template},
            decode=auto(most=4, pendingMaxSeconds=5) | {"template": template},
        )
        served.until("Ready", "True")

        def loaded(engine):
            engine.running, engine.running_pages = 10, FULL

        fleet.on_engine = loaded
        (first,) = fleet.of("decode")
        loaded(first)
        given = until_changed(served, "PendingGivenBack", "Down")
        assert given["toReplicas"] == 2
        served.until_children("Deployment", lambda found: most_of(found) == 2)
        until_held(served, "AfterGiveBack")
        looked = operator.status()["reconciles"]
        operator.until(lambda status: status["reconciles"] >= looked + 3)
        assert replicas(served) == 2
        assert len(fleet.of("decode")) == 2
        assert not any(engine.drains for engine in fleet.of("decode"))


def most_of(deployments):
    return max(d["spec"]["replicas"] for d in deployments)


def test_nothing_shrinks_in_a_rollout_and_then_it_does(operator, served, fleet):
    served.create(decode=auto(replicas=3, window_s=0))

    def loaded(engine):
        engine.running, engine.running_pages = 4, HALF

    fleet.on_engine = loaded
    served.until("Progressing", "True", "Complete")
    before = list(fleet.engines.values())
    served.roll_to("2")
    served.until("Progressing", "True", "RollingOut")
    fleet.on_engine = lambda engine: None
    for engine in before:
        engine.running = engine.running_pages = 0
    until_held(served, "RollingOut")
    assert replicas(served) == 3
    served.until_served("2")
    assert until_changed(served, "Idle", "Down")["toReplicas"] == 1
    served.until_status(lambda status: status["decodeReplicas"] == 1)
    served.until("Ready", "True")


def test_whoever_else_drives_it_is_obeyed_and_never_overruled(plane, operator, served, fleet):
    """mode External: an HPA over an external metric, and a person with kubectl; the operator writes no replicas."""
    served.create(decode={"replicas": 1, "scaling": {"mode": "External"}})
    served.until("Ready", "True")
    plane.kubectl("scale", "mdep/m", "-n", served.namespace, "--replicas=2")
    served.until_status(lambda status: status["roles"]["decode"]["summary"] == "2/2")
    source = {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "10"}}
    hpa = {
        "metadata": {"name": "m"},
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": "m"},
            "minReplicas": 1,
            "maxReplicas": 6,
            "metrics": [{"type": "External", "external": source}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
    path = f"/apis/autoscaling/v2/namespaces/{served.namespace}/horizontalpodautoscalers"
    with ExternalMetrics(served.client, plane.folder / "server.crt", plane.folder / "server.key") as metrics:
        metrics.value = 38
        served.client.create(path, hpa)
        served.until_status(lambda status: status["roles"]["decode"]["summary"] == "4/4")
        metrics.value = 12
        served.until_status(lambda status: status["roles"]["decode"]["summary"] == "2/2")
        # It goes by the pods that the operator tells it of.
        served.client.until(f"{path}/m", lambda there: there["status"]["currentReplicas"] == 2)
        served.client.delete(f"{path}/m")
    assert [r for r in plane.requests() if r.user == operator.user and r.resource.endswith("/scale")] == []
    assert served.status()["scaling"].get("decisions", []) == []
