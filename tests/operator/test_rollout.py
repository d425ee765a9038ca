"""The rollout step: it ends, from anywhere, and no move on the way breaks an invariant."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice_operator.decide.groups import Group, RolloutView, allowed, capacity
from sluice_operator.decide.observed import Revision
from sluice_operator.decide.rollout import (
    Grow,
    Regrow,
    Shrink,
    choose_target,
    classes,
    is_complete,
    step,
)
from sluice_operator.names import PodRole, Verdict

P, D = PodRole.PREFILL, PodRole.DECODE
LIMITS = [(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)]


def view(wanted, limit, old, target=(0, 0), **rest):
    """`old`: revision -> (prefill, decode), all useful."""
    counts = {**old, "T": target}
    groups = tuple(Group(role, r, r, n, n) for r, c in counts.items() for role, n in zip((P, D), c))
    return RolloutView(dict(zip((P, D), wanted)), *limit, "T", groups, **rest)


def after(seen, moves):
    """What the moves make of it once all new pods are ready."""
    groups = []
    for g in seen.groups:
        n = g.replicas
        for move in moves:
            if isinstance(move, Grow) and (move.role, "T") == (g.role, g.revision):
                n = move.replicas
            if isinstance(move, Shrink) and (move.role, move.revision) == (g.role, g.revision):
                n -= 1
        groups.append(Group(g.role, g.revision, g.klass, n, min(n, g.useful)))
    return RolloutView(seen.wanted, seen.max_surge, seen.max_unavailable, seen.target, tuple(groups))


def all_ready(seen):
    groups = tuple(Group(g.role, g.revision, g.klass, g.replicas, g.replicas) for g in seen.groups)
    return RolloutView(seen.wanted, seen.max_surge, seen.max_unavailable, seen.target, groups)


def check(before, moves):
    then = after(before, moves)
    floor = min(allowed(before.wanted, before.max_unavailable), capacity(before.groups, before.wanted))
    assert capacity(then.groups, then.wanted) >= floor
    assert all(g.replicas >= 0 for g in then.groups)
    older = {g.revision for g in before.groups if g.revision != "T" and g.replicas}
    for role in (P, D):
        total = sum(g.replicas for g in then.groups if g.role is role)
        had = sum(g.replicas for g in before.groups if g.role is role)
        assert total <= max(had, before.wanted[role] + before.max_surge + max(len(older) - 1, 0))
    return then


def roll(seen):
    for _ in range(500):
        if is_complete(seen):
            return
        moves = step(seen)
        assert moves, f"stuck: {seen.groups}"
        seen = all_ready(check(seen, moves))
    raise AssertionError("no end")


@pytest.mark.parametrize("limit", LIMITS)
def test_every_size_rolls_from_one_revision_to_another_within_its_limits(limit):
    for prefill, decode in itertools.product(range(1, 9), repeat=2):
        roll(view((prefill, decode), limit, {"A": (prefill, decode)}))


count = st.integers(0, 6)


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.sampled_from(LIMITS),
    st.dictionaries(st.sampled_from("ABC"), st.tuples(count, count), max_size=3),
    st.tuples(count, count),
)
def test_from_any_state_with_any_older_revisions_it_ends(wanted, limit, old, target):
    roll(view(wanted, limit, old, target))


def test_fragments_of_two_older_revisions_that_bar_each_other_get_one_pod_more():
    stuck = view((3, 2), (1, 0), {"A": (2, 1), "B": (2, 1)}, (0, 1))
    assert capacity(stuck.groups, stuck.wanted) == 1
    assert set(step(stuck)) == {Grow(P, 1), Grow(D, 2)}
    roll(stuck)


def test_a_surge_of_one_moves_one_pod_at_a_time_and_capacity_stays_whole():
    seen = view((2, 2), (1, 0), {"A": (2, 2)})
    assert step(seen) == (Grow(P, 1), Grow(D, 1))
    assert step(view((2, 2), (1, 0), {"A": (2, 2)}, (1, 0))) == (Grow(D, 1), Shrink(P, "A"))[:1]
    assert set(step(view((2, 2), (1, 0), {"A": (2, 2)}, (1, 1)))) == {Shrink(P, "A"), Shrink(D, "A")}


def test_nothing_useful_goes_while_nobody_knows_the_routes():
    seen = view((2, 2), (1, 0), {"A": (2, 2)}, (1, 1), routing_known=False)
    assert step(seen) == ()


def pair(revision, replicas, useful, **rest):
    """The same counts of both roles."""
    return tuple(Group(role, revision, revision, replicas, useful, **rest) for role in (P, D))


def test_older_pods_that_are_not_ready_go_as_those_of_a_deployment_would():
    """Once a successor has taken over, or where fewer are allowed than there are."""
    wanted = {P: 2, D: 2}
    assert step(RolloutView(wanted, 1, 0, "T", pair("A", 2, 0) + pair("T", 1, 0))) == ()
    assert step(RolloutView(wanted, 1, 0, "T", pair("A", 2, 0) + pair("T", 1, 0, unrouted=1))) == ()
    taken_over = pair("A", 2, 0) + pair("T", 1, 1)
    assert set(step(RolloutView(wanted, 1, 0, "T", taken_over))) == {Shrink(P, "A"), Shrink(D, "A")}
    fewer = RolloutView(wanted, 0, 1, "T", pair("A", 2, 0) + pair("T", 0, 0))
    assert set(step(fewer)) == {Shrink(P, "A"), Shrink(D, "A")}


def test_a_drain_that_has_begun_goes_on_while_nobody_knows_the_routes():
    groups = pair("A", 2, 1, leaving=1) + pair("T", 1, 1)
    unknown = RolloutView({P: 2, D: 2}, 1, 0, "T", groups, routing_known=False)
    assert {move for move in step(unknown) if isinstance(move, Shrink)} == {Shrink(P, "A"), Shrink(D, "A")}


def test_a_failed_older_pod_yields_to_a_target_that_finds_no_node_and_to_no_other():
    groups = pair("A", 2, 1, failed=1) + pair("T", 1, 0)
    view = RolloutView({P: 2, D: 2}, 1, 0, "T", groups, fallback="A")
    assert step(view) == ()
    assert set(step(replace(view, homeless=1))) == {Shrink(P, "A"), Shrink(D, "A")}


def test_the_last_good_revision_grows_again_before_the_target_takes_its_room():
    view = RolloutView({P: 3, D: 3}, 1, 0, "T", pair("A", 2, 2) + pair("T", 1, 0), fallback="A")
    assert set(step(view)) == {Regrow(P, "A", 3), Regrow(D, "A", 3)}
    assert set(step(replace(view, fallback=""))) == {Grow(P, 2), Grow(D, 2)}
    gap = replace(view, groups=pair("A", 2, 2) + pair("T", 1, 0, unrouted=1))
    assert set(step(gap)) == {Grow(P, 2), Grow(D, 2)}
    lost = replace(view, groups=pair("A", 2, 2) + pair("T", 1, 0, unrouted=1, lost=1))
    assert set(step(lost)) == {Regrow(P, "A", 3), Regrow(D, "A", 3)}


def test_a_target_above_its_wish_shrinks_and_one_below_grows():
    assert step(view((2, 1), (1, 0), {}, (1, 3))) == (Grow(P, 2), Shrink(D, "T"))


def test_zero_decode_lets_everything_of_it_go():
    assert step(view((1, 0), (1, 0), {}, (1, 2))) == (Shrink(D, "T"),)


def test_revisions_of_one_fingerprint_pair_with_each_other():
    apart = (Group(P, "A", "x", 1, 1), Group(D, "B", "y", 1, 1))
    together = (Group(P, "A", "x", 1, 1), Group(D, "B", "x", 1, 1))
    assert capacity(apart, {P: 1, D: 1}) == 0
    assert capacity(together, {P: 1, D: 1}) == 1
    told = classes(["A", "B", "C"], {"A": frozenset({"f"}), "B": frozenset({"f"}), "C": frozenset({"f", "g"})})
    assert told["A"] == told["B"] != told["C"]
    assert classes(["A", "B"], {})["A"] != classes(["A", "B"], {})["B"]


def test_allowed_capacity_is_that_of_the_smaller_role():
    assert allowed({P: 4, D: 2}, 1) == Fraction(1, 2)
    assert allowed({P: 1, D: 1}, 3) == 0


def revision(name, number, verdict=Verdict.UNKNOWN):
    return Revision(name, name, number, {}, verdict)


def test_a_failed_revision_gives_way_to_the_good_one_that_serves():
    good, other, bad = revision("A", 1, Verdict.GOOD), revision("B", 2, Verdict.GOOD), revision("C", 3, Verdict.FAILED)
    assert choose_target("C", [good, other, bad], {"A": 2}).revision == "A"
    assert choose_target("C", [good, other, bad], {}).revision == "B"
    assert choose_target("C", [good, other, bad], {}).failed == bad


def test_without_a_good_one_a_failed_revision_stays_the_target():
    assert choose_target("C", [revision("A", 1), revision("C", 2, Verdict.FAILED)], {}).revision == "C"
    assert choose_target("D", [revision("A", 1, Verdict.GOOD)], {}).revision == "D"
