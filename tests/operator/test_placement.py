"""Twelve node pools: which of them would take a pod, and what is said of the others."""

from __future__ import annotations

import pytest
from operator_cluster import manifest

from sluice_operator.accept import parse
from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.names import PodRole
from sluice_operator.node import read_node
from sluice_operator.observed import Node, Pod, Taint
from sluice_operator.placement import place, requests_of, tolerates, why_not

MAJOR, PRODUCT, CLIQUE = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.product", "nvidia.com/gpu.clique"


def gpu_node(name, major, product, gpus=8, free=None, clique="", **rest):
    labels = {MAJOR: str(major), PRODUCT: product} | ({CLIQUE: clique} if clique else {})
    return Node(name, labels, gpus=gpus, free_gpus=gpus if free is None else free, **rest)


POOLS = {
    "hopper": gpu_node("hopper", 9, "NVIDIA-H100-80GB-HBM3"),
    "b200": gpu_node("b200", 10, "NVIDIA-B200"),
    "gb200": gpu_node("gb200", 10, "NVIDIA-GB200", gpus=4, clique="c1.0"),
    "rtx": gpu_node("rtx", 12, "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    "mixed": gpu_node("mixed", 10, "NVIDIA-B200-SHARED"),
    "tainted": gpu_node("tainted", 10, "NVIDIA-B200", taints=(Taint("nvidia.com/gpu", "present"),)),
    "preferred-taint": gpu_node("preferred-taint", 10, "NVIDIA-B200", taints=(Taint("old", "", "PreferNoSchedule"),)),
    "full": gpu_node("full", 10, "NVIDIA-B200", free=0),
    "cordoned": gpu_node("cordoned", 10, "NVIDIA-B200", cordoned=True),
    "down": gpu_node("down", 10, "NVIDIA-B200", ready=False),
    "no-gfd": Node("no-gfd", {}, gpus=8, free_gpus=8),
    "cpu": Node("cpu", {}),
}


def spec(gpu=None, **changes):
    raw = manifest(accelerator={"type": "GPU", "gpu": {} if gpu is None else gpu}) | changes
    return from_json(ModelDeploymentSpec, raw, "spec")


@pytest.mark.parametrize(
    ("pool", "requirement"),
    [
        ("hopper", "compute major in 10"),
        ("b200", None),
        ("gb200", None),
        ("rtx", "compute major in 10"),
        ("mixed", None),
        ("tainted", "taint nvidia.com/gpu is tolerated"),
        ("preferred-taint", None),
        ("full", "1 GPUs are free"),
        ("cordoned", "node is schedulable"),
        ("down", "node is Ready"),
        ("no-gfd", "GPU Feature Discovery has labelled it"),
        ("cpu", "node offers nvidia.com/gpu"),
    ],
)
def test_each_pool_is_judged_by_its_first_broken_requirement(pool, requirement):
    request = requests_of(spec({"computeMajor": [10]}))[0]
    refusal = why_not(POOLS[pool], request)
    assert (refusal and refusal.requirement) == requirement


def test_all_pools_together_are_counted_and_told():
    told = place(spec({"computeMajor": [10]}), list(POOLS.values()), ())
    assert told.status is ConditionStatus.TRUE
    assert told.matching == 5
    assert "prefill: 2 nodes fail: compute major in 10" in told.reasons
    assert len(told.rows) == 24


def test_a_product_is_matched_to_the_letter():
    told = place(spec({"products": ["NVIDIA-B200"]}), [POOLS["mixed"], POOLS["b200"]], ())
    assert [row.refusal is None for row in told.rows] == [False, True, False, True]


def test_no_match_names_every_requirement_with_its_count():
    told = place(spec({"computeMajor": [10, 12]}), [POOLS["hopper"], POOLS["no-gfd"], POOLS["cpu"]], ())
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "NoNodeMatches")
    assert "1 nodes fail: compute major in 10, 12" in told.message
    assert "sluice plan" in told.message


def test_no_nodes_at_all():
    assert place(spec(), [], ()).reason == "NoNodeMatches"


def test_tolerations_and_selectors_of_the_template_count():
    template = {
        "spec": {
            "nodeSelector": {"pool": "blue"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        }
    }
    wanted = spec({"computeMajor": [10]}, prefill={"template": template}, decode={"template": template})
    request = requests_of(wanted)[0]
    assert why_not(POOLS["tainted"], request).requirement == "pool=blue"
    blue = Node("t", {**POOLS["tainted"].labels, "pool": "blue"}, POOLS["tainted"].taints, gpus=8)
    assert why_not(blue, request) is None


def test_tolerations_are_read_as_the_scheduler_reads_them():
    taint = Taint("k", "v", "NoSchedule")
    assert tolerates({"operator": "Exists"}, taint)
    assert tolerates({"key": "k", "value": "v"}, taint)
    assert not tolerates({"key": "k", "value": "w"}, taint)
    assert not tolerates({"key": "k", "operator": "Exists", "effect": "NoExecute"}, taint)
    assert not tolerates({}, taint)


def test_more_ranks_than_any_matching_node_has_gpus():
    wanted = spec({"computeMajor": [10]}, decode={"parallelism": {"tensor": 16}})
    told = place(wanted, list(POOLS.values()), ())
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "TensorExceedsNode")
    assert "decode: 16 ranks" in told.message
    assert "8 GPUs" in told.message


def test_nodes_that_match_and_are_full_are_a_place_to_wait_for():
    told = place(spec({"computeMajor": [10]}), [POOLS["full"], POOLS["cpu"]], ())
    assert told.status is ConditionStatus.TRUE
    assert "full" in told.message


def pending(words):
    return Pod("m-decode-1", "u", PodRole.DECODE, "r", 0.0, unschedulable=words)


def test_the_schedulers_own_words_are_quoted():
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    told = place(spec(), [POOLS["b200"]], [pending(words)])
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "Unschedulable")
    assert words in told.message
    blind = place(spec(), None, [pending(words)])
    assert (blind.status, blind.reason) == (ConditionStatus.FALSE, "Unschedulable")


def test_without_a_right_to_see_nodes_nothing_is_claimed():
    assert place(spec(), None, ()).status is ConditionStatus.UNKNOWN


def domain(policy, **rest):
    return {"computeMajor": [10], "domain": {"policy": policy}} | rest


def test_a_required_domain_must_hold_all_engines():
    small = [gpu_node(f"n{i}", 10, "NVIDIA-GB200", gpus=2, clique=f"c{i}") for i in range(4)]
    wanted = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    told = place(spec(domain("Required"), **wanted), small, ())
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "DomainTooSmall")
    assert "4 GPUs; the largest domain by nvidia.com/gpu.clique has 2" in told.message
    assert place(spec(domain("Preferred"), **wanted), small, ()).status is ConditionStatus.TRUE
    assert place(spec(domain("None"), **wanted), small, ()).status is ConditionStatus.TRUE
    large = [gpu_node(f"n{i}", 10, "NVIDIA-GB200", gpus=2, clique="c") for i in range(2)]
    assert place(spec(domain("Required"), **wanted), small + large, ()).status is ConditionStatus.TRUE


def test_an_engine_does_not_span_the_nodes_of_a_domain():
    nodes = [gpu_node(f"n{i}", 10, "NVIDIA-GB200", gpus=3, clique="c") for i in range(2)]
    two = {"parallelism": {"tensor": 2}}
    told = place(spec(domain("Required"), prefill=two, decode=two | {"replicas": 2}), nodes, ())
    assert told.reason == "DomainTooSmall"


def test_a_required_domain_without_labels_is_named():
    told = place(spec(domain("Required")), [POOLS["b200"]], ())
    assert told.reason == "DomainTooSmall"
    assert "nvidia.com/gpu.clique" in told.message


def test_cpu_runs_anywhere_that_is_ready():
    told = place(parse("m", manifest()), list(POOLS.values()), ())
    assert {row.node for row in told.rows if row.refusal is not None} == {"tainted", "cordoned", "down"}


def test_claims_are_not_counted_on_nodes():
    told = place(spec({"computeMajor": [10], "allocation": "ResourceClaim"}), [POOLS["no-gfd"], POOLS["cpu"]], ())
    assert told.matching == 2


def test_nodes_are_read_as_the_api_tells_them_and_nonsense_is_a_bare_node():
    node = read_node(
        {
            "metadata": {"name": "n", "labels": {MAJOR: "10"}},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "unschedulable": True},
            "status": {
                "allocatable": {"nvidia.com/gpu": "8"},
                "conditions": [{"type": "Ready", "status": "False"}],
            },
        },
        used_gpus=3,
    )
    assert node == Node("n", {MAJOR: "10"}, (Taint("k"),), ready=False, cordoned=True, gpus=8, free_gpus=5)
    assert read_node({"metadata": [], "spec": 3, "status": {"allocatable": "x", "conditions": [1]}}) == Node("")
