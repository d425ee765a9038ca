"""A spec that is edited while nothing is wanted: on wake the edited revision grows, and the one before does not."""

from __future__ import annotations

import pytest
from operator_cluster import Cluster, manifest, with_tag

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.decide.observed import Revision, Workload
from sluice_operator.decide.rollout import choose_fallback
from sluice_operator.names import PodRole, Verdict

LIMIT_S = 3000


def at(prefill, decode):
    return {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}}


def asleep(prefill, decode):
    """Revision A, which was complete, scaled to these numbers."""
    cluster = Cluster(manifest(image=with_tag("A"), **at(2, 2)))
    cluster.run_until_quiet(LIMIT_S)
    assert cluster.condition("Ready").status is ConditionStatus.TRUE
    cluster.change(**at(prefill, decode))
    cluster.run_until_quiet(LIMIT_S)
    return cluster


def tags_seen(cluster, seconds):
    """The tags whose Deployments were to have pods at any moment of the next `seconds`."""
    seen: set[str] = set()
    for _ in range(int(seconds)):
        cluster.step()
        seen |= {cluster.tag_of(d.revision) for d in cluster.deployments.values() if d.replicas and d.role in ROLES}
    return seen


ROLES = (PodRole.PREFILL, PodRole.DECODE)
NUMBERS = [(2, 0), (0, 2), (0, 0)]


@pytest.mark.parametrize(("prefill", "decode"), NUMBERS)
def test_a_spec_edited_at_zero_wakes_as_the_edited_revision_alone(prefill, decode):
    cluster = asleep(prefill, decode)
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(LIMIT_S)
    cluster.change(**at(2, 2))
    assert tags_seen(cluster, 300) == {"B"}
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}
    assert cluster.condition("Ready").status is ConditionStatus.TRUE
    assert cluster.broken == []


def test_a_spec_edited_and_woken_in_one_change_grows_the_edited_revision_alone():
    cluster = asleep(0, 0)
    cluster.change(image=with_tag("B"), **at(2, 2))
    assert tags_seen(cluster, 300) == {"B"}
    assert cluster.engines() == {("prefill", "B"): 2, ("decode", "B"): 2}


def test_several_edits_while_asleep_wake_as_the_last_one():
    cluster = asleep(0, 0)
    for tag in "BC":
        cluster.change(image=with_tag(tag))
        cluster.run_until_quiet(LIMIT_S)
    cluster.change(**at(2, 2))
    assert tags_seen(cluster, 300) == {"C"}


def test_the_edited_revision_finds_no_node_on_wake_and_the_old_one_stays_away():
    """As with a Deployment whose template was edited at zero."""
    cluster = asleep(0, 0)
    cluster.unplaceable.add("B")
    cluster.change(image=with_tag("B"), **at(2, 2))
    assert tags_seen(cluster, 300) == {"B"}


def test_an_edited_revision_that_fails_on_wake_is_taken_back():
    """What failed is known to be bad; then the last good revision may start from nothing."""
    cluster = asleep(0, 0)
    cluster.bad.add("B")
    cluster.change(image=with_tag("B"))
    cluster.run_until_quiet(LIMIT_S)
    cluster.change(**at(2, 2))
    cluster.run_until_quiet(LIMIT_S)
    assert cluster.engines() == {("prefill", "A"): 2, ("decode", "A"): 2}
    assert cluster.condition("Progressing").reason == "RolledBack"


def workload(role, revision, replicas):
    return Workload(f"m-{role.value}-{revision}", role, revision, replicas)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_revision_that_has_pods_is_a_fallback(verdict):
    revisions = [Revision("A", "A", 1, {}, Verdict.GOOD), Revision("B", "B", 2, {}, verdict)]
    empty = [workload(role, "A", 0) for role in ROLES]
    assert choose_fallback("B", revisions, []) == ""
    assert choose_fallback("B", revisions, empty) == ""
    for role in ROLES:
        assert choose_fallback("B", revisions, [*empty, workload(role, "A", 1)]) == "A"
