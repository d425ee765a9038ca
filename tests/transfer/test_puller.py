"""The puller: what it says of a lease is true at the moment it says it."""

from __future__ import annotations

import pytest
from puller_double import PullerRig
from transfer_double import PAGE, STATE, same_records

from sluice_engine.pool import Pools
from sluice_engine.transfer.errors import PeerLost
from sluice_engine.transfer.memory import Fault
from sluice_engine.transfer.messages import (
    FenceWanted,
    PeerRefused,
    PullFailed,
    PullsTerminal,
    RecordsDone,
    StrandedEnded,
)
from sluice_engine.transfer.plan import Piece
from sluice_engine.transfer.pull import PullerSettings
from sluice_engine.transfer.puller import IDLE_S
from sluice_engine.transfer.verify import SliceVerifier, ThreadVerifier, Verdict, VerifyLevel, VerifyPolicy
from sluice_records import PoolPlan, Trailer


def test_a_lease_is_done_when_all_that_was_added_has_arrived_and_is_verified() -> None:
    rig = PullerRig()
    rig.add("a", (0, 3), (1, 4), (7, 1))
    rig.run()
    assert rig.events == [RecordsDone("a", 3, 3 * rig.source[PAGE].layout.record_bytes)]
    assert same_records(rig.source, rig.reader, [rig.item(0, 3), rig.item(1, 4), rig.item(7, 1)])
    assert rig.puller.counters["records_digested"] == 3


def test_more_may_be_added_and_totals_add_up() -> None:
    rig = PullerRig()
    rig.add("a", (0, 3))
    rig.run()
    rig.add("a", (1, 4), (2, 5))
    rig.run()
    assert [event.num_records for event in rig.of(RecordsDone)] == [1, 3]


def test_nothing_is_done_while_a_record_is_not_verified() -> None:
    rig = PullerRig(one_record=False)
    rig.add("a", *((n, n) for n in range(20)))
    rig.tick(3)
    assert rig.puller.counters["pieces_done"] == 1
    assert not rig.events
    rig.run()
    assert rig.of(RecordsDone)


def test_a_turn_that_helps_posts_checks_and_ends_a_small_lease_and_leaves_nothing_to_do() -> None:
    """One turn, and no other thread is woken."""
    rig = PullerRig(one_record=False)
    rig.puller._verifier = verifier = ThreadVerifier(rig.reader)
    rig.add("a", (0, 3), (1, 4), (7, 1))
    assert rig.puller.tick(0.0, helping=True) == [RecordsDone("a", 3, 3 * rig.source[PAGE].layout.record_bytes)]
    assert rig.puller.idle_for(0.0) == IDLE_S
    assert verifier._wake.empty()
    verifier.close()


def test_while_something_is_in_flight_the_verifier_checks_what_has_come() -> None:
    """Whoever turns has to look at the READ, which may never end."""
    rig = PullerRig(one_record=False)
    rig.puller._verifier = verifier = ThreadVerifier(rig.reader)
    rig.fault(lambda piece: Fault.HOLD if piece.lease_id == "held" else Fault.NONE)
    rig.add("held", (0, 3))
    rig.add("a", (1, 4), (7, 1))
    rig.events += rig.puller.tick(0.0, helping=True)
    rig.events += rig.puller.tick(0.0, helping=True)
    assert not rig.puller.help_verify()
    verifier.close()
    rig.events += rig.puller.tick(0.0, helping=True)
    assert [event.lease_id for event in rig.of(RecordsDone)] == ["a"]


def test_one_piece_per_lease_and_eight_per_source_are_in_flight() -> None:
    rig = PullerRig(plan=PoolPlan(100, 2, 2))
    rig.attach("source.2")
    rig.fault(Fault.HOLD)
    for n in range(12):
        rig.add(f"a{n}", (n, n), (n, n + 20))
    rig.add("b", (0, 60), (1, 61), peer="source.2")
    rig.tick(40)
    assert rig.puller.num_in_flight == 8 + 1
    assert len({piece.piece.lease_id for piece in rig.transfer._posted.values()}) == 9


def test_leases_take_turns() -> None:
    rig = PullerRig()
    order: list[str] = []

    def note(piece: Piece) -> Fault:
        order.append(piece.lease_id)
        return Fault.NONE

    rig.fault(note)
    for n, lease in enumerate("abc"):
        rig.add(lease, *((k, 10 * n + k) for k in range(6)))
    rig.run()
    assert order == ["a", "b", "c"] * 6


def test_stop_with_nothing_in_flight_is_terminal_at_once() -> None:
    rig = PullerRig()
    rig.puller.allowance = 0
    rig.add("a", (0, 0), (1, 1))
    rig.puller.stop("a", rig.now)
    rig.tick()
    assert rig.events == [PullsTerminal("a", ())]
    rig.puller.allowance = None
    rig.run()
    assert not rig.transfer.landed


def test_stop_waits_for_the_piece_in_flight_and_nothing_lands_after() -> None:
    rig = PullerRig()
    rig.fault(Fault.HOLD)
    rig.add("a", (0, 0), (1, 1))
    rig.tick(2)
    rig.puller.stop("a", rig.now)
    rig.tick(2, 0.2)
    assert not rig.events
    (handle,) = rig.transfer.held()
    rig.transfer.let_go(handle)
    rig.tick()
    assert rig.events == [PullsTerminal("a", ())]
    rig.run()
    assert [piece.completes[0].destination for piece in rig.transfer.landed] == [0]


def test_a_stop_of_an_unknown_lease_is_answered_once() -> None:
    rig = PullerRig()
    rig.puller.stop("a", rig.now)
    rig.puller.stop("a", rig.now)
    rig.add("a", (0, 0))
    rig.run()
    assert rig.events == [PullsTerminal("a", ())]
    assert rig.puller.counters["late_adds"] == 1


def test_a_handle_that_does_not_end_strands_exactly_its_own_records() -> None:
    rig = PullerRig()
    rig.fault(lambda piece: Fault.HOLD if piece.completes[0].destination == 1 else Fault.NONE)
    rig.add("a", (0, 0), (1, 1), (2, 2))
    rig.run()
    rig.puller.stop("a", rig.now)
    rig.tick(3, 0.2)
    assert rig.events == [PullsTerminal("a", ((PAGE, 1),))]
    assert rig.puller.counters["zombies"] == 1
    assert rig.puller.stranded == {(PAGE, 1)}
    # It lands after all, long after: still on the books, and told.
    rig.puller.forget("a", rig.now)
    (handle,) = rig.transfer.held()
    rig.transfer.let_go(handle)
    rig.tick(1, 30.0)
    assert rig.of(StrandedEnded) == [StrandedEnded("a", ((PAGE, 1),))]
    assert not rig.puller.stranded
    assert rig.puller.num_in_flight == 0


def test_zombies_are_polled_at_a_low_rate() -> None:
    rig = PullerRig()
    rig.fault(Fault.DROP)
    rig.add("a", (0, 0))
    rig.tick(2)
    rig.puller.stop("a", rig.now)
    rig.tick(1, 0.6)
    polls = 0
    poll = rig.transfer.poll

    def count(handle: object) -> object:
        nonlocal polls
        polls += 1
        return poll(handle)  # type: ignore[arg-type]

    rig.transfer.poll = count  # type: ignore[assignment, method-assign]
    rig.tick(1000, 0.001)
    assert 15 <= polls <= 21
    assert rig.puller.idle_for(rig.now) == pytest.approx(0.05)


def test_a_stranded_record_is_not_pulled_into() -> None:
    rig = PullerRig()
    rig.fault(Fault.DROP)
    rig.add("a", (0, 0))
    rig.tick(2)
    rig.puller.stop("a", rig.now)
    rig.tick(2, 0.6)
    rig.puller.forget("a", rig.now)
    rig.fault(Fault.NONE)
    rig.add("b", (1, 0))
    rig.add("c", (1, 5))
    rig.run()
    assert [event.reason for event in rig.of(PullFailed, "b")] == ["DuplicateDestination"]
    assert rig.of(RecordsDone, "c")


def test_a_silent_source_fails_the_lease_at_its_deadline() -> None:
    rig = PullerRig()
    rig.fault(Fault.DROP)
    rig.add("a", (0, 0), (1, 1))
    rig.tick(20, 0.2)
    assert not rig.events
    rig.tick(20, 0.2)
    (failed,) = rig.of(PullFailed)
    assert (failed.lease_id, failed.reason) == ("a", "Deadline")
    assert rig.of(PullsTerminal) == [PullsTerminal("a", ((PAGE, 0),))]


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.CORRUPT])
def test_a_failed_or_damaged_piece_fails_the_lease_and_nothing_is_stranded(fault: Fault) -> None:
    rig = PullerRig()
    rig.fault(lambda piece: fault if piece.completes[0].destination == 1 else Fault.NONE)
    rig.add("a", (0, 0), (1, 1), (2, 2))
    rig.add("b", (5, 5))
    rig.run()
    (failed,) = rig.of(PullFailed)
    assert failed.lease_id == "a"
    assert failed.reason == ("TransferFailed" if fault is Fault.FAIL else "DigestMismatch")
    assert rig.of(PullsTerminal) == [PullsTerminal("a", ())]
    assert [event.lease_id for event in rig.of(RecordsDone)] == ["b"]


def test_a_dead_source_fails_its_leases_only() -> None:
    rig = PullerRig()
    rig.attach("source.2")
    rig.fault(Fault.HOLD)
    rig.add("a", (0, 0))
    rig.add("b", (1, 1), peer="source.2")
    rig.tick(3)
    rig.fabric.kill("source.1")
    for handle in rig.transfer.held():
        rig.transfer.let_go(handle)
    rig.run()
    assert [(event.lease_id, event.reason) for event in rig.of(PullFailed)] == [("a", "PeerLost")]
    assert [event.lease_id for event in rig.of(RecordsDone)] == ["b"]
    with pytest.raises(PeerLost):
        rig.puller.attach(rig.transfer._peers["source.1"])


def test_a_detached_source_fails_its_leases_and_later_ones() -> None:
    rig = PullerRig()
    rig.fault(Fault.HOLD)
    rig.add("a", (0, 0), (1, 1))
    rig.tick(2)
    rig.puller.detach("source.1", rig.now)
    rig.add("b", (2, 2))
    rig.tick(1)
    assert [(event.lease_id, event.reason) for event in rig.of(PullFailed)] == [("a", "PeerLost"), ("b", "PeerLost")]
    assert [event.lease_id for event in rig.of(PullsTerminal)] == ["b"]
    for handle in rig.transfer.held():
        rig.transfer.let_go(handle)
    rig.run()
    assert [event.lease_id for event in rig.of(PullsTerminal)] == ["b", "a"]


def test_above_the_cap_the_source_is_refused_and_then_a_fence_is_wanted_once() -> None:
    rig = PullerRig()  # 40 pages: two may be stranded
    rig.attach("source.2")
    rig.fault(lambda piece: Fault.DROP if piece.peer == "source.1" else Fault.NONE)
    for n in range(5):
        rig.add(f"a{n}", (n, n))
    rig.tick(8)
    for n in range(3):
        rig.puller.stop(f"a{n}", rig.now)
    rig.tick(1, 0.6)
    assert rig.of(PeerRefused) == [PeerRefused("source.1", 3, 2)]
    assert {event.reason for event in rig.of(PullFailed)} == {"PeerRefused"}
    assert {event.lease_id for event in rig.of(PullFailed)} == {"a3", "a4"}
    rig.add("late", (9, 9))
    rig.add("b", (8, 8), peer="source.2")
    rig.tick(20, 0.2)
    assert [event.reason for event in rig.of(PullFailed, "late")] == ["PeerRefused"]
    assert rig.of(RecordsDone, "b")
    assert [event.peer for event in rig.of(FenceWanted)] == ["source.1"]
    assert len(rig.of(PullsTerminal)) == 6


def test_a_source_whose_pieces_land_after_all_is_welcome_again() -> None:
    rig = PullerRig()
    rig.fault(Fault.HOLD)
    for n in range(3):
        rig.add(f"a{n}", (n, n))
    rig.tick(5)
    for n in range(3):
        rig.puller.stop(f"a{n}", rig.now)
    rig.tick(1, 0.6)
    assert rig.of(PeerRefused)
    for handle in rig.transfer.held():
        rig.transfer.let_go(handle)
    rig.tick(3, 0.1)
    rig.fault(Fault.NONE)
    rig.add("b", (9, 9))
    rig.tick(20, 0.2)
    assert rig.of(RecordsDone, "b")
    assert not rig.of(FenceWanted)


def _retrail(rig: PullerRig, record: int, **fields: object) -> None:
    old = rig.source[PAGE].trailer(record)
    values = {name: getattr(old, name) for name in ("format_id", "identity", "generation", "valid_tokens", "digest")}
    rig.source[PAGE].write_trailer(record, Trailer(**(values | fields)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("GenerationMismatch", {"generation": 4}),
        ("IdentityMismatch", {"identity": b"another sequence"}),
        ("FormatMismatch", {"format_id": "00" * 16}),
        ("ValidTokensMismatch", {"valid_tokens": 7}),
        ("DigestMismatch", {"digest": 1}),
    ],
)
@pytest.mark.parametrize("level", VerifyLevel)
def test_a_trailer_that_is_not_what_was_granted_is_found_at_every_level(
    reason: str, fields: dict[str, object], level: VerifyLevel
) -> None:
    rig = PullerRig(policy=VerifyPolicy(level, every=1000))
    rig.add("warm", (0, 0))
    rig.run()
    granted = rig.item(5, 5)
    _retrail(rig, 5, **fields)
    rig.puller.add("a", "source.1", [granted], rig.now)
    rig.run()
    assert [event.reason for event in rig.of(PullFailed)] == [reason]
    assert not rig.of(RecordsDone, "a")


def test_a_record_without_a_trailer_of_ours_is_found() -> None:
    rig = PullerRig()
    granted = rig.item(5, 5)
    rig.source[PAGE].record(5)[:] = 0
    rig.puller.add("a", "source.1", [granted], rig.now)
    rig.run()
    assert [event.reason for event in rig.of(PullFailed)] == ["TrailerMismatch"]


@pytest.mark.parametrize("kind", [PAGE, STATE])
def test_a_flipped_payload_bit_is_found_in_full_and_always_in_a_state(kind: object) -> None:
    level = VerifyLevel.FULL if kind is PAGE else VerifyLevel.SAMPLE
    rig = PullerRig(policy=VerifyPolicy(level, every=1000))
    granted = rig.item(5, 5, kind)  # type: ignore[arg-type]
    rig.source[granted.kind].record(5)[100] ^= 1
    rig.puller.add("a", "source.1", [granted], rig.now)
    rig.run()
    assert [event.reason for event in rig.of(PullFailed)] == ["DigestMismatch"]


def test_sampling_digests_every_kth_page_and_says_how_many() -> None:
    rig = PullerRig(policy=VerifyPolicy(VerifyLevel.SAMPLE, every=4))
    rig.add("a", *((n, n) for n in range(12)))
    rig.puller.add("a", "source.1", [rig.item(0, 0, STATE)], rig.now)
    rig.run()
    assert rig.puller.counters["records_verified"] == 13
    assert rig.puller.counters["records_digested"] == 3 + 1


def test_a_large_record_that_spans_pieces_is_verified_after_its_last_byte() -> None:
    rig = PullerRig(settings=PullerSettings(piece_bytes=300))
    rig.add("a", (0, 0), (1, 1))
    rig.run()
    assert rig.puller.counters["pieces_done"] > 4
    assert rig.puller.counters["records_verified"] == 2
    assert rig.of(RecordsDone)


class LazyVerifier(SliceVerifier):
    """Checks what it is helped with, and nothing by itself."""

    def __init__(self, pools: Pools) -> None:
        super().__init__(pools, records_per_call=1)
        self.told: list[Verdict] = []

    def collect(self) -> list[Verdict]:
        told, self.told = self.told, []
        return told

    def help(self) -> bool:
        checked = super().collect()
        self.told += checked
        return bool(checked)


def test_a_caller_that_has_nothing_to_move_may_help_to_verify() -> None:
    rig = PullerRig()
    rig.puller._verifier = LazyVerifier(rig.reader)
    rig.fault(lambda piece: Fault.HOLD if piece.completes[0].destination == 1 else Fault.NONE)
    rig.add("a", (0, 0), (1, 1))
    assert not rig.puller.help_verify()  # there is something to post
    rig.tick(2)
    assert not rig.puller.help_verify()  # there is something to poll
    (handle,) = rig.transfer.held()
    rig.transfer.let_go(handle)
    rig.tick()
    assert not rig.events
    assert [rig.puller.help_verify() for _ in range(3)] == [True, True, False]
    rig.tick()
    assert [event.num_records for event in rig.of(RecordsDone)] == [2]
