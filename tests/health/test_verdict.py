"""The verdict as a table: every reason, every healthy case that looks like one, and where the budget's edge is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice_engine.watched_rows import HICACHE_CLIENT, TIER_COPIER, EngineReason, engine_rows, named_death
from sluice_gateway.status.watched_rows import GATEWAY_ROWS, GatewayReason
from sluice_protocol.generate import Role
from sluice_runtime.health.layout import Phase, State
from sluice_runtime.health.reading import Exit, Reading, RowReading, Thread, carry
from sluice_runtime.health.verdict import Budgets, Kind, Verdict, verdict
from sluice_runtime.health.watched import Reason

BUDGETS = Budgets(floor_s=10.0, factor=20.0, start_s=60.0)
WATCHED = (*engine_rows(Role.DECODE, "nixl", ranks=2), TIER_COPIER, HICACHE_CLIENT, *GATEWAY_ROWS)


def healthy_rows() -> dict[str, RowReading]:
    """An engine at rest: every thread runs, nothing is pending."""
    phases = {"leader.loop": Phase.SERVING, "rank0.loop": Phase.RECEIVING, "rank1.loop": Phase.RECEIVING}
    return {
        row.name: RowReading(
            row.name,
            State.RUNNING,
            pid=100 + index,
            tid=100 + index,
            ticks=50,
            progress=7,
            step=7,
            phase=phases.get(row.name, Phase.IDLE),
            thread=Thread.ALIVE,
        )
        for index, row in enumerate(WATCHED)
    }


class Engine:
    """Readings over time. `run` lets every loop tick, and every counter that has something pending move, except those
    that are frozen."""

    def __init__(self, budgets: Budgets = BUDGETS) -> None:
        self.rows = healthy_rows()
        self.at_s = 0.0
        self.budgets = budgets
        self.no_ticks: set[str] = set()
        self.no_progress: set[str] = set()
        self.exits: tuple[Exit, ...] = ()
        self.started, self.loaded, self.loading = True, 0, False
        self.before = carry(None, self.reading(), WATCHED)

    def reading(self) -> Reading:
        return Reading(self.at_s, dict(self.rows), self.started, self.loaded, exits=self.exits)

    def set(self, name: str, **fields: object) -> None:
        self.rows[name] = replace(self.rows[name], **fields)  # type: ignore[arg-type]

    def freeze(self, *names: str) -> None:
        self.no_ticks |= set(names)
        self.no_progress |= set(names)

    def run(self, seconds: float, period: float = 0.25) -> Verdict:
        """The first fatal verdict on the way, else the last."""
        told = Verdict(Kind.IDLE)
        for _ in range(round(seconds / period)):
            self.at_s += period
            self.loaded += self.loading
            for name, row in self.rows.items():
                ticks = row.ticks + (name not in self.no_ticks)
                progress = row.progress + bool(row.pending and name not in self.no_progress)
                self.rows[name] = replace(row, ticks=ticks, progress=progress)
            after = self.reading()
            told = verdict(self.before, after, self.budgets, WATCHED)
            self.before = carry(self.before, after, WATCHED)
            if told.is_fatal:
                return told
        return told


def wedged(told: Verdict) -> tuple[str, str]:
    assert told.kind is Kind.WEDGED, told
    return told.reason, told.culprit


# -- frozen loops: (what is set on which rows, frozen rows, reason, culprit)

FROZEN = [
    ({"leader.loop": {"phase": Phase.PLANNING}}, ["leader.loop"], EngineReason.SCHEDULER_FROZEN, "leader.loop"),
    ({"leader.loop": {"phase": Phase.PUBLISHING}}, ["leader.loop"], EngineReason.SCHEDULER_FROZEN, "leader.loop"),
    ({"leader.loop": {"phase": Phase.SERVING}}, ["leader.loop"], Reason.EVENT_LOOP_BLOCKED, "leader.loop"),
    (
        {"leader.loop": {"phase": Phase.SERVING, "thread": Thread.STOPPED}},
        ["leader.loop"],
        EngineReason.SCHEDULER_FROZEN,
        "leader.loop",
    ),
    ({}, ["leader.lease"], EngineReason.LEASE_THREAD_DEAD, "leader.lease"),
    ({}, ["rank1.loop"], EngineReason.RANK_FROZEN, "rank1.loop"),
    ({"rank0.loop": {"phase": Phase.BOOKKEEPING}}, ["rank0.loop"], EngineReason.RANK_FROZEN, "rank0.loop"),
    ({"rank0.loop": {"phase": Phase.DEVICE}}, ["rank0.loop"], EngineReason.DEVICE_STUCK, "rank0.device"),
    ({"rank1.loop": {"phase": Phase.COLLECTIVE}}, ["rank1.loop"], EngineReason.COLLECTIVE_STUCK, "rank1.collective"),
    ({}, ["sidecar.poller"], EngineReason.TRANSFER_STALLED, "sidecar.poller"),
    ({}, ["sidecar.socket"], EngineReason.TRANSFER_STALLED, "sidecar.socket"),
    ({}, ["leader.tier"], EngineReason.TIER_STUCK, "leader.tier"),
    ({}, ["leader.hicache"], EngineReason.TIER_STUCK, "leader.hicache"),
    ({}, ["gateway.loop"], Reason.EVENT_LOOP_BLOCKED, "gateway.loop"),
]


@pytest.mark.parametrize(("fields", "frozen", "reason", "culprit"), FROZEN)
def test_a_loop_that_does_not_turn_is_named_when_its_budget_is_over_and_not_before(fields, frozen, reason, culprit):
    engine = Engine()
    engine.run(5)
    for name, values in fields.items():
        engine.set(name, **values)
    engine.freeze(*frozen)
    assert not engine.run(BUDGETS.floor_s).is_fatal
    told = engine.run(1.0)
    assert wedged(told) == (reason, culprit)
    assert BUDGETS.floor_s < told.age_s <= BUDGETS.floor_s + 1
    assert told.budget_s == BUDGETS.floor_s


def test_who_holds_up_another_loop_is_named_with_the_time_that_is_over():
    """The leader's loop has the interpreter and a long step to go by; the lease thread has waited its whole budget."""
    engine = Engine()
    engine.run(5)
    engine.set("leader.loop", phase=Phase.SERVING, expected_ns=int(2 * BUDGETS.floor_s / BUDGETS.factor * 1e9))
    engine.freeze("leader.loop", "leader.lease")
    for _ in range(round(8 * BUDGETS.floor_s)):
        row = engine.rows["leader.loop"]
        engine.set("leader.loop", cpu_s=row.cpu_s + 0.25)
        told = engine.run(0.25)
        if told.is_fatal:
            break
    assert told.culprit == "leader.loop"
    assert told.age_s > told.budget_s
    assert "leader.lease has waited that long for it" in str(told)


# -- frozen work: the loops turn, but what is pending does not move

STALLED = [
    ({"leader.loop": {"pending": 3}}, ["leader.loop"], Reason.QUEUE_STARVED, "leader.loop"),
    (
        {"leader.loop": {"pending": 3, "step": 8}, "rank0.loop": {"progress": 8}},
        ["leader.loop", "rank1.loop"],
        EngineReason.RANK_FROZEN,
        "rank1.loop",
    ),
    (
        {
            "leader.loop": {"pending": 3, "step": 8},
            "rank0.loop": {"progress": 8},
            "rank1.device": {"pending": 3},
        },
        ["leader.loop", "rank1.loop", "rank1.device"],
        EngineReason.DEVICE_STUCK,
        "rank1.device",
    ),
    (
        {"leader.loop": {"pending": 3, "step": 8}, "rank0.loop": {"progress": 8}, "rank1.loop": {"progress": 8}},
        ["leader.loop"],
        EngineReason.SCHEDULER_FROZEN,
        "leader.loop",
    ),
    ({"rank0.device": {"pending": 1}}, ["rank0.device"], EngineReason.DEVICE_STUCK, "rank0.device"),
    ({"rank0.collective": {"pending": 1}}, ["rank0.collective"], EngineReason.COLLECTIVE_STUCK, "rank0.collective"),
    ({"sidecar.poller": {"pending": 2}}, ["sidecar.poller"], EngineReason.TRANSFER_STALLED, "sidecar.poller"),
    ({"sidecar.verifier": {"pending": 2}}, ["sidecar.verifier"], EngineReason.TRANSFER_STALLED, "sidecar.verifier"),
    ({"leader.tier": {"pending": 2}}, ["leader.tier"], EngineReason.TIER_STUCK, "leader.tier"),
    ({"leader.hicache": {"pending": 2}}, ["leader.hicache"], EngineReason.TIER_STUCK, "leader.hicache"),
    ({"leader.accept": {"pending": 2}}, ["leader.accept"], Reason.NOT_ACCEPTING, "leader.accept"),
    ({"gateway.accept": {"pending": 2}}, ["gateway.accept"], Reason.NOT_ACCEPTING, "gateway.accept"),
    ({"leader.grpc": {"pending": 1}}, ["leader.grpc"], Reason.RPC_FROZEN, "leader.grpc"),
    ({"gateway.grpc": {"pending": 1}}, ["gateway.grpc"], Reason.RPC_FROZEN, "gateway.grpc"),
    ({"leader.queue": {"pending": 2}}, ["leader.queue"], Reason.QUEUE_STARVED, "leader.queue"),
    ({"leader.running": {"pending": 1}}, ["leader.running"], Reason.QUEUE_STARVED, "leader.running"),
    ({"leader.lease": {"pending": 1}}, ["leader.lease"], EngineReason.LEASE_THREAD_DEAD, "leader.lease"),
    ({"gateway.loop": {"pending": 9}}, ["gateway.loop"], Reason.QUEUE_STARVED, "gateway.loop"),
    ({"gateway.tokenizer": {"pending": 1}}, ["gateway.tokenizer"], GatewayReason.TOKENIZER_STUCK, "gateway.tokenizer"),
]


@pytest.mark.parametrize(("fields", "frozen", "reason", "culprit"), STALLED)
def test_work_that_is_pending_and_does_not_move_is_named(fields, frozen, reason, culprit):
    engine = Engine()
    engine.run(5)
    for name, values in fields.items():
        engine.set(name, **values)
    engine.no_progress |= set(frozen)
    slow = engine.run(BUDGETS.floor_s)
    assert slow.kind is Kind.SLOW, slow
    assert wedged(engine.run(2.0)) == (reason, culprit)


def test_who_waits_starves_also_while_steps_come_and_go():
    engine = Engine()
    engine.set("leader.loop", pending=1)  # its progress moves
    engine.set("leader.queue", pending=2)
    engine.no_progress = {"leader.queue"}
    assert wedged(engine.run(BUDGETS.floor_s + 1)) == (Reason.QUEUE_STARVED, "leader.queue")


def test_who_is_passed_over_is_named_while_the_others_steps_come_and_go():
    engine = Engine()
    engine.set("leader.loop", pending=1)  # its progress moves
    engine.set("leader.running", pending=1, doing="decoding request r-7: in no step since 41", phase=Phase.WAITING)
    engine.no_progress = {"leader.running"}
    told = engine.run(BUDGETS.floor_s + 1)
    assert wedged(told) == (Reason.QUEUE_STARVED, "leader.running")
    assert "request r-7" in str(told)


def test_who_is_passed_over_by_nobody_but_a_loop_that_makes_no_step_is_not_to_blame():
    """All who run wait for a turn that never comes: that is the loop's, whose counter stands for a moment less."""
    engine = Engine()
    engine.set("leader.running", pending=2)
    engine.no_progress = {"leader.running"}
    engine.run(0.5)
    engine.set("leader.loop", pending=2)
    engine.no_progress |= {"leader.loop"}
    assert wedged(engine.run(BUDGETS.floor_s + 2)) == (Reason.QUEUE_STARVED, "leader.loop")


@pytest.mark.parametrize(
    ("waits", "loop"),
    [
        ("leader.queue", "leader.loop"),
        ("leader.running", "leader.loop"),
        ("leader.grpc", "leader.loop"),
        ("gateway.grpc", "gateway.loop"),
    ],
)
def test_who_waits_for_a_loop_that_does_not_turn_is_not_to_blame(waits, loop):
    """The loop says who waits, and calls itself; it stood still right after it had done so for the first time."""
    engine = Engine()
    engine.set(waits, pending=1)
    engine.no_progress = {waits}
    engine.run(0.5)
    engine.no_ticks = {loop}
    assert wedged(engine.run(BUDGETS.floor_s + 2)) == (Reason.EVENT_LOOP_BLOCKED, loop)


def test_a_call_to_itself_is_no_work():
    engine = Engine()
    engine.set("leader.grpc", pending=1)
    assert engine.run(1.0).kind is Kind.IDLE


def test_a_step_that_stands_is_no_excuse_for_grpc():
    engine = Engine()
    engine.set("leader.loop", pending=1, step=8, expected_ns=int(600e9))
    engine.set("leader.grpc", pending=1)
    engine.no_progress = {"leader.loop", "rank0.loop", "leader.grpc"}
    assert wedged(engine.run(BUDGETS.floor_s + 2)) == (Reason.RPC_FROZEN, "leader.grpc")


@pytest.mark.parametrize("waits", ["leader.queue", "leader.running"])
def test_who_waits_for_a_step_that_stands_is_not_to_blame(waits):
    """The one whose step it is gets the blame, though the others have waited for a moment longer."""
    engine = Engine()
    engine.set(waits, pending=2)
    engine.no_progress = {waits}
    engine.run(0.5)
    engine.set("leader.loop", pending=1, step=8)
    engine.set("rank0.loop", progress=8)
    engine.no_progress |= {"leader.loop", "rank1.loop"}
    assert wedged(engine.run(BUDGETS.floor_s + 2)) == (EngineReason.RANK_FROZEN, "rank1.loop")


def test_one_that_is_not_in_a_long_step_has_that_steps_budget():
    engine = Engine()
    engine.set("leader.loop", pending=1, expected_ns=int(5e9))
    engine.set("leader.running", pending=1)
    engine.no_progress = {"leader.running"}
    assert not engine.run(BUDGETS.factor * 5.0 - 1).is_fatal
    assert wedged(engine.run(2.0)) == (Reason.QUEUE_STARVED, "leader.running")


def test_who_waits_and_nothing_runs_starves_all_the_same():
    """The leader's own row says so too, a moment later."""
    engine = Engine()
    engine.set("leader.queue", pending=2)
    engine.no_progress = {"leader.queue"}
    engine.run(0.5)
    engine.set("leader.loop", pending=2)
    engine.no_progress |= {"leader.loop"}
    assert wedged(engine.run(BUDGETS.floor_s + 2)) == (Reason.QUEUE_STARVED, "leader.queue")


def test_a_sequence_that_waits_through_one_long_step_has_that_steps_budget():
    engine = Engine()
    engine.set("leader.loop", pending=1, expected_ns=int(5e9))
    engine.set("leader.queue", pending=2)
    engine.no_progress = {"leader.queue"}
    assert not engine.run(BUDGETS.factor * 5.0 - 1).is_fatal
    assert wedged(engine.run(2.0)) == (Reason.QUEUE_STARVED, "leader.queue")


@pytest.mark.parametrize("pending", [0, 1])
def test_a_long_step_keeps_its_budget_until_the_rank_has_moved_on(pending):
    """The leader has the result and expects nothing more; the rank has not come round to its next tick. Seen on a busy
    machine: a step of 11 s, a floor of 5 s, killed in that moment."""
    engine = Engine()
    engine.set("leader.loop", pending=1, expected_ns=int(5e9))
    engine.set("rank0.loop", pending=pending)
    engine.freeze("rank0.loop")
    assert not engine.run(5 * BUDGETS.floor_s).is_fatal
    engine.set("leader.loop", pending=0, expected_ns=0)
    assert not engine.run(1.0).is_fatal
    engine.no_ticks, engine.no_progress = set(), set()
    engine.set("rank0.loop", pending=0)
    engine.run(1.0)
    engine.freeze("rank0.loop")  # and what it had been allowed is over with the step
    assert wedged(engine.run(BUDGETS.floor_s + 1)) == (EngineReason.RANK_FROZEN, "rank0.loop")


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING])
def test_what_a_start_has_taken_is_not_held_against_the_loop_that_begins(phase):
    engine = Engine()
    engine.started, engine.loading = False, True
    engine.set("rank0.loop", phase=phase)
    engine.freeze("rank0.loop")
    assert not engine.run(5 * BUDGETS.floor_s).is_fatal
    engine.set("rank0.loop", phase=Phase.RECEIVING)
    assert not engine.run(BUDGETS.floor_s - 1).is_fatal
    assert wedged(engine.run(2.0)) == (EngineReason.RANK_FROZEN, "rank0.loop")


def test_every_reason_of_a_wedge_is_in_a_table():
    tabled = {row[2] for row in FROZEN} | {row[2] for row in STALLED} | {Reason.START_STALLED}
    own = {Reason.DRAIN_STALLED, Reason.START_FAILED, Reason.SUPERVISOR_FAILED}  # the supervisor's
    own |= {EngineReason.MEMORY_CORRUPT}  # the leader's last words: tests/engine/test_corruption.py
    deaths = {row[1] for row in DEATHS} | {Reason.THREAD_DEAD} | own
    assert tabled | deaths == {*Reason, *EngineReason, *GatewayReason}


# -- deaths: told at once, whatever the budgets are

DEATHS = [
    (named_death(Exit("rank1", -9)), EngineReason.RANK_DEAD, "rank1"),
    (named_death(Exit("rank0", None, "StepDivergence", "number 7")), EngineReason.STEP_DIVERGENCE, "rank0"),
    (named_death(Exit("leader", -11)), EngineReason.LEADER_DEAD, "leader"),
    (named_death(Exit("sidecar", 5)), EngineReason.SIDECAR_DEAD, "sidecar"),
    (Exit("gateway", 1, GatewayReason.GATEWAY_DEAD), GatewayReason.GATEWAY_DEAD, "gateway"),
    (named_death(Exit("zygote", 1)), EngineReason.ZYGOTE_DEAD, "zygote"),
]


@pytest.mark.parametrize(("gone", "reason", "culprit"), DEATHS)
def test_a_death_is_told_at_the_next_look(gone, reason, culprit):
    engine = Engine()
    engine.exits = (gone,)
    told = engine.run(0.25)
    assert (told.kind, told.reason, told.culprit) == (Kind.DEAD, reason, culprit)
    assert gone.detail in str(told)


@pytest.mark.parametrize("fields", [{"state": State.FAILED}, {"thread": Thread.GONE}])
@pytest.mark.parametrize(
    ("name", "reason"), [("leader.lease", EngineReason.LEASE_THREAD_DEAD), ("sidecar.poller", Reason.THREAD_DEAD)]
)
def test_a_thread_that_ended_in_a_living_process_is_a_death(name, reason, fields):
    engine = Engine()
    engine.set(name, **fields)
    told = engine.run(0.5)  # seen twice
    assert (told.kind, told.reason, told.culprit) == (Kind.DEAD, reason, name)


def test_the_death_of_a_process_counts_before_that_of_its_threads():
    engine = Engine()
    engine.exits = (Exit("leader", -9),)
    engine.set("leader.lease", thread=Thread.GONE)
    assert engine.run(0.25).culprit == "leader"


def test_who_froze_first_is_the_culprit():
    engine = Engine()
    engine.freeze("sidecar.poller")
    engine.run(3)
    engine.freeze("leader.loop")
    assert wedged(engine.run(20)) == (EngineReason.TRANSFER_STALLED, "sidecar.poller")


# -- healthy, whatever it looks like


def test_idle_is_healthy_for_ever():
    assert Engine().run(600) == Verdict(Kind.IDLE)


def test_an_engine_that_holds_leases_is_not_called_idle():
    engine = Engine()
    engine.set("leader.lease", count_b=32)
    assert engine.run(600) == Verdict(Kind.PROGRESSING)


def test_a_step_may_take_its_factor_over_what_it_should_take():
    engine = Engine()
    expected_s = 30.0
    engine.set("leader.loop", pending=1, step=8, expected_ns=int(expected_s * 1e9))
    engine.set("rank0.loop", phase=Phase.DEVICE)
    engine.set("rank0.device", pending=1, expected_ns=0)
    engine.no_ticks.add("rank0.loop")
    engine.no_progress |= {"leader.loop", "rank0.loop", "rank0.device"}
    assert not engine.run(BUDGETS.factor * expected_s).is_fatal
    told = engine.run(1)
    assert wedged(told) == (EngineReason.DEVICE_STUCK, "rank0.device")
    assert told.budget_s == BUDGETS.factor * expected_s


def test_slow_is_told_as_slow():
    engine = Engine()
    engine.set("sidecar.poller", pending=2)
    engine.no_progress.add("sidecar.poller")
    told = engine.run(8)
    assert (told.kind, told.culprit) == (Kind.SLOW, "sidecar.poller")
    engine.no_progress.clear()
    assert engine.run(1).kind is Kind.PROGRESSING


def test_at_capacity_with_a_full_queue_is_progress():
    engine = Engine()
    engine.set("leader.loop", pending=64)
    engine.set("gateway.loop", pending=1000)
    assert engine.run(300).kind is Kind.PROGRESSING


def test_work_that_comes_after_a_long_rest_has_its_whole_budget():
    engine = Engine()
    engine.no_progress.add("leader.loop")
    engine.run(300)
    engine.set("leader.loop", pending=1)
    assert not engine.run(BUDGETS.floor_s).is_fatal


def test_a_thread_of_a_new_life_starts_afresh():
    engine = Engine()
    engine.freeze("sidecar.poller")
    engine.run(BUDGETS.floor_s - 1)
    engine.set("sidecar.poller", pid=999, tid=999)
    assert not engine.run(BUDGETS.floor_s).is_fatal


def test_a_thread_that_is_not_there_yet_or_has_ended_in_order_is_not_missed():
    engine = Engine()
    engine.set("leader.lease", state=State.ABSENT)
    engine.set("gateway.loop", state=State.ENDED, thread=Thread.GONE)
    engine.freeze("leader.lease", "gateway.loop")
    assert engine.run(100).kind is Kind.IDLE


# -- starting


def loading_engine() -> Engine:
    engine = Engine()
    engine.started, engine.loading = False, True
    engine.set("rank0.loop", phase=Phase.LOADING)
    engine.set("leader.loop", phase=Phase.STARTING)
    engine.freeze("rank0.loop", "leader.loop")
    return engine


def test_loading_may_take_as_long_as_it_goes_on():
    assert not loading_engine().run(300).is_fatal


def test_a_start_that_loads_nothing_further_is_named():
    engine = loading_engine()
    engine.run(300)
    engine.loading = False
    engine.set("rank1.loop", state=State.ABSENT)
    assert not engine.run(BUDGETS.start_s).is_fatal
    assert wedged(engine.run(1)) == (Reason.START_STALLED, "rank1.loop")


# -- what is said


def test_the_one_line_names_reason_culprit_phase_age_and_what_waits():
    told = Verdict(Kind.WEDGED, "DeviceStuck", "rank0.device", "device", 31.25, 30.0, 4)
    assert str(told) == "Wedged: DeviceStuck: rank0.device was device for 31.2 s of 30.0 s with 4 pending"
    assert told.as_dict()["verdict"] == "wedged"
    assert told.as_dict()["budget_s"] == 30.0


# -- a start that does not go on: who is it that the others wait for?

BEGUN = {"state": State.RUNNING, "phase": Phase.STARTING}
UNBORN = {"state": State.ABSENT, "phase": Phase.IDLE, "thread": Thread.UNKNOWN, "ticks": 0}
STARTS = {
    "the leader reads weights": ({"leader.loop": BEGUN | {"phase": Phase.LOADING}}, "leader.loop"),
    "the leader has not begun": ({}, "leader.loop"),
    "the sidecar has not begun": ({"leader.loop": BEGUN, "rank0.loop": BEGUN, "rank1.loop": BEGUN}, "sidecar.socket"),
    "the sidecar has begun": (
        {"leader.loop": BEGUN, "sidecar.socket": BEGUN, "rank0.loop": BEGUN | {"phase": Phase.RECEIVING}}
        | {"rank1.loop": BEGUN | {"phase": Phase.RECEIVING}},
        "sidecar.socket",
    ),
    "the sidecar is stopped": (
        {"leader.loop": BEGUN, "rank0.loop": BEGUN, "sidecar.poller": UNBORN | {"thread": Thread.STOPPED}},
        "sidecar.poller",
    ),
    "a rank loads": (
        {"leader.loop": BEGUN, "rank0.loop": BEGUN | {"phase": Phase.LOADING}}
        | {"rank1.loop": BEGUN | {"phase": Phase.RECEIVING}}
        | dict.fromkeys(("leader.lease", "sidecar.socket", "sidecar.poller"), BEGUN | {"phase": Phase.POLLING}),
        "rank0.loop",
    ),
}


@pytest.mark.parametrize(("rows", "culprit"), STARTS.values(), ids=STARTS.keys())
def test_a_start_that_stands_is_put_down_to_whom_the_others_wait_for(rows, culprit):
    watched = engine_rows(Role.DECODE, "nixl", ranks=2)
    readings = {row.name: replace(healthy_rows()[row.name], **UNBORN | rows.get(row.name, {})) for row in watched}
    before = carry(None, Reading(0.0, readings, started=False), watched)
    turned = {name: replace(row, ticks=row.ticks + 1) for name, row in readings.items()}
    after = Reading(BUDGETS.start_s + 1, turned, started=False)
    told = verdict(before, after, BUDGETS, watched)
    assert (told.reason, told.culprit) == (Reason.START_STALLED, culprit)
    assert ("stopped by a signal" in str(told)) == (culprit == "sidecar.poller")
