"""What happens to single engines, end to end: quarantine, deaths and their last words, and who is routed to."""

from __future__ import annotations

import pytest
from cluster_deployment import is_engine, uids
from operator_process import OperatorProcess

from sluice_operator.live.cluster import KINDS
from sluice_operator.names import LABEL_QUARANTINED

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def operator(plane, namespace, crd, fleet):
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--dial={fleet.dial}") as running:
        yield running


def pod_path(served, name):
    return KINDS["Pod"].path(served.namespace, name)


def quarantine(served, engine):
    """As its supervisor does: the verdict in Engine/Load, and a readiness probe that fails."""
    engine.quarantined = True
    served.fail_readiness(engine.pod)


def events_of(served, reason):
    return served.client.items(KINDS["Event"].path(served.namespace) + f"?fieldSelector=reason={reason}")


def test_of_two_wedged_engines_one_is_kept_for_a_while_and_both_are_replaced(operator, served, fleet):
    served.create(decode={"replicas": 2}, quarantine={"maxPods": 1, "maxSeconds": 20})
    served.until("Ready", "True")
    sick = fleet.until(lambda: len(fleet.of("decode")) == 2 and fleet.of("decode"))
    for engine in sick:
        quarantine(served, engine)
    names = {engine.pod for engine in sick}

    def one_is_kept(pods):
        kept = [pod for pod in pods if pod["metadata"]["name"] in names]
        return len(kept) == 1 and LABEL_QUARANTINED in kept[0]["metadata"]["labels"] and kept

    (kept,) = served.until_children("Pod", one_is_kept)
    assert [owner["kind"] for owner in kept["metadata"]["ownerReferences"]] == ["ModelDeployment"]
    told = served.until("Degraded", "True", "PodsQuarantined")
    assert kept["metadata"]["name"] in told["message"]
    served.until("Ready", "True")
    assert (
        served.status()["roles"]["decode"] | {"summary": "2/2", "quarantined": 1} == served.status()["roles"]["decode"]
    )
    assert len(events_of(served, "Quarantined")) == 1
    # Its time over, it goes, and nobody else does.
    served.client.until(pod_path(served, kept["metadata"]["name"]), lambda there: there is None)
    served.until("Degraded", "False", "Healthy")
    assert len([pod for pod in served.children("Pod") if is_engine(pod)]) == 3


def test_with_no_pod_to_be_kept_a_wedged_one_is_only_replaced(operator, served, fleet):
    served.create(quarantine={"maxPods": 0})
    served.until("Ready", "True")
    (sick,) = fleet.of("decode")
    quarantine(served, sick)
    served.client.until(pod_path(served, sick.pod), lambda there: there is None)
    served.until("Ready", "True")
    assert fleet.until(lambda: sick.pod not in {engine.pod for engine in fleet.of("decode")})
    assert events_of(served, "Quarantined") == []


@pytest.mark.parametrize(
    ("status", "words", "reason"),
    [(3, "wedged: rank 0 in step 7", "Wedged"), (1, "died: leader: MemoryError", "Died")],
)
def test_an_engine_that_ends_and_comes_back_leaves_one_incident_each_time(
    operator, served, fleet, status, words, reason
):
    served.create()
    served.until("Ready", "True")
    (engine,) = fleet.of("decode")
    before = uids(served.engines())
    for restarts in (1, 2):
        path = pod_path(served, engine.pod)
        crash = {"sluice.test/fail": f"{words}\nand a line for experts", "sluice.test/exit": str(status)}
        served.client.merge(path, {"metadata": {"annotations": crash}})
        served.client.until(path, lambda pod, n=restarts: has_restarted(pod, n))
        served.until("Ready", "False")
        served.client.merge(path, {"metadata": {"annotations": dict.fromkeys(crash)}})
        served.until("Ready", "True")
        # As with a kubelet, so an operator that looks only now misses nothing.
        assert (
            served.client.get(path)["status"]["containerStatuses"][0]["lastState"]["terminated"]["message"]
            == (crash["sluice.test/fail"])
        )
        told = served.until_status(lambda s, n=restarts: len(s["incidents"]) == n and s["incidents"])
        assert {(i["reason"], i["message"], i["pod"], i["role"]) for i in told} == {
            (reason, words, engine.pod, "decode")
        }
        assert len({incident["id"] for incident in told}) == restarts
        assert len(events_of(served, f"Engine{reason}")) == restarts
    assert served.until("Degraded", "True", "RecentIncidents")["message"]
    # The container came back by itself: nobody replaced its pod.
    assert uids(served.engines()) == before


def has_restarted(pod, times):
    return pod["status"]["containerStatuses"][0]["restartCount"] == times


def test_routable_follows_the_gateway_that_sees_least_and_costs_nobody_his_pod(operator, served, fleet):
    served.create(gateway={"replicas": 2})
    served.until("Routable", "True", "Routed")
    served.until("Ready", "True")
    before = uids(served.engines())
    one, other = fleet.gateways
    (decode,) = fleet.of("decode")
    one.blind = {decode.pod}
    served.until("Routable", "False", "NoPair")
    assert served.until("Ready", "False")["message"].startswith("Routable: ")
    assert served.status()["routable"] == 0
    one.blind = set()
    served.until("Routable", "True")
    # Silence is no answer: nobody knows, and what serves is left alone.
    other.silent = True
    told = served.until("Routable", "Unknown", "NoGatewayReport")
    assert other.pod in told["message"]
    other.silent = False
    served.until("Ready", "True")
    assert uids(served.engines()) == before
    assert not any(engine.drains for engine in fleet.engines.values())
