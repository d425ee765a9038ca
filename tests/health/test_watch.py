"""The supervisor's eye over virtual time: its own pauses, clocks that jump, windows that expire."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.watched_rows import EngineReason, engine_rows
from sluice_protocol.generate import Role
from sluice_runtime.health.layout import Phase, State
from sluice_runtime.health.reading import Exit, Thread
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.throughput import Throughput
from sluice_runtime.health.verdict import Budgets, Kind
from sluice_runtime.health.watch import MAX_WINDOW_S, PERIOD_S, RESTART_S, Watch
from sluice_runtime.health.watched import Reason

WATCHED = engine_rows(Role.DECODE, "nixl")
FLOOR_S = 10.0


class Scene:
    """A supervisor that looks every PERIOD_S of virtual time, and threads that tick unless they are frozen."""

    def __init__(self, tmp_path: Path) -> None:
        self.recorder = Recorder.create(tmp_path / "recorder", RecorderNames(tuple(row.name for row in WATCHED)))
        self.now = 1000.0
        self.frozen: set[str] = set()
        self.rows = {row.name: self.recorder.row(row.name) for row in WATCHED}
        for row in self.rows.values():
            row.begin(Phase.SERVING)
        self.watch = Watch(
            self.recorder, WATCHED, Budgets(floor_s=FLOOR_S), lambda: self.now, lambda pid, tid: (Thread.ALIVE, 0.0)
        )
        self.watch.started = True

    def run(self, seconds: float, period: float = PERIOD_S) -> Kind:
        for _ in range(max(1, round(seconds / period))):
            self.now += period
            for name, row in self.rows.items():
                if name not in self.frozen:
                    row.tick()
            if self.watch.look().is_fatal:
                break
        return self.watch.verdict.kind


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_idle_for_ten_virtual_minutes_is_idle(scene: Scene) -> None:
    assert scene.run(600, period=0.5) is Kind.IDLE


def test_a_frozen_lease_thread_is_named_within_its_budget_and_a_second(scene: Scene) -> None:
    scene.run(5)
    scene.frozen.add("leader.lease")
    assert scene.run(FLOOR_S) is not Kind.WEDGED
    assert scene.run(1) is Kind.WEDGED
    assert scene.watch.verdict.reason == EngineReason.LEASE_THREAD_DEAD


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_by_an_hour_accuses_nobody_and_hides_nothing(scene: Scene, jump: float) -> None:
    scene.frozen.add("leader.lease")
    scene.run(FLOOR_S / 2)
    scene.now += jump
    assert scene.run(FLOOR_S / 4) is not Kind.WEDGED
    assert scene.run(FLOOR_S) is Kind.WEDGED


def test_a_supervisor_that_did_not_run_itself_blames_nobody_for_that_time(scene: Scene) -> None:
    """A paused container, a machine without a free core: everybody stood still, the watcher too."""
    scene.run(5)
    scene.frozen |= set(scene.rows)
    scene.now += 120
    assert scene.run(PERIOD_S) is not Kind.WEDGED
    scene.frozen.clear()
    assert scene.run(60) is Kind.IDLE


def test_a_maintenance_window_suppresses_the_verdict_and_expires_by_itself(scene: Scene) -> None:
    granted = scene.watch.maintain(120)
    scene.frozen.add("leader.loop")
    assert granted == 120
    assert scene.run(119) is not Kind.WEDGED
    assert scene.run(1 + FLOOR_S + 1) is Kind.WEDGED
    assert scene.watch.maintenance_s == 0


def test_what_froze_late_in_a_window_has_its_whole_budget_after_it(scene: Scene) -> None:
    scene.watch.maintain(60)
    scene.run(55)
    scene.frozen.add("leader.loop")
    assert scene.run(5 + FLOOR_S - 1) is not Kind.WEDGED
    assert scene.run(3) is Kind.WEDGED


def test_a_warm_up_that_makes_steps_is_no_stalled_start(scene: Scene) -> None:
    scene.watch.started = False
    for number in range(10):
        scene.rows["rank0.loop"].progress(number)
        assert scene.run(50) is not Kind.WEDGED


def test_a_lease_thread_that_is_silent_costs_readiness_long_before_its_budget(scene: Scene) -> None:
    scene.run(5)
    assert scene.watch.is_silent is False
    scene.frozen.add("leader.lease")
    assert scene.run(5) is not Kind.WEDGED
    assert scene.watch.is_silent


def test_a_window_is_bounded_and_can_be_ended(scene: Scene) -> None:
    assert scene.watch.maintain(10 * MAX_WINDOW_S) == MAX_WINDOW_S
    assert scene.watch.maintain(0) == 0
    assert scene.watch.maintenance_s == 0


def test_a_death_is_a_death_in_a_window_too(scene: Scene) -> None:
    scene.watch.maintain(600)
    scene.watch.exited(Exit("rank0", -9))
    assert scene.run(PERIOD_S) is Kind.DEAD


def test_a_load_that_goes_on_for_long_is_no_stall(scene: Scene) -> None:
    scene.watch.started = False
    loop = scene.rows["rank0.loop"]
    loop.enter(Phase.LOADING)
    scene.frozen.add("rank0.loop")
    for gibibytes in range(8):
        loop.count(12, gibibytes << 30)  # Field.COUNT_A: bytes of weights
        assert scene.run(30) is not Kind.WEDGED


def test_rows_of_a_process_that_is_started_again_are_looked_at_afresh(scene: Scene) -> None:
    scene.frozen.add("sidecar.poller")
    scene.run(FLOOR_S - 1)
    fresh = Recorder.attach(scene.recorder.path).row("sidecar.poller")
    fresh.begin(Phase.POLLING)
    scene.recorder.view.cast("Q")[_state_of(scene, "sidecar.poller")] = State.RUNNING
    assert scene.run(FLOOR_S) is not Kind.DEAD


def _state_of(scene: Scene, name: str) -> int:
    return scene.rows[name]._base


# -- starts, and those who are started again


def test_weights_that_the_leader_hashes_are_progress_of_the_start(scene: Scene) -> None:
    """Before any other row begins, and for longer than a start may stand."""
    for row in scene.rows.values():
        row.forget()
    scene.watch.started = False
    marks = LeaderMarks(scene.recorder)
    marks.begin(Phase.LOADING)
    for _ in range(400):
        marks.has_read(1 << 20)
        assert scene.run(1.0) is not Kind.WEDGED
    assert scene.run(Budgets().start_s + 1) is Kind.WEDGED
    assert scene.watch.verdict.reason == Reason.START_STALLED


def forget_sidecar(scene: Scene) -> list[str]:
    names = [name for name in scene.rows if name.startswith("sidecar.")]
    for name in names:
        scene.rows[name].forget()
    scene.watch.forgot("sidecar")
    return names


def test_a_start_that_stands_is_named_though_a_sidecar_comes_and_goes(scene: Scene) -> None:
    """Each of its lives was progress of the start: an hour later the verdict was still idle."""
    for row in scene.rows.values():
        row.forget()
    scene.watch.started = False
    scene.rows["leader.loop"].begin(Phase.STARTING)
    scene.frozen.add("leader.loop")
    told, lived = Kind.IDLE, 0.0
    while told is not Kind.WEDGED and lived < 3 * Budgets().start_s:
        names = forget_sidecar(scene)
        scene.run(2.0)
        for name in names:
            scene.rows[name].begin(Phase.POLLING)
        told, lived = scene.run(12.0), lived + 14.0
    assert (told, scene.watch.verdict.reason) == (Kind.WEDGED, Reason.START_STALLED)
    assert lived <= Budgets().start_s + 30.0


@pytest.mark.parametrize("begins", [False, True])
def test_a_sidecar_that_does_not_come_up_again_is_named_in_its_budget(scene: Scene, begins: bool) -> None:
    """Whether it hangs before its first word or in the start of NIXL."""
    scene.run(5)
    forget_sidecar(scene)
    if begins:
        scene.rows["sidecar.socket"].begin(Phase.STARTING)
    assert scene.run(RESTART_S - 1) is not Kind.WEDGED
    assert scene.watch.away_s == RESTART_S - 1
    assert scene.run(2) is Kind.WEDGED
    assert (scene.watch.verdict.reason, scene.watch.verdict.culprit) == (EngineReason.TRANSFER_STALLED, "sidecar")


def test_a_sidecar_that_comes_up_again_is_forgiven(scene: Scene) -> None:
    scene.run(5)
    names = forget_sidecar(scene)
    scene.run(RESTART_S - 1)
    for name in names:
        scene.rows[name].begin(Phase.SERVING)
    assert scene.run(2 * RESTART_S) is not Kind.WEDGED
    assert scene.watch.away_s == 0


def test_every_life_of_a_sidecar_has_a_budget_of_its_own_but_it_is_away_since_the_first_death(scene: Scene) -> None:
    scene.run(5)
    for _ in range(3):
        forget_sidecar(scene)
        assert scene.run(RESTART_S - 1) is not Kind.WEDGED
    assert scene.watch.away_s == 3 * (RESTART_S - 1)


def test_in_a_maintenance_window_nobody_is_late(scene: Scene) -> None:
    scene.run(5)
    scene.watch.maintain(100)
    forget_sidecar(scene)
    assert scene.run(100) is not Kind.WEDGED
    assert scene.run(RESTART_S + 1) is Kind.WEDGED


# -- how long a step should take


def test_a_cold_engine_expects_its_first_steps_to_be_long() -> None:
    assert Throughput(cold_ns=6_000_000_000).expected(1) == 6_000_000_000


def test_a_step_of_a_thousand_times_the_tokens_may_take_a_thousand_times_as_long() -> None:
    throughput = Throughput(cold_ns=10**10)
    for _ in range(50):
        throughput.measured(8, 2_000_000)
    assert throughput.expected(8) < 20_000_000
    assert throughput.expected(8000) >= 1000 * 2_000_000
    for _ in range(50):
        throughput.measured(1000, 102_000_000)
    assert 1_000_000_000 < throughput.expected(10_000) < 1_100_000_000


def test_small_steps_are_no_reason_to_expect_a_step_per_token() -> None:
    """Chunks of 64 tokens at 64 ms: the next such chunk is expected in tenths of a second, not in seconds."""
    throughput = Throughput(cold_ns=10**10)
    throughput.measured(3, 3_000_000)
    for _ in range(20):
        throughput.measured(64, 64_000_000)
        throughput.measured(1, 2_000_000)
    assert throughput.expected(64) <= 130_000_000
    assert throughput.expected(6400) >= 6_400_000_000


def test_it_follows_slower_steps_in_a_few_and_faster_ones_slowly() -> None:
    throughput = Throughput(cold_ns=1)
    throughput.measured(0, 1_000_000)
    for _ in range(4):
        throughput.measured(0, 50_000_000)
    assert throughput.expected(0) == 50_000_000
    throughput.measured(0, 1_000_000)
    assert throughput.expected(0) > 40_000_000


@pytest.mark.parametrize("tokens", [32, 512])
def test_one_pause_of_the_whole_machine_does_not_blind_the_budgets_that_follow(tokens: int) -> None:
    throughput = Throughput(cold_ns=10**10)
    for _ in range(20):
        throughput.measured(16, 20_000_000)
        throughput.measured(tokens, 30_000_000)
    before = throughput.expected(tokens)
    throughput.measured(tokens, 28_000_000_000)
    assert throughput.expected(tokens) <= 8 * before
