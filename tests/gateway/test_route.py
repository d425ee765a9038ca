"""Which pair a try goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_gateway.routing.fleet import Engine, FleetError, Member, Pair, parse_fleet
from sluice_gateway.routing.route import NO_PAIR, NO_ROOM, NoRoute, Wanted, choose_pair
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import EngineHello, Load, Role

PREFILL, DECODE, UNIFIED = Role.PREFILL, Role.DECODE, Role.UNIFIED


def engine(role: Role, address: str, model: str = "a", own: int = 0, trouble: str = "", **load: Any) -> Engine:
    hello = EngineHello(role, Fingerprint.of({"model": model}), "i", 4096, 4, f"{address}-source", 1, 512)
    base = Load("i", running=0, waiting=0, max_running=8, free_pages=9, total_pages=9)
    return Engine(Member(role, address), hello, replace(base, **load), own, trouble)


def prefix_keys(_fingerprint: Fingerprint, tokens: tuple[int, ...], page: int) -> tuple[bytes, ...]:
    return tuple(bytes(tokens[:end]) for end in range(page, len(tokens) + 1, page))


def choose(*engines: Engine, seed: int = 0, **wanted: Any) -> Pair | NoRoute:
    fields: dict[str, Any] = {"tokens": tuple(range(16))} | wanted
    return choose_pair(Wanted(**fields), engines, seed, prefix_keys)


def addresses(choice: Pair | NoRoute) -> tuple[str, ...]:
    assert isinstance(choice, Pair), choice
    return choice.addresses


def test_a_pair_is_one_prefill_and_one_decode() -> None:
    pair = choose(engine(PREFILL, "p"), engine(DECODE, "d"))
    assert addresses(pair) == ("p", "d")
    assert isinstance(pair, Pair)
    assert pair.source_address == "p-source"


def test_a_unified_engine_is_a_pair_of_its_own_without_a_source() -> None:
    pair = choose(engine(UNIFIED, "u"))
    assert isinstance(pair, Pair)
    assert (pair.addresses, pair.source_address) == (("u",), "")


@pytest.mark.parametrize(
    "engines",
    [
        (),
        (engine(PREFILL, "p"),),
        (engine(DECODE, "d"),),
        (engine(PREFILL, "p", model="a"), engine(DECODE, "d", model="b")),
        (engine(PREFILL, "p"), engine(DECODE, "d", draining=True)),
        (engine(PREFILL, "p", quarantined=True), engine(DECODE, "d")),
        (engine(PREFILL, "p"), engine(DECODE, "d", not_ready=True)),
        (engine(PREFILL, "p", trouble="NoLoad"), engine(DECODE, "d")),
        (Engine(Member(UNIFIED, "u")),),
        (replace(engine(PREFILL, "u"), member=Member(UNIFIED, "u")),),
    ],
)
def test_there_is_no_pair_without_two_usable_equal_engines(engines: tuple[Engine, ...]) -> None:
    choice = choose(*engines)
    assert isinstance(choice, NoRoute)
    assert choice.reason == NO_PAIR
    assert choice.detail


@pytest.mark.parametrize(
    "full", [{"running": 8}, {"running": 5, "waiting": 3}, {"running": 5, "own": 3}, {"running": 9}, {"max_running": 0}]
)
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_full_engine_gets_nothing(full: dict[str, int], side: str) -> None:
    engines = [engine(r, a, **(full if a == side else {})) for r, a in ((PREFILL, "p"), (DECODE, "d"))]
    choice = choose(*engines)
    assert isinstance(choice, NoRoute)
    assert choice.reason == NO_ROOM


def test_a_slot_that_load_still_counts_but_ended_is_room() -> None:
    assert addresses(choose(engine(UNIFIED, "u", running=8, own=-1))) == ("u",)
    assert engine(UNIFIED, "u", own=-3).room == 8


def test_the_longest_cached_prefix_wins_when_loads_are_equal() -> None:
    keys = prefix_keys(Fingerprint.of({}), tuple(range(16)), 4)
    short, long = engine(UNIFIED, "short", block_keys=(keys[0],)), engine(UNIFIED, "long", block_keys=(keys[2],))
    for seed in range(20):
        assert addresses(choose(short, long, engine(UNIFIED, "none"), seed=seed)) == ("long",)


def test_block_keys_are_computed_once_and_only_where_somebody_has_cached_something() -> None:
    calls: list[int] = []

    def counting(fingerprint: Fingerprint, tokens: tuple[int, ...], page: int) -> tuple[bytes, ...]:
        calls.append(page)
        return prefix_keys(fingerprint, tokens, page)

    wanted = Wanted(tuple(range(16)))
    choose_pair(wanted, [engine(UNIFIED, "u")], 0, counting)
    assert not calls
    cached = [engine(UNIFIED, name, block_keys=(b"x",)) for name in "uv"]
    for seed in range(3):
        choose_pair(wanted, cached, seed, counting)
    assert calls == [4]


def test_a_busy_engine_loses_its_cached_prefix() -> None:
    keys = prefix_keys(Fingerprint.of({}), tuple(range(16)), 4)
    cached = engine(UNIFIED, "cached", block_keys=(keys[0],), running=7)
    assert addresses(choose(cached, engine(UNIFIED, "idle"))) == ("idle",)


def test_each_side_of_a_pair_is_chosen_on_its_own() -> None:
    keys = prefix_keys(Fingerprint.of({}), tuple(range(16)), 4)
    fleet = [engine(PREFILL, "p1"), engine(PREFILL, "p2", block_keys=keys), engine(DECODE, "d1", running=6)]
    assert addresses(choose(*fleet, engine(DECODE, "d2"))) == ("p2", "d2")


def test_a_pair_whose_records_do_not_move_is_avoided_while_there_is_another() -> None:
    """Each engine is well and wanted; only the way from p1 to d1 is not."""
    keys = prefix_keys(Fingerprint.of({}), tuple(range(16)), 4)
    d1 = engine(DECODE, "d1", failing_sources=("p1-source",))
    fleet = [engine(PREFILL, "p1", block_keys=keys), d1]
    assert addresses(choose(*fleet)) == ("p1", "d1"), "the only pair is never avoided"
    assert addresses(choose(*fleet, engine(PREFILL, "p2"))) == ("p2", "d1")
    assert addresses(choose(*fleet, engine(DECODE, "d2", running=7))) == ("p1", "d2")
    both = engine(DECODE, "d3", failing_sources=("p1-source", "p2-source"))
    assert addresses(choose(engine(PREFILL, "p1"), engine(PREFILL, "p2"), both))[1] == "d3"
    full = engine(DECODE, "d2", running=8)
    waits = choose(*fleet, full)
    assert isinstance(waits, NoRoute)
    assert waits.reason == "NoRoom", "one that works is waited for"
    unified = engine(UNIFIED, "u", running=7)
    assert addresses(choose(*fleet, unified)) == ("u",)


def test_equals_share_the_work_and_the_seed_decides() -> None:
    fleet = [engine(UNIFIED, f"u{i}") for i in range(4)]
    picks = Counter(addresses(choose(*fleet, seed=seed))[0] for seed in range(400))
    assert set(picks) == {"u0", "u1", "u2", "u3"}
    assert min(picks.values()) > 40
    assert [choose(*fleet, seed=7)] * 3 == [choose(*fleet, seed=7) for _ in range(3)]


def test_of_two_drawn_equals_the_less_busy_wins() -> None:
    fleet = [engine(UNIFIED, "a", max_running=1000, running=10), engine(UNIFIED, "b", max_running=1000)]
    assert {addresses(choose(*fleet, seed=seed)) for seed in range(50)} == {("b",)}


def test_a_failed_engine_is_avoided_while_there_is_another() -> None:
    fleet = [engine(PREFILL, "p"), engine(DECODE, "d1"), engine(DECODE, "d2", running=7)]
    assert addresses(choose(*fleet, avoid=frozenset({"p", "d1"}))) == ("p", "d2")
    assert addresses(choose(*fleet[:2], avoid=frozenset({"p", "d1"}))) == ("p", "d1")


def test_a_suspect_engine_is_the_last_choice_and_still_a_choice() -> None:
    suspect = replace(engine(UNIFIED, "a"), suspect=True)
    assert {addresses(choose(suspect, engine(UNIFIED, "b", running=7), seed=s)) for s in range(9)} == {("b",)}
    assert addresses(choose(suspect)) == ("a",)
    sides = [replace(engine(PREFILL, "p1"), suspect=True), engine(PREFILL, "p2", running=7), engine(DECODE, "d")]
    assert addresses(choose(*sides)) == ("p2", "d")


def test_a_begun_answer_stays_with_its_model() -> None:
    fleet = [engine(UNIFIED, "a", model="a", running=8), engine(UNIFIED, "b", model="b")]
    choice = choose(*fleet, fingerprint=Fingerprint.of({"model": "a"}))
    assert isinstance(choice, NoRoute)
    assert choice.reason == NO_ROOM
    assert addresses(choose(*fleet)) == ("b",)
    gone = choose(fleet[1], fingerprint=Fingerprint.of({"model": "a"}))
    assert isinstance(gone, NoRoute)
    assert gone.reason == NO_PAIR


engines = st.builds(
    engine,
    st.sampled_from(Role),
    st.sampled_from("abcdef"),
    model=st.sampled_from("xy"),
    own=st.integers(-2, 4),
    trouble=st.sampled_from(["", "", "NoLoad"]),
    running=st.integers(0, 8),
    waiting=st.integers(0, 2),
    draining=st.booleans(),
    quarantined=st.booleans(),
)


@given(st.lists(engines, max_size=8, unique_by=lambda e: e.member.address), st.integers(0, 99))
def test_a_chosen_pair_is_always_usable_equal_and_has_room(fleet: list[Engine], seed: int) -> None:
    choice = choose(*fleet, seed=seed)
    possible = any(
        e.room > 0 and f.room > 0 and not e.unusable and not f.unusable and e.hello == f.hello
        if e is f and e.member.role is UNIFIED
        else (e.member.role, f.member.role) == (PREFILL, DECODE)
        and not e.unusable
        and not f.unusable
        and e.room > 0
        and f.room > 0
        and e.hello is not None
        and f.hello is not None
        and e.hello.fingerprint == f.hello.fingerprint
        for e in fleet
        for f in fleet
    )
    assert isinstance(choice, Pair) == possible
    if isinstance(choice, Pair):
        assert all(not e.unusable and e.room > 0 for e in choice.engines)
        assert len({e.hello.fingerprint for e in choice.engines if e.hello}) == 1
        roles = tuple(e.member.role for e in choice.engines)
        assert roles in ((UNIFIED,), (PREFILL, DECODE))


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"members": [{"role": "chef", "address": "a"}]},
        {"members": [{"role": "decode"}]},
        {"members": [{"role": "decode", "name": "d"}]},
        {"members": [{"role": "decode", "down": "it died"}]},
        {"members": [{"role": "decode", "name": "d", "down": "x"}, {"role": "decode", "name": "d", "down": "x"}]},
        {"members": [{"role": "decode", "address": "a"}, {"role": "prefill", "address": "a"}]},
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused(document: Any) -> None:
    with pytest.raises(FleetError):
        parse_fleet(document)
