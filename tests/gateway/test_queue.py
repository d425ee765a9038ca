"""Who waits, who goes, who is too late."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice_gateway.routing.fleet import Engine, Member
from sluice_gateway.routing.queue import Dispatch, Idle, Waiting, expired, fits, next_dispatch, wake_at
from sluice_gateway.routing.route import NO_PAIR, NO_ROOM, Wanted, no_keys
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import EngineHello, Load, Role


def unified(room: int, model: str = "a", address: str = "u") -> Engine:
    hello = EngineHello(Role.UNIFIED, Fingerprint.of({"model": model}), "i", 4096, 4, "", 1, 512)
    return Engine(Member(Role.UNIFIED, address), hello, Load("i", 0, 0, room, 1, 1))


def waiting(order: int, model: str | None = None, **fields: Any) -> Waiting:
    avoid = fields.pop("avoid", frozenset())
    wanted = Wanted((1,), Fingerprint.of({"model": model}) if model else None, avoid)
    return Waiting(order, fields.pop("deadline", 100.0), wanted, **fields)


def step(entries: list[Waiting], *engines: Engine, now: float = 0.0) -> Dispatch | Idle:
    return next_dispatch(entries, engines, now, 0, no_keys)


def dispatched(choice: Dispatch | Idle) -> int:
    assert isinstance(choice, Dispatch), choice
    return choice.waiting.order


def test_the_queue_is_bounded_and_a_request_enters_whole_or_not_at_all() -> None:
    assert fits(0, 4, 4)
    assert fits(3, 1, 4)
    assert not fits(3, 2, 4)


def test_the_first_to_arrive_goes_first() -> None:
    assert dispatched(step([waiting(1), waiting(2)], unified(1))) == 1


def test_nobody_goes_without_room_and_the_reason_is_told() -> None:
    idle = step([waiting(1)], unified(0))
    assert isinstance(idle, Idle)
    assert idle.reason is not None
    assert idle.reason.reason == NO_ROOM
    assert idle.wake_at == 100.0
    nobody = step([waiting(1)])
    assert isinstance(nobody, Idle)
    assert nobody.reason is not None
    assert nobody.reason.reason == NO_PAIR


def test_one_that_must_pause_lets_others_pass_and_goes_in_its_time() -> None:
    entries = [waiting(1, not_before=5.0), waiting(2)]
    assert dispatched(step(entries, unified(1))) == 2
    assert dispatched(step(entries, unified(1), now=5.0)) == 1
    assert step(entries[:1], unified(1), now=1.0) == Idle(5.0)


def test_one_that_waits_for_its_model_does_not_hold_up_others() -> None:
    entries = [waiting(1, model="gone"), waiting(2)]
    assert dispatched(step(entries, unified(1))) == 2


def test_the_unpinned_head_is_never_passed() -> None:
    entries = [waiting(1), waiting(2, model="a")]
    assert isinstance(step(entries, unified(0)), Idle)


def test_the_deadline_is_exclusive() -> None:
    entries = [waiting(1, deadline=5.0), waiting(2, deadline=6.0)]
    assert [e.order for e in expired(entries, 5.0)] == [1]
    assert wake_at(entries[1:], 5.0) == 6.0
    assert wake_at([], 5.0) is None


entries_of_any_kind = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "gone"]), st.floats(0, 3), st.floats(4, 9)), max_size=8
).map(lambda rows: [waiting(i, model=m, not_before=n, deadline=d) for i, (m, n, d) in enumerate(rows)])


@given(entries_of_any_kind, st.integers(0, 2), st.integers(0, 2), st.floats(0, 3.9))
def test_nobody_is_passed_by_a_later_one_that_takes_what_it_could_use(
    entries: list[Waiting], room_a: int, room_b: int, now: float
) -> None:
    engines = (unified(room_a, "a", "ua"), unified(room_b, "b", "ub"))
    choice = step(entries, *engines, now=now)
    ready = [e for e in entries if e.not_before <= now]
    able = [e for e in ready if not isinstance(step([e], *engines, now=now), Idle)]
    if isinstance(choice, Idle):
        assert not able
    else:
        assert choice.waiting is able[0]


@given(entries_of_any_kind, st.floats(0, 3.9))
def test_an_idle_queue_sleeps_until_time_alone_can_change_something(entries: list[Waiting], now: float) -> None:
    choice = step(entries, now=now)
    assert isinstance(choice, Idle)
    if entries:
        assert choice.wake_at is not None
        assert now < choice.wake_at <= min(e.deadline for e in entries)


def test_a_pause_after_a_fault_is_for_the_blamed_engine_only() -> None:
    entry = waiting(1, calm_at=5.0, blamed=frozenset({"u"}))
    assert dispatched(step([entry, waiting(2)], unified(1))) == 2
    alone = step([entry], unified(1))
    assert isinstance(alone, Idle)
    assert alone.wake_at == 5.0
    assert dispatched(step([entry], unified(1), now=5.0)) == 1
    other = step(
        [waiting(1, avoid=frozenset({"u"}), calm_at=5.0, blamed=frozenset({"u"}))], unified(9), unified(1, address="v")
    )
    assert isinstance(other, Dispatch)
    assert other.pair.addresses == ("v",)
