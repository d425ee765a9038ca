"""A pair that fails though both of its engines are well: counted, named, and over with the first success."""

from __future__ import annotations

from sluice_engine.pair_health import MOST_FAILURES, MOST_SOURCES, PairHealth


def test_a_source_fails_after_so_many_in_a_row_and_works_again_after_one_success() -> None:
    pairs = PairHealth()
    told = [pairs.failed("a:1", "SourceSilent", "no Hello") for _ in range(MOST_FAILURES + 2)]
    assert told.index(True) == MOST_FAILURES - 1
    assert told.count(True) == 1
    (trouble,) = pairs.failing()
    assert (trouble.source, trouble.failures, trouble.reason) == ("a:1", MOST_FAILURES + 2, "SourceSilent")
    assert pairs.succeeded("a:1")
    assert not pairs.succeeded("a:1")
    assert pairs.failing() == ()


def test_a_success_in_between_starts_the_count_again() -> None:
    pairs = PairHealth()
    for _ in range(5):
        for _ in range(MOST_FAILURES - 1):
            assert not pairs.failed("a:1", "Deadline", "")
        pairs.succeeded("a:1")
    assert pairs.failing() == ()


def test_sources_are_counted_apart_and_forgotten_sources_are_gone() -> None:
    pairs = PairHealth()
    for source in ("a:1", "b:1"):
        for _ in range(MOST_FAILURES):
            pairs.failed(source, "Deadline", "")
    pairs.succeeded("b:1")
    assert [trouble.source for trouble in pairs.failing()] == ["a:1"]
    pairs.forget("a:1")
    assert pairs.failing() == ()


def test_no_more_sources_are_remembered_than_there_is_room_for() -> None:
    pairs = PairHealth()
    for number in range(2 * MOST_SOURCES):
        for _ in range(MOST_FAILURES):
            pairs.failed(f"{number}", "Deadline", "")
    assert len(pairs.failing()) == MOST_SOURCES
