"""Twelve node pools: which of them would take a pod, and what is said of the others."""

from __future__ import annotations

import pytest
from operator_cluster import manifest

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.status import MAX_MESSAGE, MAX_REASONS
from sluice_operator.api.value import from_json
from sluice_operator.decide.accept import parse
from sluice_operator.decide.observed import Node, Pod, Taint
from sluice_operator.names import PodRole
from sluice_operator.placement.node import read_node, used_gpus
from sluice_operator.placement.placement import place, requests_of, tolerates, why_not

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
    ("pool", "problem"),
    [
        ("hopper", "compute major is not 10"),
        ("b200", None),
        ("gb200", None),
        ("rtx", "compute major is not 10"),
        ("mixed", None),
        ("tainted", "taint nvidia.com/gpu is not tolerated"),
        ("preferred-taint", None),
        ("full", "no free GPU"),
        ("cordoned", "cordoned"),
        ("down", "not Ready"),
        ("no-gfd", "no labels of GPU Feature Discovery"),
        ("cpu", "no nvidia.com/gpu"),
    ],
)
def test_each_pool_is_judged_by_its_first_problem(pool, problem):
    request = requests_of(spec({"computeMajor": [10]}))[0]
    refusal = why_not(POOLS[pool], request)
    assert (refusal and refusal.problem) == problem


def test_all_pools_together_are_counted_and_told():
    told = place(spec({"computeMajor": [10]}), list(POOLS.values()), ())
    assert told.status is ConditionStatus.TRUE
    assert told.matching == 5
    assert "prefill: 2 nodes cannot be used: compute major is not 10" in told.reasons
    assert len(told.rows) == 24


def test_a_product_is_matched_to_the_letter():
    told = place(spec({"products": ["NVIDIA-B200"]}), [POOLS["mixed"], POOLS["b200"]], ())
    assert [row.refusal is None for row in told.rows] == [False, True, False, True]


def test_no_match_names_every_requirement_with_its_count():
    told = place(spec({"computeMajor": [10, 12]}), [POOLS["hopper"], POOLS["no-gfd"], POOLS["cpu"]], ())
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "NoNodeMatches")
    assert "1 node cannot be used: compute major is not one of 10, 12" in told.message
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
    assert why_not(POOLS["tainted"], request).problem == "label pool is not blue"
    blue = Node("t", {**POOLS["tainted"].labels, "pool": "blue"}, POOLS["tainted"].taints, gpus=8)
    assert why_not(blue, request) is None


def with_pod(**pod):
    template = {"spec": pod}
    return spec({"computeMajor": [10]}, prefill={"template": template}, decode={"template": template})


def test_who_tolerates_what_the_node_controller_taints_may_go_there():
    """As the scheduler sees it: a cordoned node, or one that is not ready, has a taint like any other."""
    anywhere = requests_of(with_pod(tolerations=[{"operator": "Exists"}]))[0]
    assert why_not(POOLS["cordoned"], anywhere) is None
    assert why_not(POOLS["down"], anywhere) is None
    only_cordoned = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}]
    some = requests_of(with_pod(tolerations=only_cordoned))[0]
    assert why_not(POOLS["cordoned"], some) is None
    assert why_not(POOLS["down"], some).problem == "not Ready"


def required(*terms):
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def expressions(*told):
    return {"matchExpressions": [{"key": k, "operator": o, "values": list(v)} for k, o, *v in told]}


@pytest.mark.parametrize(
    ("terms", "matches"),
    [
        ([expressions(("pool", "In", "blue", "red"))], True),
        ([expressions(("pool", "In", "red"))], False),
        ([expressions(("pool", "NotIn", "red"), ("rank", "Gt", "2"))], True),
        ([expressions(("rank", "Lt", "3"))], False),
        ([expressions(("pool", "Exists"), ("other", "DoesNotExist"))], True),
        ([expressions(("pool", "DoesNotExist"))], False),
        ([expressions(("other", "NotIn", "x"))], True),
        ([expressions(("other", "Gt", "1"))], False),
        ([expressions(("pool", "In", "red")), expressions(("rank", "In", "3"))], True),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}], True),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}], False),
    ],
)
def test_what_the_template_requires_of_nodes_counts_too(terms, matches):
    request = requests_of(with_pod(affinity=required(*terms)))[0]
    node = Node("n", {**POOLS["b200"].labels, "pool": "blue", "rank": "3"}, gpus=8)
    refusal = why_not(node, request)
    assert (refusal is None) is matches
    assert matches or refusal.problem == "the template's node affinity is not met"


def test_affinity_that_has_no_shape_is_not_judged():
    """The API server refuses it: a condition says so, and nothing here may break on it."""
    odd = [{"key": "a", "operator": []}]
    shapes = (3, {"matchExpressions": [{}]}, {"matchExpressions": 4}, {"matchExpressions": odd}, {"matchFields": odd})
    for affinity in ({"nodeAffinity": 3}, {"nodeAffinity": {}}, *(required(shape) for shape in shapes)):
        assert why_not(POOLS["b200"], requests_of(with_pod(affinity=affinity))[0]) is None


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


def test_one_of_several_is_quoted_and_the_remedy_still_fits():
    long = "0/16 nodes are available: " + "1 node(s) had untolerated taint {a: b}, " * 20
    told = place(spec(), [POOLS["b200"]], [pending("short"), pending(long)])
    assert f"Pod m-decode-1: {long[:200]}" in told.message
    assert "short" not in told.message
    assert "1 more in status.placement.reasons" in told.message
    assert told.message.endswith("Free or add what it names.")
    assert len(told.message) <= MAX_MESSAGE


def test_the_schedulers_words_are_not_crowded_out_of_status():
    told = place(spec({"computeMajor": [10]}), list(POOLS.values()), [pending("words")])
    assert len(told.reasons) > MAX_REASONS
    assert told.reasons[0] == "Pod m-decode-1: words"


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
    """The scheduler takes no node without the label, not even for the first pod."""
    told = place(spec(domain("Required")), [POOLS["b200"]], ())
    assert told.reason == "NoNodeMatches"
    assert "no label nvidia.com/gpu.clique" in told.message
    assert place(spec(domain("Preferred")), [POOLS["b200"]], ()).status is ConditionStatus.TRUE
    with_one = place(spec(domain("Required")), [POOLS["b200"], POOLS["gb200"]], ())
    assert (with_one.status, with_one.matching) == (ConditionStatus.TRUE, 1)


def test_that_a_domain_can_never_hold_all_is_said_before_the_schedulers_words_for_it():
    """The scheduler only says that pods do not match affinity; waiting or freeing GPUs would not help."""
    small = [gpu_node(f"n{i}", 10, "NVIDIA-GB200", gpus=1, clique=f"c{i}") for i in range(2)]
    words = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod affinity rules."
    told = place(spec(domain("Required")), small, [pending(words)])
    assert told.reason == "DomainTooSmall"
    assert any(words in reason for reason in told.reasons)


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


def asking(node, gpus, phase="Running", **spec):
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return {"kind": "Pod", "spec": {"nodeName": node, "containers": [limits], **spec}, "status": {"phase": phase}}


def test_gpus_that_pods_have_are_counted_as_the_scheduler_counts_them():
    start = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    sidecar = {"resources": {"limits": {"nvidia.com/gpu": "1"}}, "restartPolicy": "Always"}
    pods = [
        asking("a", "2"),
        asking("a", "3", initContainers=[start]),
        asking("b", "2", initContainers=[start, sidecar]),
        asking("b", "8", phase="Succeeded"),
        asking("", "8", phase="Pending"),
        {"kind": "Pod", "spec": {"nodeName": "c", "containers": [{}, 3]}},
        {"kind": "Pod"},
    ]
    assert used_gpus(pods) == {"a": 6, "b": 4, "c": 0}
