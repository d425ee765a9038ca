"""Messages of conditions in situations that platform engineers meet: advice that can be followed, and plain text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import WriteStatus
from sluice_operator.decide.failing import why_not_ready
from sluice_operator.decide.observed import Node, Pod
from sluice_operator.decide.plan import plan
from sluice_operator.names import PodRole
from sluice_operator.placement.placement import place

WORDS = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available."
GPU = {"type": "GPU", "gpu": {}}


def assert_plain(message):
    """No full stop twice, nor after a colon or for nothing; no prefix twice."""
    assert not re.search(r"(?<!\.)\.\.(?!\.)|[:;,] ?\.|\. \.|^\.", message), message
    assert not re.search(r"\b([A-Za-z]+): \1: ", message), message


def stuck(**changes):
    """A rollout of which no new pod finds a node, and the scheduler says so in a sentence of its own."""
    cluster = Cluster(manifest(**changes))
    cluster.run_until_quiet(2000)
    cluster.unplaceable.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run(120)
    seen = cluster.observe()
    pods = tuple(replace(pod, unschedulable=WORDS) if pod.unschedulable else pod for pod in seen.pods)
    return conditions(cluster, replace(seen, pods=pods))


def conditions(cluster, seen):
    actions = plan(parse("m", cluster.spec), seen, cluster.now, cluster.renderer)
    written = [action.status for action in actions if isinstance(action, WriteStatus)]
    found = {condition.type: condition for condition in (written[0] if written else seen.status).conditions}
    for condition in found.values():
        assert_plain(condition.message)
    return found


def test_a_surge_without_a_place_names_one_pod_of_each_role_and_what_would_do_without():
    told = stuck(accelerator=GPU, image=with_tag("A"))["Progressing"]
    assert told.reason == "SurgeUnschedulable"
    assert "Make room for 1 prefill pod and 1 decode pod (1 GPU each), or set rollout.maxSurge to 0" in told.message
    assert "rollout.maxUnavailable to 1" in told.message
    assert "Free a GPU" not in told.message


def test_whoever_has_set_max_surge_to_0_is_not_advised_to():
    told = stuck(image=with_tag("A"), decode={"replicas": 2}, rollout={"maxSurge": 0, "maxUnavailable": 1})[
        "Progressing"
    ]
    assert told.reason == "SurgeUnschedulable"
    assert "set rollout.maxSurge" not in told.message
    assert "maxSurge is 0, and the places that older pods left do not fit" in told.message


def test_a_sleeping_model_is_not_advised_to_raise_replicas():
    scaling = {"mode": "Auto", "auto": {"minReplicas": 0, "maxReplicas": 3}}
    cluster = Cluster(manifest(decode={"replicas": 0, "scaling": scaling}))
    cluster.run_until_quiet(2000)
    told = conditions(cluster, replace(cluster.observe(), generation=9))["DecodeReady"]
    assert told.reason == "ScaledToZero"
    assert "the next request starts a pod" in told.message
    assert "Raise" not in told.message


def test_a_zero_that_somebody_wrote_is_named_with_its_field():
    cluster = Cluster(manifest(prefill={"replicas": 0}))
    cluster.run_until_quiet(2000)
    told = conditions(cluster, replace(cluster.observe(), generation=9))["PrefillReady"]
    assert told.message.endswith("Raise spec.prefill.replicas.")
    cluster = Cluster(manifest(decode={"replicas": 0, "scaling": {"mode": "External"}}))
    cluster.run_until_quiet(2000)
    told = conditions(cluster, replace(cluster.observe(), generation=9))["DecodeReady"]
    assert "scaling.mode is External" in told.message


def test_a_spec_that_is_not_accepted_is_not_called_scaled_to_zero():
    cluster = Cluster(manifest(decode={"replicas": 1, "parallelism": {"tensor": 2}}))
    cluster.step()
    told = conditions(cluster, replace(cluster.observe(), generation=9))
    assert told["Accepted"].reason == "TensorUnsupported"
    for kind in ("PrefillReady", "DecodeReady", "GatewayReady"):
        assert told[kind].reason == "NotAccepted"
        assert "See the condition Accepted." in told[kind].message


def test_a_rollout_that_was_taken_back_names_the_pod_and_its_last_words():
    cluster = Cluster(manifest(image=with_tag("A")))
    cluster.run_until_quiet(2000)
    cluster.bad.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run(900)
    told = conditions(cluster, replace(cluster.observe(), generation=9))
    (bad,) = [r for r in cluster.revisions.values() if r["metadata"]["labels"]["sluice.dev/verdict"] == "failed"]
    revision = bad["metadata"]["labels"]["sluice.dev/revision"]
    for kind in ("Progressing", "Ready"):
        assert told[kind].reason == "RolledBack"
        assert re.search(rf"CrashLoop: Pod m-(prefill|decode)-{revision}-\S+ restarted", told[kind].message)
    # Annotations get lost: the reason is a label, and stays.
    del bad["metadata"]["annotations"]
    told = conditions(cluster, replace(cluster.observe(), generation=9))
    assert f"Revision {revision}: CrashLoop." in told["Progressing"].message


def test_nodes_that_lack_something_are_told_to_lack_it():
    spec = parse("m", manifest(accelerator=GPU))
    told = place(spec, [Node(f"n{i}", {}) for i in range(4)], ())
    assert "prefill: 4 nodes cannot be used: no nvidia.com/gpu." in told.message
    assert "prefill: 1 node cannot be used: no nvidia.com/gpu" in place(spec, [Node("n", {})], ()).reasons


def test_a_summary_never_has_more_ready_than_desired():
    cluster = Cluster(manifest(image=with_tag("A"), prefill={"replicas": 2}, decode={"replicas": 2}))
    cluster.run_until_quiet(2000)
    cluster.change(image=with_tag("B"))
    seen = set()
    for _ in range(200):
        cluster.step()
        roles = cluster.status.roles
        seen |= {(role.ready, role.summary) for role in (roles.prefill, roles.decode)}
    assert (3, "2/2") in seen
    assert not [summary for _, summary in seen if summary.startswith("3/")]


def test_without_a_ready_gateway_nobody_is_sent_to_a_network_policy():
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    seen = cluster.observe()
    pods = tuple(replace(pod, ready=False) if pod.role is PodRole.GATEWAY else pod for pod in seen.pods)
    told = conditions(cluster, replace(seen, pods=pods, gateways=()))["Routable"]
    assert told.message.endswith("No gateway is ready. See GatewayReady.")


@pytest.mark.parametrize(
    ("waiting", "words", "detail"),
    [
        ("ErrImagePull", "", "ErrImagePull."),
        ("ErrImagePull", "ErrImagePull: no such tag.", "ErrImagePull: no such tag."),
        ("CreateContainerConfigError", 'secret "a" not found', 'CreateContainerConfigError: secret "a" not found.'),
    ],
)
def test_kubelets_words_are_told_once_and_end_once(waiting, words, detail):
    pod = Pod("p", "u", PodRole.DECODE, "r", 0.0, node="n", waiting_reason=waiting, waiting_message=words)
    told = why_not_ready(pod, 10.0, 120.0)[1]
    assert told == f"Pod p: {detail}"
    assert_plain(told)


DENIAL = (
    "422 Invalid: services \"m-prefill\" is forbidden: ValidatingAdmissionPolicy 'team-of-a-namespace' with binding"
    " 'team-of-a-namespace' denied request: the label team is required"
)


@pytest.mark.parametrize("words", [WORDS, DENIAL, "quota exceeded.", "webhook says no"])
def test_words_of_others_end_in_one_full_stop(words):
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    told = conditions(cluster, replace(cluster.observe(), refused=f"apply Service m-gateway: {words}"))
    assert f"{words.rstrip('.')}. Correct what they name" in told["Progressing"].message
