"""The operator hears pods and tells them, over the real client: fakes of engines and gateways answer."""

from __future__ import annotations

import base64

import pytest
from operator_process import OperatorProcess

from sluice_operator.live.cluster import KINDS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def operator(plane, namespace, crd, fleet):
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}") as running:
        yield running


def test_a_deployment_is_routable_only_once_every_ready_gateway_routes_to_its_engines(operator, served, fleet):
    fleet.on_gateway = lambda gateway: setattr(gateway, "sees", False)
    served.create(gateway={"replicas": 2}, decode={"replicas": 2})
    fleet.until(lambda: len(fleet.gateways) == 2)
    one, other = fleet.gateways
    one.sees = True
    served.until("DecodeReady", "True")
    served.until("Routable", "False")
    other.sees = True
    served.until("Routable", "True")
    there = served.client.get(served.path)
    assert there["status"]["routable"] == 2
    secret = served.client.get(KINDS["Secret"].path(served.namespace, "m-key"))
    key = base64.b64decode(secret["data"]["key"]).decode()
    assert {key} == {k for e in fleet.engines.values() for k in e.keys} == {k for g in fleet.gateways for k in g.keys}


def test_a_victim_leaves_only_once_its_engine_says_that_it_is_empty(operator, served, fleet):
    def busy(engine):
        engine.holds, engine.running = True, 2

    fleet.on_engine = busy
    served.create(prefill={"replicas": 1}, decode={"replicas": 2}, drain={"timeoutSeconds": 600})
    served.until("Ready", "True")
    keeper, *_ = fleet.of("decode")
    keeper.running = 9
    served.change(decode={"replicas": 1})
    (victim,) = fleet.until(lambda: [engine for engine in fleet.of("decode") if engine.draining])
    assert victim is not keeper
    served.until_children("Pod", lambda pods: gate_of(pods, victim.pod) == "False")
    assert victim.pod in {pod["metadata"]["name"] for pod in served.engines()}
    victim.finish()
    served.until_children("Pod", lambda pods: victim.pod not in {p["metadata"]["name"] for p in pods})
    served.until("Ready", "True")
    fleet.until(lambda: [engine.pod for engine in fleet.of("decode")] == [keeper.pod])
    assert keeper.drains == 0


def gate_of(pods, name):
    conditions = [c for pod in pods if pod["metadata"]["name"] == name for c in pod["status"]["conditions"]]
    return next((c["status"] for c in conditions if c["type"] == "sluice.dev/serving"), "")


def test_an_engine_in_quarantine_is_kept_aside_and_replaced(operator, served, fleet):
    served.create(decode={"replicas": 1})
    served.until("Ready", "True")
    (sick,) = fleet.of("decode")
    sick.quarantined = True
    pod = KINDS["Pod"].path(served.namespace, sick.pod)
    # Its supervisor fails the readiness probe.
    not_ready = {"type": "ContainersReady", "status": "Unknown"}
    served.client.call(
        "PATCH", f"{pod}/status", {"status": {"conditions": [not_ready]}}, "application/strategic-merge-patch+json"
    )
    kept = served.client.until(pod, lambda p: "sluice.dev/quarantined" in p["metadata"]["labels"] and p, 90)
    assert [o["kind"] for o in kept["metadata"]["ownerReferences"]] == ["ModelDeployment"]
    served.until_status(lambda status: status["roles"]["decode"]["quarantined"] == 1)
    served.until("Ready", "True")


def test_a_fleet_that_does_not_answer_takes_nothing_away_and_holds_up_nobody(operator, served, fleet):
    def silent(one):
        one.silent = True

    fleet.on_engine = fleet.on_gateway = silent
    served.create()
    served.until("GatewayReady", "True")
    told = served.until("Routable", "Unknown")
    assert told["reason"]
    assert operator.status()["slowest_reconcile_s"] < 30
    fleet.on_engine = fleet.on_gateway = lambda one: None
    fleet.until(lambda: len(fleet.engines) == 2 and len(fleet.gateways) == 1)
    for one in (*fleet.engines.values(), *fleet.gateways):
        one.silent = False
    served.until("Ready", "True")
