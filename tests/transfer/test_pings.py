"""A lane is tried by one READ that no record gets, posted once a source and polled to its end."""

from __future__ import annotations

from puller_double import PullerRig

from sluice_engine.transfer.memory import Fault
from sluice_engine.transfer.messages import Pinged
from sluice_engine.transfer.pings import PING_S


def reasons(rig: PullerRig) -> list[tuple[str, str]]:
    return [(event.peer, event.reason) for event in rig.of(Pinged)]


def ping(rig: PullerRig, peer: str = "source.1") -> None:
    rig.puller.ping(peer, rig.now)


def test_a_lane_that_works_says_so() -> None:
    rig = PullerRig()
    ping(rig)
    rig.tick(3)
    assert reasons(rig) == [("source.1", "")]
    assert not rig.transfer.landed


def test_a_lane_that_is_cut_fails_by_its_deadline_and_once() -> None:
    rig = PullerRig()
    rig.fault(Fault.HOLD)
    ping(rig)
    rig.tick(3)
    assert reasons(rig) == []
    rig.tick(10, PING_S)
    assert reasons(rig) == [("source.1", "Deadline")]


def test_no_second_read_is_posted_beside_one_that_is_not_done() -> None:
    rig = PullerRig()
    rig.fault(Fault.HOLD)
    for _ in range(3):
        ping(rig)
        rig.tick(2, PING_S)
    assert len(rig.transfer.held()) == 1
    assert reasons(rig) == [("source.1", "Deadline")] * 3
    (handle,) = rig.transfer.held()
    rig.transfer.let_go(handle)
    rig.fault(Fault.NONE)
    rig.tick(3)
    assert rig.transfer.held() == ()
    ping(rig)
    rig.tick(3)
    assert reasons(rig)[-1] == ("source.1", "")


def test_a_source_that_is_not_attached_or_gone_fails_by_name() -> None:
    rig = PullerRig()
    ping(rig, "nobody")
    rig.fault(Fault.HOLD)
    ping(rig)
    rig.tick(2)
    rig.fault(Fault.NONE)
    del rig.fabric.sources["source.1"]
    rig.transfer.let_go(rig.transfer.held()[0])
    rig.tick(2)
    assert reasons(rig) == [("nobody", "PeerLost"), ("source.1", "PeerLost")]


def test_pulls_go_on_beside_a_ping_that_hangs() -> None:
    rig = PullerRig()
    rig.fault(lambda piece: Fault.NONE if piece.runs else Fault.HOLD)
    ping(rig)
    rig.add("lease", (1, 2), (3, 4))
    rig.run()
    assert len(rig.transfer.landed) == 2
    assert rig.puller.num_in_flight == 0
