"""The in-process transport: sources and readers are objects, bytes move when a handle is polled. With fault hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sluice_engine.pool import Pools
from sluice_engine.transfer.contract import DONE, PENDING, Failure, Handle, Outcome
from sluice_engine.transfer.errors import BadPeer, HandleMisuse, PeerLost
from sluice_engine.transfer.plan import Piece
from sluice_protocol.source import SourceHello


class Fault(StrEnum):
    """What happens to a piece. HOLD: nothing moves until `let_go`; DROP: nothing moves, ever, and nothing reports it;
    FAIL: half of the first run moves; CORRUPT: one bit of the first run is flipped on the way."""

    NONE = "none"
    HOLD = "hold"
    DROP = "drop"
    FAIL = "fail"
    CORRUPT = "corrupt"


@dataclass
class MemoryFabric:
    """Pools of the living incarnations."""

    sources: dict[str, Pools] = field(default_factory=dict)

    def serve(self, incarnation: str, pools: Pools) -> None:
        self.sources[incarnation] = pools

    def kill(self, incarnation: str) -> None:
        self.sources.pop(incarnation, None)


@dataclass(slots=True)
class _Posted:
    piece: Piece
    fault: Fault
    outcome: Outcome = PENDING


def no_fault(piece: Piece) -> Fault:
    return Fault.NONE


class MemoryTransfer:
    name = "memory"
    splits_records = True

    def __init__(self, fabric: MemoryFabric, pools: Pools, fault: Callable[[Piece], Fault] = no_fault) -> None:
        self._fabric, self._pools, self.fault = fabric, pools, fault
        self._peers: dict[str, SourceHello] = {}
        self._names: dict[str, str] = {}
        self._posted: dict[Handle, _Posted] = {}
        self._next = 0
        # Everything that ever landed, in order: what tests look at.
        self.landed: list[Piece] = []

    def attach(self, peer: SourceHello) -> None:
        if peer.incarnation not in self._fabric.sources:
            raise PeerLost(f"no source serves {peer.incarnation!r}")
        if self._names.setdefault(peer.agent_name, peer.incarnation) != peer.incarnation:
            raise BadPeer(f"{peer.agent_name!r} was another incarnation's name")
        self._peers[peer.incarnation] = peer

    def detach(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def post(self, piece: Piece) -> Handle:
        if piece.peer not in self._peers:
            raise PeerLost(f"{piece.peer!r} is not attached")
        self._next += 1
        handle = Handle(self._next)
        self._posted[handle] = _Posted(piece, self.fault(piece))
        return handle

    def ping(self, peer: str) -> Handle | None:
        return self.post(Piece("(ping)", peer, (), (), ()))

    def poll(self, handle: Handle) -> Outcome:
        posted = self._get(handle)
        if posted.outcome is PENDING and posted.fault not in (Fault.HOLD, Fault.DROP):
            posted.outcome = self._land(posted)
        return posted.outcome

    def release(self, handle: Handle) -> None:
        if self._get(handle).outcome is PENDING:
            raise HandleMisuse(f"handle {handle} is in flight")
        del self._posted[handle]

    # -- hooks -----------------------------------------------------------------------------------------------------

    def held(self) -> tuple[Handle, ...]:
        return tuple(handle for handle, posted in self._posted.items() if posted.fault is Fault.HOLD)

    def let_go(self, handle: Handle) -> None:
        """The held piece goes on, however late."""
        self._get(handle).fault = Fault.NONE

    # -- inside ----------------------------------------------------------------------------------------------------

    def _get(self, handle: Handle) -> _Posted:
        if handle not in self._posted:
            raise HandleMisuse(f"handle {handle} does not exist")
        return self._posted[handle]

    def _land(self, posted: _Posted) -> Outcome:
        source = self._fabric.sources.get(posted.piece.peer)
        if source is None:
            return Failure("PeerLost", f"{posted.piece.peer!r} is gone")
        if posted.piece.runs:
            self.landed.append(posted.piece)
        for run in posted.piece.runs:
            nbytes = run.nbytes // 2 if posted.fault is Fault.FAIL else run.nbytes
            data = source[run.kind].buffer[run.source : run.source + nbytes]
            self._pools[run.kind].buffer[run.destination : run.destination + nbytes] = data
            if posted.fault is Fault.FAIL:
                break
        if posted.fault is Fault.CORRUPT and posted.piece.runs:
            first = posted.piece.runs[0]
            self._pools[first.kind].buffer[first.destination] ^= 0x10
        if posted.fault is Fault.FAIL:
            return Failure("TransferFailed", "told to fail")
        return DONE
