"""Where pods may go: the real scheduler over twelve node pools, the condition Placed and `sluice plan` agree."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import yaml
from cluster_deployment import Served, condition, is_scheduled
from node_pools import CASES, CLIQUE, GPU, POOL, POOLS, Case, node
from operator_cluster import manifest
from operator_process import OperatorProcess

from sluice_cli.__main__ import main
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.live.cluster import KINDS
from sluice_operator.names import PodRole
from sluice_operator.placement.placement import place
from sluice_operator.render.revision import StandardRenderer, role_data

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

NAMESPACE = "placement"
NODES = "/api/v1/nodes"


@pytest.fixture(scope="session")
def placed_namespace(client):
    client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    client.until(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default", bool)
    return NAMESPACE


@pytest.fixture(scope="session")
def operator(plane, placed_namespace, nodes, crd):
    with OperatorProcess(plane, "op-placement", placed_namespace, "--nodes") as running:
        yield running


@pytest.fixture(scope="session")
def pools(plane, client, placed_namespace):
    """The nodes and their pods, as kubectl prints them when the controllers have said what they have to."""
    for item in POOLS:
        client.create(NODES, item)
    container = {"name": "main", "image": "x", "resources": {"limits": {GPU: "8"}}}
    filler = {"metadata": {"name": "filler"}, "spec": {"nodeName": "pool-full", "containers": [container]}}
    client.create(KINDS["Pod"].path(placed_namespace), filler)
    for item in POOLS:
        client.until(f"{NODES}/{item['metadata']['name']}", is_settled)
    return plane.kubectl("get", "nodes,pods", "-A", "-o", "yaml")


def is_settled(there: Any) -> bool:
    """Ready and without the taint that every node begins with, or down for good; a cordon has its taint too."""
    taints = {taint["key"] for taint in there["spec"].get("taints", [])}
    begins, cordon = "node.kubernetes.io/not-ready", "node.kubernetes.io/unschedulable"
    is_ready = condition(there, "Ready").get("status") == "True"
    return (begins in taints) is not is_ready and (cordon in taints) is bool(there["spec"].get("unschedulable"))


@pytest.fixture(scope="session")
def deployments(client, operator, pools):
    """All at once, for the operator and the scheduler have time for them all while one waits."""
    made = {case.name: Served(client, NAMESPACE, case.name) for case in CASES}
    for case in CASES:
        made[case.name].create(**case.spec)
    return made


def offline(tmp_path, served: Served, pools: str) -> dict[tuple[str, str], str]:
    """What `sluice plan` says: (node, role) -> matches, or why not."""
    mdep, nodes = tmp_path / "mdep.yaml", tmp_path / "nodes.yaml"
    spec = served.client.get(served.path)["spec"]
    mdep.write_text(yaml.safe_dump({"kind": "ModelDeployment", "metadata": {"name": served.name}, "spec": spec}))
    nodes.write_text(pools)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["plan", "-f", str(mdep), "--nodes", str(nodes)]) in (0, 1)
    text = told.getvalue()
    lines = text[text.index("Placed: ") :].splitlines()[1:]
    return {(words[0], words[1]): " ".join(words[2:]) for words in map(str.split, lines)}


def nodes_of(pool: str) -> set[str]:
    return {item["metadata"]["name"] for item in POOLS if item["metadata"]["labels"][POOL] == pool}


def test_the_scheduler_the_condition_and_the_plan_agree_on_every_pool(subtests, deployments, pools, tmp_path):
    for case in CASES:
        with subtests.test(case=case.name):
            judge(case, deployments[case.name], offline(tmp_path, deployments[case.name], pools))
    hopper = deployments["hopper"]
    assert hopper.until("Ready", "False", "NoNodeMatches")["message"].startswith("Placed: ")
    assert hopper.status()["reason"] == "NoNodeMatches"


def judge(case: Case, served: Served, told: dict[tuple[str, str], str]) -> None:
    matching = {name for (name, _), why in told.items() if why == "matches"}
    assert matching <= nodes_of(case.pool)
    assert bool(matching) is not bool(case.refusal)
    if not case.refusal:
        served.until("Placed", "True", "Placed")
        served.until_children("Pod", lambda pods: len(pods) == 3 and all(is_scheduled(pod) for pod in pods))
        assert {pod["spec"]["nodeName"] for pod in served.engines()} <= matching
        assert served.status()["placement"]["matching"] == len(matching)
        return
    for name in nodes_of(case.pool):
        assert f"no: {case.refusal}: " in told[name, "prefill"] or "no: compute major" in told[name, "prefill"]
    # A pool that is only full now is a place to wait for: the scheduler says so, no requirement does.
    is_full = case.refusal == "no free GPU"
    found = served.until("Placed", "False", "Unschedulable" if is_full else "NoNodeMatches")
    if not is_full:
        reasons = served.status()["placement"]["reasons"]
        assert any(f"cannot be used: {case.refusal}" in reason for reason in reasons), (found, reasons)
        assert "prefill: prefill" not in found["message"]
    quotes = served.until_quoted(case.scheduler)
    assert all(not is_scheduled(pod) for pod in served.engines())
    if is_full:
        assert quotes[0][:100] in found["message"]


def test_a_node_that_comes_later_is_found(client, operator, placed_namespace):
    served = Served(client, placed_namespace, "later")
    client.create(NODES, node("later", "later-hopper", 9, "NVIDIA-H100-80GB-HBM3"))
    template = {"spec": {"nodeSelector": {POOL: "later"}}}
    roles = {role: {"replicas": 1, "template": template} for role in ("prefill", "decode")}
    served.create(accelerator={"type": "GPU", "gpu": {"computeMajor": [10]}}, **roles)
    served.until("Placed", "False", "NoNodeMatches")
    # A node is not ready at first, and the operator looks at nodes now and then only.
    served.until_quoted("prefill: 1 node cannot be used: compute major is not 10")
    client.create(NODES, node("later", "later-b200", 10, "NVIDIA-B200"))
    served.until("Ready", "True")
    assert {pod["spec"]["nodeName"] for pod in served.engines()} == {"pool-later-b200"}
    assert served.status()["placement"]["matching"] == 1


# -- NVLink domains ---------------------------------------------------------------------------------------------------


def domain_nodes(client, pool, cliques, gpus):
    for index, clique in enumerate(cliques):
        item = node(pool, f"{pool}-{index}", 10, "NVIDIA-GB200", gpus, labels={CLIQUE: clique})
        client.create(NODES, item)


def domain_deployment(client, pool, policy, replicas):
    served = Served(client, NAMESPACE, pool)
    template = {"spec": {"nodeSelector": {POOL: pool}}}
    roles = {role: {"replicas": replicas, "template": template} for role in ("prefill", "decode")}
    served.create(accelerator={"type": "GPU", "gpu": {"domain": {"policy": policy}}}, **roles)
    return served


def domains_of(client, served):
    names = {pod["spec"]["nodeName"] for pod in served.engines()}
    return {client.get(f"{NODES}/{name}")["metadata"]["labels"][CLIQUE] for name in names}


@pytest.mark.parametrize("policy", ["Required", "Preferred"])
def test_engines_keep_to_one_domain_that_holds_them_all(client, operator, policy):
    pool = f"fits-{policy.lower()}"
    domain_nodes(client, pool, ["a", "a", "b", "b", "c", "c"], gpus=2)
    served = domain_deployment(client, pool, policy, replicas=2)
    served.until("Ready", "True")
    assert len(served.engines()) == 4
    assert len(domains_of(client, served)) == 1


@pytest.mark.parametrize("policy", ["Preferred", "None"])
def test_unless_it_is_required_engines_serve_from_several_domains(client, operator, policy):
    pool = f"small-{policy.lower()}"
    domain_nodes(client, pool, "abcd", gpus=1)
    served = domain_deployment(client, pool, policy, replicas=2)
    served.until("Ready", "True")
    assert domains_of(client, served) == set("abcd")


def test_a_required_domain_that_can_never_hold_all_is_named_with_its_size(client, operator):
    domain_nodes(client, "small-required", "abcd", gpus=1)
    served = domain_deployment(client, "small-required", "Required", replicas=2)
    served.until_quoted("didn't match pod affinity rules")
    told = served.until("Placed", "False", "DomainTooSmall")
    assert f"4 engines ask for 4 GPUs; the largest domain by {CLIQUE} has 1" in told["message"]
    assert sum(is_scheduled(pod) for pod in served.engines()) == 1


# -- more ranks than a node has GPUs ----------------------------------------------------------------------------------


def test_more_ranks_than_a_node_has_gpus(client, operator, pools, tmp_path):
    """Refused until there are ranks; what the offline plan says of it is what the scheduler would."""
    served = Served(client, NAMESPACE, "wide")
    wide = {"replicas": 1, "parallelism": {"tensor": 16}, "template": {"spec": {"nodeSelector": {POOL: "b200"}}}}
    served.create(accelerator={"type": "GPU", "gpu": {"computeMajor": [10]}}, prefill=wide, decode=wide)
    served.until("Accepted", "False", "TensorUnsupported")
    told = offline(tmp_path, served, pools)
    assert "no: fewer than 16 GPUs: 8" in told["pool-b200", "decode"]
    raw = manifest(accelerator={"type": "GPU", "gpu": {"computeMajor": [10]}}, prefill=wide, decode=wide)
    spec = from_json(ModelDeploymentSpec, raw, "spec")
    rendered = role_data(StandardRenderer("x").engine("wide", spec, "r"), PodRole.DECODE)["template"]
    pods = KINDS["Pod"].path(NAMESPACE)
    client.create(pods, bare_pod("wide-pod", rendered))
    there = client.until(
        f"{pods}/wide-pod", lambda pod: condition(pod, "PodScheduled").get("status") == "False" and pod
    )
    assert f"Insufficient {GPU}" in condition(there, "PodScheduled")["message"]
    assert place(spec, None, ()).reason == "NodesUnknown"


def bare_pod(name, template):
    """Where it may go and what it asks for, without what only a Deployment's namespace has."""
    spec = {key: template["spec"][key] for key in ("affinity", "nodeSelector", "topologySpreadConstraints")}
    main = {key: template["spec"]["containers"][0][key] for key in ("name", "image", "resources")}
    return {"metadata": {"name": name, "labels": template["metadata"]["labels"]}, "spec": spec | {"containers": [main]}}
