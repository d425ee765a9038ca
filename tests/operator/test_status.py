"""Status: written on change, bounded, and not with every token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_cluster import PAGES, Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.schema import object_schema
from sluice_operator.api.status import MAX_MESSAGE, Condition, DecisionStatus, ModelDeploymentStatus, ScalingStatus
from sluice_operator.api.value import to_json
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import WriteStatus
from sluice_operator.decide.conditions import Finding, dated, first_broken
from sluice_operator.decide.observed import Memory, Termination
from sluice_operator.decide.plan import plan
from sluice_operator.decide.reasons import PREFIX_ROOM, REASONS, Reason, tell
from sluice_operator.decide.status import must_write
from sluice_operator.names import PodRole


def auto(cluster_spec=None, **rest):
    scaling = {"mode": "Auto", "auto": {"maxReplicas": 6} | rest}
    return manifest(decode={"replicas": 1, "scaling": scaling}, **(cluster_spec or {}))


def test_load_is_written_in_steps_of_five_and_at_most_every_30_s():
    cluster = Cluster(auto())
    cluster.run_until_quiet(2000)
    writes = []
    for second in range(120):
        for pod in cluster.pods.values():
            pod.pages = int(PAGES * (0.10 + 0.20 * (second % 10) / 10))
        actions = cluster.plan()
        if any(isinstance(action, WriteStatus) for action in actions):
            writes.append(cluster.now)
        for action in actions:
            cluster.obey(action)
        cluster.tick(1.0)
    assert 2 <= len(writes) <= 5
    assert all(late - early >= 30 for early, late in zip(writes, writes[1:]))  # noqa: RUF007
    assert cluster.status.kv_utilization_percent % 5 == 0


def test_a_change_of_more_than_load_is_written_at_once():
    memory = Memory(0.0, load_written_at=100.0)
    old = ModelDeploymentStatus(kv_utilization_percent=10)
    assert not must_write(old, replace(old, kv_utilization_percent=50), memory, 120.0)
    assert must_write(old, replace(old, kv_utilization_percent=50), memory, 130.0)
    assert must_write(old, replace(old, reason="NoPair"), memory, 101.0)
    hold = DecisionStatus("t", 1, 1, "Hold", "AtTarget", "")
    grown = DecisionStatus("t", 1, 2, "Up", "LoadAboveTarget", "")
    assert not must_write(old, replace(old, scaling=ScalingStatus((hold,))), memory, 101.0)
    assert must_write(old, replace(old, scaling=ScalingStatus((grown,))), memory, 101.0)


def test_a_condition_that_somebody_else_writes_is_no_news():
    """It was patched back every other second, for ever."""
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    stranger = Condition("example.com/Audited", ConditionStatus.TRUE, "Seen", "", 1, "2026-01-01T00:00:00Z")
    cluster.status = replace(cluster.status, conditions=(stranger, *cluster.status.conditions))
    assert not [action for action in cluster.plan() if isinstance(action, WriteStatus)]


def test_what_the_api_server_refuses_is_told_in_its_words():
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    words = "apply Service m-gateway: 422 Invalid: annotations: bad key"
    told = plan(parse("m", cluster.spec), replace(cluster.observe(), refused=words), cluster.now, cluster.renderer)
    (written,) = [action.status for action in told if isinstance(action, WriteStatus)]
    by_type = {condition.type: condition for condition in written.conditions}
    for kind in ("Progressing", "Ready"):
        assert (by_type[kind].status, by_type[kind].reason) == (ConditionStatus.FALSE, "WriteRefused")
        assert words in by_type[kind].message
    assert written.reason == "WriteRefused"


def assert_fits(value, schema, path=""):
    if isinstance(value, dict):
        for name, member in value.items():
            assert_fits(member, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        assert len(value) <= schema["maxItems"], path
        for item in value:
            assert_fits(item, schema["items"], f"{path}[]")
    elif isinstance(value, str):
        assert "enum" in schema or len(value) <= schema["maxLength"], path


def test_whatever_happens_status_stays_within_its_schema():
    cluster = Cluster(auto({"image": with_tag("A")}), room=2)
    cluster.work[PodRole.DECODE] = 9
    for turn in range(300):
        for pod in cluster.pods.values():
            pod.pages = 950 if turn % 60 < 40 else 0
            if pod.started and turn % 7 == 0:
                pod.restarts += 1
                words = "w" * 9000
                pod.terminations = (*pod.terminations, Termination(pod.restarts, 3, "Error", words, cluster.now))[-3:]
        cluster.step()
        assert_fits(to_json(cluster.status), object_schema(ModelDeploymentStatus))
    assert len(cluster.status.incidents) == 10
    assert len(cluster.status.scaling.decisions) <= 10


def test_decisions_tell_inputs_verdict_and_reason():
    cluster = Cluster(auto())
    cluster.run(900)
    for _ in range(60):
        for pod in cluster.pods.values():
            pod.pages = 950
        cluster.step()
    newest = next(d for d in cluster.status.scaling.decisions if d.verdict == "Up")
    assert newest.reason == "LoadAboveTarget"
    assert "% of pages in use" in newest.inputs
    assert cluster.spec["decode"]["replicas"] > 1
    assert cluster.broken == []


def finding(status, reason=Reason.READY):
    return Finding("Ready", status, reason, "m")


def test_a_transition_time_moves_with_the_status_only():
    old = (Condition("Ready", ConditionStatus.TRUE, "Ready", "m", 1, "2020-01-01T00:00:00Z"),)
    same = dated([finding(ConditionStatus.TRUE, Reason.COMPLETE)], old, 2, 1e9)
    assert (same[0].last_transition_time, same[0].observed_generation) == ("2020-01-01T00:00:00Z", 2)
    other = dated([finding(ConditionStatus.FALSE)], old, 2, 1e9)
    assert other[0].last_transition_time == "2001-09-09T01:46:40Z"


def test_the_reason_is_the_first_broken_link():
    true = [
        Finding(name, ConditionStatus.TRUE, Reason.READY, "")
        for name in ("Accepted", "Placed", "PrefillReady", "DecodeReady", "GatewayReady", "Routable")
    ]
    assert first_broken(true) is None
    broken = [
        f if f.type not in ("Routable", "DecodeReady") else replace(f, status=ConditionStatus.UNKNOWN) for f in true
    ]
    assert first_broken(broken).type == "DecodeReady"


def test_success_is_never_told_of_a_revision_that_is_not_there_yet():
    """Old pods may satisfy every count: they are not what was asked for."""
    cluster = Cluster(manifest(image=with_tag("A")))
    cluster.run_until_quiet(2000)
    cluster.change(image=with_tag("B"))
    cluster.step()
    assert cluster.condition("Ready").status is ConditionStatus.FALSE
    assert cluster.condition("DecodeReady").status is ConditionStatus.FALSE
    assert cluster.status.observed_generation == cluster.generation
    assert cluster.status.roles.decode.ready == 1
    assert cluster.status.roles.decode.updated == 0


def test_scale_sees_what_an_hpa_needs():
    cluster = Cluster(manifest(decode={"replicas": 3, "scaling": {"mode": "External"}}))
    cluster.run_until_quiet(2000)
    assert cluster.status.decode_replicas == 3
    assert cluster.status.decode_selector == "sluice.dev/deployment=m,sluice.dev/role=decode"
    cluster.change(decode={"replicas": 0, "scaling": {"mode": "External"}})
    cluster.run_until_quiet(2000)
    assert cluster.status.decode_replicas == 0
    assert (cluster.status.reason, cluster.condition("DecodeReady").reason) == ("ScaledToZero", "ScaledToZero")


@pytest.mark.parametrize("reason", REASONS)
def test_however_long_the_detail_is_the_remedy_is_told(reason):
    """A scheduler with 42 nodes has a lot to say."""
    told = tell(reason, "0/42 nodes are available: " * 100)
    assert len(told) <= MAX_MESSAGE - PREFIX_ROOM + 2
    assert told.startswith(REASONS[reason].meaning)
    assert told.endswith(REASONS[reason].remedy)


def by_type(cluster):
    return {condition.type: condition for condition in cluster.status.conditions}


def test_an_engine_that_a_gateway_does_not_route_to_is_told_of_with_the_gateway():
    """It stayed Scaling for ever, Ready, and nobody said what it waited for."""
    cluster = Cluster(manifest(decode={"replicas": 2}))
    while not (decode := [p.name for p in cluster.pods.values() if p.role is PodRole.DECODE]):
        cluster.step()
    cluster.unknown = {decode[0]}
    cluster.run_until_quiet(2000)
    gateway = min(p.name for p in cluster.pods.values() if p.role is PodRole.GATEWAY)
    told = by_type(cluster)
    assert (told["Progressing"].status, told["Progressing"].reason) == (ConditionStatus.FALSE, "NotRouted")
    assert f"Pod {decode[0]}: gateway {gateway} does not know it." in told["Progressing"].message
    assert (told["Degraded"].status, told["Degraded"].reason) == (ConditionStatus.TRUE, "BelowCapacity")
    assert told["Ready"].status is ConditionStatus.TRUE
    cluster.unknown = set()
    cluster.run_until_quiet(2000)
    told = by_type(cluster)
    assert told["Progressing"].reason == "Complete"
    assert told["Degraded"].status is ConditionStatus.FALSE


def test_a_rollout_whose_new_engines_are_not_routed_to_keeps_the_old_ones_and_says_so():
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    old = {name for name, p in cluster.pods.items() if p.role is not PodRole.GATEWAY}
    cluster.change(image=with_tag("2"))
    for _ in range(60):
        cluster.unknown = {name for name, p in cluster.pods.items() if name not in old}
        cluster.step()
    assert old <= cluster.pods.keys()
    told = by_type(cluster)
    assert (told["Progressing"].status, told["Progressing"].reason) == (ConditionStatus.FALSE, "NotRouted")


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_pods_that_nobody_may_make_are_told_of_in_the_words_of_whoever_refuses(role):
    """It said Starting, and to wait."""
    cluster = Cluster(manifest())
    cluster.run_until_quiet(2000)
    words = 'pods "m-x" is forbidden: no PriorityClass with name serving was found'
    observed = cluster.observe()
    workloads = tuple(replace(w, refused=words) if w.role.value == role else w for w in observed.workloads)
    without = tuple(pod for pod in observed.pods if pod.role.value != role)

    def condition(seen, kind):
        told = plan(parse("m", cluster.spec), seen, cluster.now, cluster.renderer)
        written = [action.status for action in told if isinstance(action, WriteStatus)]
        return next(c for c in (written[0] if written else seen.status).conditions if c.type == kind)

    kind = f"{role.capitalize()}Ready"
    found = condition(replace(observed, workloads=workloads, pods=without), kind)
    assert (found.status, found.reason) == (ConditionStatus.FALSE, "PodsRefused")
    assert words in found.message
    assert "Correct what they name" in found.message
    # All pods are there: what was refused before is past.
    assert condition(replace(observed, workloads=workloads), kind).reason == "AllReady"


@pytest.mark.parametrize(
    ("changes", "absent", "kind", "status", "reason"),
    [
        ({"monitoring": {"podMonitor": True}}, "PodMonitor", "Degraded", "True", "MonitoringUnavailable"),
        ({}, "PodMonitor", "Degraded", "False", "Healthy"),
        (
            {"accelerator": {"type": "GPU", "gpu": {"allocation": "ResourceClaim"}}},
            "ResourceClaimTemplate",
            "Placed",
            "False",
            "ClaimsUnavailable",
        ),
        ({"accelerator": {"type": "GPU", "gpu": {}}}, "ResourceClaimTemplate", "Placed", "True", "Placed"),
    ],
)
def test_a_kind_that_the_spec_needs_and_the_cluster_has_not_is_told_of(changes, absent, kind, status, reason):
    """Of a PodMonitor there was a line in the log; pods with claims waited without a word from us."""
    cluster = Cluster(manifest(**changes))
    cluster.run_until_quiet(2000)
    seen = replace(cluster.observe(), absent={absent: f"this cluster has no {absent} (x/v1)"}, nodes=None)
    told = plan(parse("m", cluster.spec), replace(seen, generation=9), cluster.now, cluster.renderer)
    (written,) = [action.status for action in told if isinstance(action, WriteStatus)]
    found = next(condition for condition in written.conditions if condition.type == kind)
    assert (found.status.value, found.reason) == (status, reason)
    assert reason in ("Healthy", "Placed") or f"This cluster has no {absent}" in found.message
    assert (written.reason == "") is (reason != "ClaimsUnavailable")
