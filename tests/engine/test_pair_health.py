"""A pair that fails though both of its engines are well: counted, named, and over with the first success."""

from __future__ import annotations

from sluice_engine.leader.handoff.pair_health import (
    LEASE_S,
    MAX_DETAIL,
    MOST_FAILURES,
    MOST_SOURCES,
    MOST_TOLD,
    PairHealth,
)


def fail(
    pairs: PairHealth, source: str = "a:1", times: int = MOST_FAILURES, *, now: float = 0.0, by_lease: bool = False
):
    return [pairs.failed(source, "Deadline", "x" * 999, now, by_lease=by_lease) for _ in range(times)]


def sources(pairs: PairHealth, now: float = 0.0) -> list[str]:
    return [trouble.source for trouble in pairs.failing(now)]


def test_a_source_fails_after_so_many_in_a_row_and_works_again_after_one_success() -> None:
    pairs = PairHealth()
    told = fail(pairs, times=MOST_FAILURES + 2)
    assert told.index(True) == MOST_FAILURES - 1
    assert told.count(True) == 1
    (trouble,) = pairs.failing(0.0)
    assert (trouble.source, trouble.failures, trouble.reason) == ("a:1", MOST_FAILURES + 2, "Deadline")
    assert len(trouble.detail) == MAX_DETAIL
    assert pairs.succeeded("a:1", 0.0, by_lease=False)
    assert not pairs.succeeded("a:1", 0.0, by_lease=False)
    assert sources(pairs) == []


def test_a_success_in_between_starts_the_count_again() -> None:
    pairs = PairHealth()
    for _ in range(5):
        assert fail(pairs, times=MOST_FAILURES - 1) == [False] * (MOST_FAILURES - 1)
        pairs.succeeded("a:1", 0.0, by_lease=False)
    assert sources(pairs) == []


def test_a_ping_does_not_take_back_what_leases_have_shown() -> None:
    """A lane that carries one record may carry no more than that, or carry it wrongly."""
    pairs = PairHealth()
    for second in range(MOST_FAILURES):
        fail(pairs, times=1, now=float(second), by_lease=True)
        pairs.succeeded("a:1", second + 0.5, by_lease=False)
    assert sources(pairs, 3.0) == ["a:1"]
    assert pairs.succeeded("a:1", 4.0, by_lease=True)
    assert sources(pairs, 4.0) == []


def test_failures_of_leases_are_over_after_a_while_for_an_avoided_pair_gets_none() -> None:
    pairs = PairHealth()
    fail(pairs, by_lease=True)
    assert sources(pairs, LEASE_S) == ["a:1"]
    assert sources(pairs, LEASE_S + 1) == []


def test_sources_are_counted_apart_and_forgotten_sources_are_gone() -> None:
    pairs = PairHealth()
    for source in ("a:1", "b:1"):
        fail(pairs, source)
    pairs.succeeded("b:1", 0.0, by_lease=False)
    assert sources(pairs) == ["a:1"]
    pairs.forget("a:1")
    assert sources(pairs) == []


def test_what_is_remembered_and_told_is_bounded() -> None:
    pairs = PairHealth()
    for number in range(2 * MOST_SOURCES):
        fail(pairs, f"{number}")
    assert len(pairs._sources) == MOST_SOURCES
    assert len(sources(pairs)) == MOST_TOLD
