"""What a fault costs, how long it pauses, who may wait for a lost fleet: time and chance are arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_gateway.faults import DELAYS_S, FREE_REPEATS, Culprit, Faults, culprit_of, fault_delay, had_in_work
from sluice_gateway.routing.fleet import Engine, Member, Pair
from sluice_gateway.routing.queue import may_wait
from sluice_gateway.routing.session import Lost, TryResult
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Ended, EndReason, EngineHello, Load, Refused, Role


def engine(role: Role, address: str, incarnation: str = "i1") -> Engine:
    hello = EngineHello(role, Fingerprint.of({"model": "a"}), incarnation, 4096, 4, "s", 1, 512)
    return Engine(Member(role, address), hello, Load(incarnation, 0, 0, 8, 1, 1))


P, D = engine(Role.PREFILL, "p"), engine(Role.DECODE, "d")


def failed(error: str) -> Ended:
    return Ended(EndReason.FAILED, 0, error=error)


@pytest.mark.parametrize(
    ("result", "address"),
    [
        (Lost("EngineLost", "UNAVAILABLE"), "d"),
        (failed("TransportLost"), "d"),
        (failed("SourceLost"), "p"),
        (failed("IncarnationChanged"), "p"),
        (Refused("PeerLost", "", 0), "p"),
        (failed("DigestMismatch"), None),
        (failed("AttachLost"), None),
        (failed("Draining"), None),
        (Refused("SourceLost", "wait", 10), None),
        (Ended(EndReason.STOP, 1), None),
    ],
)
def test_a_loss_points_at_one_incarnation(result: TryResult, address: str | None) -> None:
    expected = None if address is None else Culprit(address, "i1")
    assert culprit_of(result, Pair(D, P)) == expected


def test_without_a_source_the_engine_itself_is_meant() -> None:
    unified = engine(Role.UNIFIED, "u")
    assert culprit_of(failed("SourceLost"), Pair(unified)) == Culprit("u", "i1")


def test_one_death_is_paid_once_however_many_tries_run_into_it() -> None:
    dead, other = Culprit("p", "i1"), Culprit("p", "i2")
    faults = Faults().with_fault(dead)
    assert not Faults().repeats(dead)
    assert faults.repeats(dead)
    assert not faults.repeats(other)
    assert not faults.repeats(None)
    for _ in range(FREE_REPEATS):
        assert faults.repeats(dead)
        faults = faults.with_fault(dead)
    assert not faults.repeats(dead)


def test_victims_are_lives_not_sights() -> None:
    faults = Faults().with_fault(None)
    assert faults.victims == 0
    for life in ("i1", "i1", "i2"):
        faults = faults.with_fault(Culprit("p", life))
    assert faults.with_progress().victims == 2


REFUSED, UNSENT = Refused("PeerLost", "", 0), Lost("EngineLost", "NotConnected", has_begun=False)
PD, ONE = Pair(D, P), Pair(engine(Role.UNIFIED, "u"))


@pytest.mark.parametrize(
    ("result", "pair", "num_tokens", "expected"),
    [
        (failed("SourceLost"), PD, 0, True),  # prefill had it
        (failed("SourceLost"), PD, 5, False),  # prefill kept its records only
        (Lost("EngineLost", "died"), PD, 0, False),  # decode waited for prefill
        (Lost("EngineLost", "died"), PD, 5, True),
        (failed("TransportLost"), PD, 0, False),
        (Lost("EngineLost", "died"), ONE, 0, True),
        (Lost("EngineLost", "died"), ONE, 5, True),
        (REFUSED, PD, 0, False),
        (UNSENT, PD, 0, False),
        (UNSENT, ONE, 0, False),
        (failed("SourceLost"), Pair(D, replace(P, suspect=True)), 0, False),  # it was dead before
        (failed("SourceLost"), Pair(replace(D, suspect=True), P), 0, True),  # that was another one
        (Lost("EngineLost", "died"), Pair(replace(ONE.decode, suspect=True)), 0, False),
        (Lost("EngineLost", "died"), Pair(replace(ONE.decode, suspect=True)), 1, True),  # it was not dead after all
        (failed("DigestMismatch"), PD, 0, False),
    ],
)
def test_only_who_had_a_try_in_work_may_have_died_over_it(
    result: TryResult, pair: Pair, num_tokens: int, expected: bool
) -> None:
    assert had_in_work(result, pair, culprit_of(result, pair), num_tokens) is expected


def test_lives_that_ended_beside_it_cost_and_do_not_blame() -> None:
    faults = Faults().with_fault(Culprit("p", "i1"), had_it=False)
    assert faults.repeats(Culprit("p", "i1"))
    assert faults.victims == 0
    assert faults.with_fault(Culprit("p", "i1"), had_it=True).victims == 1


def test_a_token_ends_the_row() -> None:
    faults = Faults().with_fault(None).with_fault(Culprit("p", "i1"))
    assert faults.in_a_row == 2
    assert faults.with_progress().in_a_row == 0
    assert faults.with_progress().repeats(Culprit("p", "i1"))


def test_the_pause_grows_and_is_bounded() -> None:
    pauses = [fault_delay(row, 0.5, 1000.0) for row in range(1, 9)]
    assert pauses == sorted(pauses)
    assert pauses[:4] == list(DELAYS_S)
    assert pauses[-1] == DELAYS_S[-1]
    assert fault_delay(1, 0.0, 1000.0) < fault_delay(1, 0.99, 1000.0)


@given(st.integers(1, 50), st.floats(0, 1, exclude_max=True), st.floats(0, 5))
def test_a_pause_leaves_time_for_the_try(row: int, draw: float, left_s: float) -> None:
    assert 0 <= fault_delay(row, draw, left_s) <= left_s / 2


def test_a_fleet_is_waited_for_while_its_loss_is_young() -> None:
    assert not may_wait(None, 5.0, 30.0)
    assert may_wait(5.0, 5.0, 30.0)
    assert may_wait(5.0, 35.0, 30.0)
    assert not may_wait(5.0, 35.1, 30.0)
    assert replace(P, suspect=True).unusable == ""
