"""Who is passed over: nobody under any healthy schedule, and whoever a plan has lost, while steps come and go."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from engine_double import PAGE, cache_alone_by_the_books, tiny_layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.scheduling.admission import pages_of_cache_alone, starving
from sluice_engine.leader.scheduling.ledger import CACHE
from sluice_engine.leader.scheduling.sequence import (
    Aborted,
    LeaseEnded,
    Mode,
    Phase,
    PullCommitted,
    PullGranted,
    PullsTerminal,
    SequenceSpec,
)
from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.leader.scheduling.turns import PassedOver, due
from sluice_engine.leader.step_loop import StepLoop
from sluice_engine.limits import Limits
from sluice_engine.step import RecordDigest, SampledRow, StepResult
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.watched_rows import LEADER_LOOP, LEADER_QUEUE, LEADER_RUNNING
from sluice_protocol.generate import Role
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import GrantedRecord
from sluice_records import ChainKey, PoolPlan, RecordKind
from sluice_runtime import fault_points
from sluice_runtime.health.layout import Phase as Doing
from sluice_runtime.health.reading import Thread
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.verdict import Budgets
from sluice_runtime.health.watch import Watch

STOP = 9
WATCHED = (LEADER_LOOP, LEADER_QUEUE, LEADER_RUNNING)
STEP_S = 1.0
# Just more than a step takes: whoever is left out of two is told of.
FLOOR_S = 1.5 * STEP_S


@dataclass
class Schedule:
    """The step loop, over ranks that sample what they are told to. A step stays under way until a plan needs it."""

    pools: PoolPlan = field(default_factory=lambda: PoolPlan(20, 6, 2))
    max_running: int = 5

    def __post_init__(self) -> None:
        limits = Limits(PAGE, 2 * PAGE, 2 * PAGE, self.max_running, 256, 64)
        self.loop = StepLoop(limits, tiny_layouts(), b"salt" * 4, self.pools)
        self.under_way: deque[tuple[Plan, int]] = deque()  # each with the token that its rows sample
        self.rooms: list[int] = []

    @property
    def state(self) -> SchedulerState:
        return self.loop.state

    def submit(self, length: int, max_tokens: int, mode: Mode = Mode.UNIFIED, seed: int = 0) -> int | None:
        prompt = tuple((seed * 31 + i * 7) % 64 for i in range(length))
        spec = SequenceSpec(
            self.loop.next_sequence, mode, prompt, (), Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,))
        )
        return spec.id if self.loop.admit(spec) is None else None

    def grant(self, sequence: int) -> None:
        """Everything that the room asked for, in one go."""
        held = self.state.sequences[sequence]
        assert held.state is not None
        wanted = [*enumerate(held.pages[held.num_closed :], held.num_closed), (0, held.state)]
        records = tuple(GrantedRecord(ref.kind, 0, 1, b"identity", 1, PAGE, index) for index, ref in wanted)
        self.loop.tell(PullGranted(sequence, f"lease-{sequence}", "peer", records))

    def step(self, token: int = 1) -> Plan:
        while not self.loop.may_plan:
            self.report()
        turn = self.loop.plan([0], now=0.0)
        self.rooms += [sequence for sequence, _ in turn.planned.rooms]
        for sequence in turn.planned.cancelled:
            self.loop.tell(PullsTerminal(sequence))
        if turn.frame:
            self.under_way.append((turn.planned, token))
        return turn.planned

    def report(self) -> None:
        """The oldest step is done."""
        planned, token = self.under_way.popleft()
        asked = [work.row for work in planned.record.work if work.sample]
        sampled = tuple(SampledRow(row, (token,)) for row in asked)
        digests = tuple(RecordDigest(close.ref, 1) for close in planned.record.closed)
        assert self.loop.take(StepResult(planned.record.number, 0, sampled, digests), now=0.0) is not None

    def look(self) -> PassedOver:
        return self.loop.passed_over()


SUBMIT = st.tuples(
    st.just("submit"), st.sampled_from([Mode.UNIFIED, Mode.UNIFIED, Mode.SOURCE, Mode.READER]),
    st.sampled_from([3, 8, 14, 40, 60]), st.sampled_from([1, 4, 30, 60]),
)  # fmt: skip
OTHERS = st.one_of(
    st.tuples(st.just("abort"), st.integers(1, 30)),
    st.tuples(st.just("lease-ended"), st.integers(1, 30)),
    st.tuples(st.just("grant")),
    st.tuples(st.just("commit"), st.integers(0, 5)),
    st.tuples(st.just("look")),
)
STEPS = st.tuples(st.just("step"), st.integers(1, 8), st.sampled_from([1, 1, 2, STOP]))
# Something happens, and goes on for some steps.
TRACES = st.lists(st.tuples(SUBMIT, st.lists(st.one_of(SUBMIT, OTHERS), max_size=3), STEPS), min_size=4, max_size=15)


class Told:
    """The marks and the verdict over virtual time: a step takes STEP_S, and the supervisor looks four times in it."""

    def __init__(self, path: Path) -> None:
        recorder = Recorder.create(path / "recorder", engine_kind(Role.UNIFIED, "nixl").recorded)
        self.now = 0.0
        self.marks = LeaderMarks(recorder)
        self.marks.begin(Doing.SERVING)
        budgets = Budgets(floor_s=FLOOR_S, factor=0.0)
        self.watch = Watch(recorder, WATCHED, budgets, lambda: self.now, lambda pid, tid: (Thread.ALIVE, 0.0))
        self.watch.started = True

    def pass_time(self, schedule: Schedule) -> None:
        for _ in range(4):
            self.now += STEP_S / 4
            self.marks.row.tick()
            passed = schedule.look()
            self.marks.passed_over(passed.since, passed.number, "" if passed.first is None else str(passed.first.id))
            told = self.watch.look()
            assert not told.is_fatal, told


def carry_out(schedule: Schedule, event: tuple, told: Told) -> None:  # type: ignore[type-arg]
    match event:
        case ("submit", mode, length, most):
            schedule.submit(length, most, mode, seed=length % 3)
        case ("abort", sequence):
            schedule.loop.tell(Aborted(sequence))
        case ("lease-ended", sequence):
            if sequence in schedule.state.sequences and schedule.state.sequences[sequence].mode is Mode.SOURCE:
                schedule.loop.tell(LeaseEnded(sequence))
        case ("grant",):
            rooms, schedule.rooms = schedule.rooms, []
            for sequence in rooms:
                if (held := schedule.state.sequences.get(sequence)) is not None and held.phase is Phase.PULLING:
                    schedule.grant(sequence)
        case ("commit", which):
            pulling = [s.id for s in schedule.state.sequences.values() if s.phase is Phase.PULLING]
            if pulling:
                schedule.loop.tell(PullCommitted(pulling[which % len(pulling)], 1))
        case ("step", number, token):
            for _ in range(number):
                schedule.step(token)
                told.pass_time(schedule)
        case ("look",):
            schedule.look()


@given(TRACES, st.sampled_from([PoolPlan(20, 6, 2), PoolPlan(9, 4, 1), PoolPlan(40, 8, 4)]))
@settings(max_examples=60, deadline=None)
def test_nobody_is_passed_over_under_any_healthy_schedule(trace, pools):
    schedule = Schedule(pools)
    with TemporaryDirectory() as directory:
        told = Told(Path(directory))
        for first, others, steps in trace:
            for event in (first, *others, steps):
                carry_out(schedule, event, told)
                schedule.state.check_integrity()
                assert pages_of_cache_alone(schedule.state) == cache_alone_by_the_books(schedule.state)


class Forgets:
    """A fault package whose plan forgets one sequence."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence

    def reach(self, point: str) -> None: ...

    def change(self, point: str, data: bytes) -> bytes:
        return data

    def holds(self, point: str) -> bool:
        return False

    def holds_one(self, point: str, which: int) -> bool:
        return which == self.sequence


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return lambda sequence: monkeypatch.setattr(fault_points, "_armed", Forgets(sequence))


def lost_at(schedule: Schedule, steps: int) -> PassedOver:
    passed = schedule.look()
    for _ in range(steps):
        schedule.step()
        passed = schedule.look()
    return passed


def test_one_that_decodes_and_is_in_no_step_is_told_of_since_the_step_that_left_it_out(forget):
    schedule = Schedule(PoolPlan(60, 6, 2))
    lost, other = schedule.submit(5, 60), schedule.submit(6, 60)
    assert lost_at(schedule, 4).number == 0
    forget(lost)
    passed = lost_at(schedule, 12)
    assert passed.first is schedule.state.sequences[lost]
    assert (passed.since, passed.number) == (4, 1)
    assert schedule.state.sequences[other].computed > 12, "the others' steps come and go"


def test_it_is_told_of_also_while_new_prompts_come_all_the_time(forget):
    """Each of them has been in no step yet when it is looked at."""
    schedule = Schedule(PoolPlan(60, 6, 2))
    lost = schedule.submit(5, 60)
    lost_at(schedule, 4)
    forget(lost)
    since = set()
    for seed in range(12):
        schedule.submit(14, 1, seed=seed)
        since.add(lost_at(schedule, 2).since)
    assert since == {4}


def test_a_prefill_that_no_step_takes_is_told_of_and_those_behind_it_are_not(forget):
    schedule = Schedule(PoolPlan(60, 6, 2))
    lost = schedule.submit(60, 8)
    schedule.step()
    forget(lost)
    schedule.submit(50, 8, seed=1)
    passed = lost_at(schedule, 8)
    assert passed.first is schedule.state.sequences[lost]
    assert passed.number == 1


def test_the_only_one_that_runs_is_told_of_without_any_step(forget):
    schedule = Schedule()
    lost = schedule.submit(5, 60)
    lost_at(schedule, 4)
    forget(lost)
    passed = lost_at(schedule, 3)
    assert passed.first is schedule.state.sequences[lost]
    assert passed.since == lost_at(schedule, 3).since


def test_who_needs_a_page_is_told_of_only_where_there_is_one(forget):
    schedule = Schedule(PoolPlan(4, 6, 2))
    lost = schedule.submit(PAGE, 20)
    while schedule.state.sequences[lost].computed < 2 * PAGE:
        schedule.step()
    forget(lost)
    assert lost_at(schedule, 3).first is schedule.state.sequences[lost]
    ledger, taken = schedule.state.ledger, []
    holder = schedule.state.sequences[lost].holder
    while ledger.num_free(RecordKind.PAGE):
        taken.append(ledger.reserve(RecordKind.PAGE, holder))
    assert lost_at(schedule, 3).number == 0
    ledger.drop(taken.pop(), holder)
    assert lost_at(schedule, 3).number == 1


def test_a_cached_page_below_which_another_is_in_use_is_no_room():
    """Two sequences with one prompt are computed side by side: the pages of the first are cached, and the second, which
    has its own copies of them, lives longer and caches the next one below them."""
    schedule = Schedule(PoolPlan(8, 6, 2))
    first, second = schedule.submit(2 * PAGE, 2), schedule.submit(2 * PAGE, 40)
    while first in schedule.state.sequences or schedule.state.sequences[second].num_closed < 3:
        schedule.step()
    state = schedule.state
    alone = [ref for ref in state.cache.references() if state.ledger.holders(ref) == (CACHE,)]
    assert [ref.kind for ref in alone].count(RecordKind.PAGE) == 2
    assert pages_of_cache_alone(state) == 0


class NeverWalked(OrderedDict[ChainKey, object]):
    """A table whose entries are looked up, never gone through."""

    def __iter__(self) -> Iterator[ChainKey]:
        raise AssertionError("gone through from end to end")

    keys = items = values = __iter__  # type: ignore[assignment]


def test_with_the_pool_full_of_cached_pages_nobody_goes_through_them_to_admit_a_request(monkeypatch):
    """An engine that has been busy for a while is always there: the look was 2 ms a request with 4,000 pages."""
    schedule = Schedule(PoolPlan(40, 6, 2))
    for seed in range(12):
        schedule.submit(3 * PAGE + 1, 2, seed=seed)
        while schedule.state.sequences:
            schedule.step()
    cache, ledger = schedule.state.cache, schedule.state.ledger
    assert len(cache) > 30
    assert ledger.num_free(RecordKind.PAGE) < 8
    running = schedule.submit(4 * PAGE, 20, seed=20)
    schedule.step()
    could_leave = cache_alone_by_the_books(schedule.state)
    with monkeypatch.context() as patched:
        patched.setattr(cache, "_pages", NeverWalked(cache._pages))
        assert pages_of_cache_alone(schedule.state) == could_leave
        patched.setattr(cache, "num_evictable", None)  # sequences have few pages: no need to know how many
        waiting = schedule.submit(8 * PAGE, 2, seed=21)
    assert running is not None
    assert waiting is not None
    assert starving(schedule.state) == (waiting, 1)


def test_one_that_pulls_waits_or_is_held_has_marks_elsewhere():
    schedule = Schedule(PoolPlan(8, 6, 2))
    reader, source = schedule.submit(12, 8, Mode.READER), schedule.submit(12, 8, Mode.SOURCE)
    schedule.step()
    waiting = schedule.submit(4 * PAGE, 8, seed=2)
    for _ in range(3):
        schedule.step()
    phases = {id: schedule.state.sequences[id].phase for id in (reader, source) if id is not None}
    assert set(phases.values()) == {Phase.PULLING, Phase.HELD}
    assert waiting is None or schedule.state.sequences[waiting].phase in (Phase.WAITING, Phase.PREFILLING)
    assert not [s for s in due(schedule.state) if s.phase not in (Phase.PREFILLING, Phase.DECODING)]
