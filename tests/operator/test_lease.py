"""Who may write, without a clock of anybody's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.decide import lease
from sluice_operator.decide.lease import Held, Sighting, Timing
from sluice_operator.live.election import Leadership

TIMING = Timing(duration=20, deadline=10, period=2, call=8)


def held(holder="a", version="1", transitions=0):
    return Held(holder, version, transitions)


def test_a_lease_that_nobody_renews_is_free_after_its_duration_by_ones_own_clock():
    seen = lease.look(None, held(), 100.0)
    assert not lease.may_take(lease.look(seen, held(), 119.9), "b", 119.9, TIMING)
    assert lease.may_take(lease.look(seen, held(), 120.0), "b", 120.0, TIMING)


def test_any_change_of_it_starts_the_wait_anew():
    seen = lease.look(None, held(version="1"), 0.0)
    seen = lease.look(seen, held(version="2"), 19.0)
    assert not lease.may_take(seen, "b", 38.0, TIMING)


def test_one_that_was_given_back_is_free_at_once():
    assert lease.may_take(Sighting(held(holder=""), 0.0), "b", 0.0, TIMING)


def test_a_new_holder_is_counted_and_a_renewal_is_not():
    assert lease.body("l", "ns", "a", held("a", "7", 3), TIMING, 0.0)["spec"]["leaseTransitions"] == 3
    told = lease.body("l", "ns", "b", held("a", "7", 3), TIMING, 0.0)
    assert told["spec"]["leaseTransitions"] == 4
    assert told["metadata"]["resourceVersion"] == "7"
    assert "resourceVersion" not in lease.body("l", "ns", "b", None, TIMING, 0.0)["metadata"]


def test_what_is_written_is_read_again():
    told = lease.body("l", "ns", "a", held("", "7", 3), TIMING, 0.0)
    assert lease.read(told) == held("a", "7", 4)
    assert lease.read({"metadata": {"resourceVersion": "9"}, "spec": {}}) == held("", "9", 0)


@pytest.mark.parametrize("wrong", [{"period": 10}, {"call": 10}, {"duration": 18}, {"period": 0}])
def test_times_that_would_let_two_lead_are_refused(wrong):
    with pytest.raises(ValueError, match=r"deadline \+ call < duration"):
        Timing(**({"duration": 20, "deadline": 10, "period": 2, "call": 8} | wrong))


@given(st.integers(0, 9), st.integers(0, 8), st.integers(0, 60), st.integers(0, 60))
def test_a_leaders_last_write_has_ended_before_a_standby_may_begin(age, call_s, delay, waited):
    """A renewal was sent at 0. `age` later the last write began that may; it took `call_s`. A standby saw the renewal
    `delay` after it was sent, and looks again `waited` later."""
    seen = lease.look(None, held(), float(delay))
    now = float(delay + waited)
    if lease.may_take(lease.look(seen, held(), now), "b", now, TIMING):
        assert age + call_s < now


def test_a_write_without_leadership_is_a_defect():
    with pytest.raises(RuntimeError, match="without leadership"):
        _ = Leadership(TIMING).age
