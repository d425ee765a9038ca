"""Who may talk to whom: the policies as rendered, evaluated, against a table that is written down here once more."""

from __future__ import annotations

import pytest
from network_policy import Address, Pod, allows
from operator_cluster import manifest

from sluice_operator import names
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.names import OPERATOR_LABELS, PodRole
from sluice_operator.render.children import OwnerRef, standing
from sluice_operator.render.engine import pod_template
from sluice_operator.render.revision import StandardRenderer

RENDERER = StandardRenderer("control:1")
ENGINE, SOURCE, PROBE, DEBUG, HTTP, CONTROL = 7000, 7001, 7002, 7003, 8000, 8001
TRANSFER = (23000, 23011, 23020)
# Whatever is open, and what lies beside it.
PORTS = sorted(
    {22, 53, 80, 443, 6443, 8080, 10250, 22999, 23021, ENGINE, SOURCE, PROBE, DEBUG, HTTP, CONTROL, *TRANSFER}
)

# (who, whom) -> TCP ports. "anybody": every source that is not kept in by a policy of ours.
NEEDED = {
    ("anybody", "prefill"): {PROBE},  # kubelet's probes, metrics
    ("anybody", "decode"): {PROBE},
    ("anybody", "gateway"): {PROBE, HTTP},
    ("gateway", "prefill"): {ENGINE, PROBE},  # PROBE: the status page asks the supervisors
    ("gateway", "decode"): {ENGINE, PROBE},
    ("operator", "prefill"): {ENGINE},
    ("operator", "decode"): {ENGINE},
    ("operator", "gateway"): {CONTROL},
    ("decode", "prefill"): {SOURCE, *TRANSFER},
    ("prefill", "decode"): {*TRANSFER},  # UCX connects from either side
    ("gateway", "api server"): {443, 6443},  # EndpointSlices
    ("gateway", "internet"): {443, 6443},  # a policy cannot name the API server
}


def spec(**changes):
    return from_json(ModelDeploymentSpec, manifest(**changes), "spec")


def policies(told, namespace="ns", name="m"):
    return [item for item in standing(OwnerRef(namespace, name, "u"), told) if item["kind"] == "NetworkPolicy"]


def labels_of(role, told, name="m"):
    """Of the pods themselves, not of a selector."""
    if role is PodRole.GATEWAY:
        return RENDERER.gateway(name, told, "g")["metadata"]["labels"]
    return pod_template(name, told, role, "r1")["metadata"]["labels"]


def world(told):
    ours = {role.value: Pod("ns", labels_of(role, told)) for role in PodRole}
    others = {
        "operator": Pod("sluice", OPERATOR_LABELS),
        "stranger": Pod("ns", {"app": "x"}),
        "prometheus": Pod("monitoring", {"app.kubernetes.io/name": "prometheus"}),
        "dns": Pod("kube-system", {"k8s-app": "kube-dns"}),
        "node": Address("172.18.0.2"),
        "api server": Address("172.18.0.3"),
        "internet": Address("93.184.216.34"),
    }
    for role in PodRole:
        others[f"{role} of another deployment"] = Pod("ns", labels_of(role, told, "n"))
        others[f"{role} of a namesake"] = Pod("elsewhere", labels_of(role, told))
    return ours, others


def is_needed(who, whom, port, protocol, ours):
    """Everybody may ask any name server; nothing else is spoken over UDP."""
    if port == 53 and whom not in ours:
        return True
    if protocol == "UDP":
        return False
    asked = NEEDED.get((who, whom), set())
    return port in asked or (who not in ours and port in NEEDED.get(("anybody", whom), set()))


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_what_is_needed_passes_and_nothing_else_does(protocol):
    told = spec()
    rendered = policies(told)
    ours, others = world(told)
    everybody = ours | others
    wrong = []
    for who, source in everybody.items():
        for whom, target in everybody.items():
            if who == whom or (who not in ours and whom not in ours):
                continue
            for port in PORTS:
                needed = is_needed(who, whom, port, protocol, ours)
                if who in ours and whom not in ours and who == "gateway" and protocol == "TCP":
                    needed = needed or port in NEEDED["gateway", "api server"]
                if allows(rendered, source, target, port, protocol) is not needed:
                    wrong.append(f"{who} -> {whom}:{port}/{protocol} {'blocked' if needed else 'open'}")
    assert wrong == []


@pytest.mark.parametrize("uri", ["pvc://models/tiny", "hf://owner/name@v1"])
def test_engines_reach_the_hub_only_if_their_model_comes_from_there(uri):
    told = spec(model={"uri": uri})
    ours, others = world(told)
    for role in ("prefill", "decode"):
        assert allows(policies(told), ours[role], others["internet"], 443, "TCP") is uri.startswith("hf:")
        assert not allows(policies(told), ours[role], others["internet"], 80, "TCP")
        assert not allows(policies(told), ours[role], others["internet"], 6443, "TCP")


def test_pods_of_every_revision_and_those_in_quarantine_are_kept_in():
    """A pod that was released from its ReplicaSet has lost the label of its revision."""
    told = spec()
    ours, others = world(told)
    rest = {k: v for k, v in ours["decode"].labels.items() if k != names.LABEL_REVISION}
    released = Pod("ns", rest | {names.LABEL_QUARANTINED: "true"})
    assert allows(policies(told), ours["gateway"], released, PROBE, "TCP")
    assert not allows(policies(told), others["stranger"], released, ENGINE, "TCP")
    assert not allows(policies(told), released, others["internet"], 443, "TCP")


def test_each_deployment_is_an_island_also_beside_another():
    told = spec()
    both = policies(told) + policies(told, name="n") + policies(told, namespace="elsewhere")
    ours, others = world(told)
    for whom in ("prefill of another deployment", "prefill of a namesake"):
        for port in (ENGINE, SOURCE, *TRANSFER):
            assert not allows(both, ours["decode"], others[whom], port, "TCP")
            assert not allows(both, others[whom], ours["decode"], port, "TCP")


# -- the evaluator itself ---------------------------------------------------------------------------------------------


def policy(**told):
    return {"metadata": {"namespace": "a"}, "spec": {"podSelector": {}, **told}}


def test_the_evaluator_denies_by_default_and_only_what_a_policy_selects():
    one, two = Pod("a", {"x": "1"}), Pod("b", {"x": "1"})
    closed = [policy(policyTypes=["Ingress"])]
    assert not allows(closed, two, one, 80, "TCP")
    assert allows(closed, one, two, 80, "TCP")
    assert allows([policy(policyTypes=["Ingress"], ingress=[{}])], two, one, 80, "TCP")


def test_the_evaluator_knows_peers_ports_and_blocks():
    one, two, far = Pod("a", {"x": "1"}), Pod("b", {"x": "1"}, namespace_labels={"team": "t"}), Address("10.1.2.3")

    def ingress(**rule):
        return [policy(policyTypes=["Ingress"], ingress=[rule])]

    same = ingress(**{"from": [{"podSelector": {"matchLabels": {"x": "1"}}}]})
    assert allows(same, Pod("a", {"x": "1"}), one, 80, "TCP")
    assert not allows(same, two, one, 80, "TCP")
    team = [{"namespaceSelector": {"matchLabels": {"team": "t"}}}]
    assert allows(ingress(**{"from": team}), two, one, 80, "TCP")
    block = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    assert not allows(ingress(**{"from": [block]}), far, one, 80, "TCP")
    assert allows(ingress(**{"from": [block]}), Address("10.2.0.1"), one, 80, "TCP")
    ranged = ingress(ports=[{"port": 80, "endPort": 90, "protocol": "TCP"}])
    assert [allows(ranged, two, one, port, "TCP") for port in (79, 80, 90, 91)] == [False, True, True, False]
    assert not allows(ranged, two, one, 80, "UDP")
    with pytest.raises(ValueError, match="unknown members"):
        allows(ingress(fom=[]), two, one, 80, "TCP")


def test_gateways_reach_the_api_server_where_the_operator_is_told_that_it_listens():
    """On port 16443 no gateway found an engine: the chart's value was for the operator alone."""
    told = spec()
    ours, others = world(told)
    assert StandardRenderer("control:1").api_ports == (443, 6443)
    made = standing(OwnerRef("ns", "m", "u"), told, (16443,))
    there = [item for item in made if item["kind"] == "NetworkPolicy"]
    for port in (443, 6443, 16443):
        assert allows(there, ours["gateway"], others["internet"], port, "TCP") is (port == 16443)
        assert not allows(there, ours["decode"], others["internet"], port, "TCP")


def test_only_who_sends_traces_reaches_the_collector():
    plain, traced = spec(), spec(monitoring={"otlpEndpoint": "http://collector:4318/v1/traces"})
    for told, is_open in ((plain, False), (traced, True)):
        ours, others = world(told)
        for role in ("prefill", "decode", "gateway"):
            assert allows(policies(told), ours[role], others["internet"], 4318, "TCP") is is_open
            assert not allows(policies(told), ours[role], others["internet"], 4317, "TCP")
