"""The byte stream on the lease itself: records come as `RecordBytes` messages, asked for with `Fetch`. Sans-IO.

For machines without a NIXL wheel, chosen by configuration, never silently. `Fetch` names whole records, so pieces end
at record ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sluice_engine.pool import Pools
from sluice_engine.transfer.contract import DONE, PENDING, Failure, Handle, Outcome
from sluice_engine.transfer.errors import BadPeer, HandleMisuse, PeerLost, StaleRecord
from sluice_engine.transfer.plan import Piece
from sluice_protocol.source import Fetch, RecordBytes, RecordName, SourceHello
from sluice_records import RecordKind

MESSAGE_BYTES = 1024 * 1024


@dataclass(slots=True)
class _Posted:
    """`left`: bytes still to come per source record; they come in order, record by record or interleaved."""

    piece: Piece
    left: dict[tuple[RecordKind, int], int]
    destinations: dict[tuple[RecordKind, int], int]
    outcome: Outcome = PENDING


class StreamTransfer:
    name = "stream"
    splits_records = False

    def __init__(self, pools: Pools) -> None:
        """`pools`: the destinations, borrowed."""
        self._pools = pools
        self._peers: dict[str, SourceHello] = {}
        self._names: dict[str, str] = {}
        self._posted: dict[Handle, _Posted] = {}
        # The handle in flight of a lease: at most one.
        self._of_lease: dict[str, Handle] = {}
        self._fetches: list[tuple[str, Fetch]] = []
        self._next = 0

    def attach(self, peer: SourceHello) -> None:
        if peer.transport != self.name:
            raise BadPeer(f"{peer.incarnation!r} moves records by {peer.transport!r}, we by {self.name!r}")
        if self._names.setdefault(peer.agent_name, peer.incarnation) != peer.incarnation:
            raise BadPeer(f"{peer.agent_name!r} was another incarnation's name")
        known = self._peers.setdefault(peer.incarnation, peer)
        if known != peer:
            raise BadPeer(f"{peer.incarnation!r} now says something else than at first")

    def detach(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def post(self, piece: Piece) -> Handle:
        if piece.peer not in self._peers:
            raise PeerLost(f"{piece.peer!r} is not attached")
        if piece.lease_id in self._of_lease:
            raise HandleMisuse(f"lease {piece.lease_id!r} has a piece in flight")
        self._next += 1
        handle = Handle(self._next)
        left = {(item.kind, item.source): self._pools[item.kind].layout.record_bytes for item in piece.completes}
        destinations = {(item.kind, item.source): item.destination for item in piece.completes}
        self._posted[handle] = _Posted(piece, left, destinations)
        self._of_lease[piece.lease_id] = handle
        names = (RecordName(item.kind.value, item.source, item.source_generation) for item in piece.completes)
        self._fetches.append((piece.lease_id, Fetch(tuple(names))))
        return handle

    def ping(self, peer: str) -> Handle | None:
        if peer not in self._peers:
            raise PeerLost(f"{peer!r} is not attached")
        return None

    def poll(self, handle: Handle) -> Outcome:
        return self._get(handle).outcome

    def release(self, handle: Handle) -> None:
        posted = self._get(handle)
        if posted.outcome is PENDING:
            raise HandleMisuse(f"handle {handle} is in flight")
        del self._posted[handle]

    # -- the lease's stream ----------------------------------------------------------------------------------------

    def take_fetches(self) -> list[tuple[str, Fetch]]:
        """(lease, message) to send, since the last call."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def feed(self, lease_id: str, data: RecordBytes) -> None:
        """Bytes from the lease's stream. Raises BadPeer, and fails the piece, when they are not what was asked for."""
        handle = self._of_lease.get(lease_id)
        if handle is None:
            raise BadPeer(f"lease {lease_id!r}: bytes that were not asked for")
        posted = self._posted[handle]
        problem = self._write(posted, data)
        if problem:
            self._finish(lease_id, Failure("BadPeer", problem))
            raise BadPeer(f"lease {lease_id!r}: {problem}")
        if not any(posted.left.values()):
            self._finish(lease_id, DONE)

    def end(self, lease_id: str) -> None:
        """The stream is gone: what was in flight on it is terminal."""
        if lease_id in self._of_lease:
            self._finish(lease_id, Failure("PeerLost", f"the stream of lease {lease_id!r} ended"))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _write(self, posted: _Posted, data: RecordBytes) -> str:
        """What is wrong with the message; empty when its bytes are in place."""
        try:
            key = RecordKind(data.kind), data.record
        except ValueError:
            return f"a record of kind {data.kind!r}"
        if key not in posted.left:
            return f"{data.kind} record {data.record} was not asked for"
        layout, left = self._pools[key[0]].layout, posted.left[key]
        expected = layout.record_bytes - left
        if data.offset != expected or not 0 < len(data.data) <= left:
            at = f"{len(data.data)} bytes at {data.offset}"
            return f"{data.kind} record {data.record}: {at}, expected at most {left} at {expected}"
        record = self._pools[key[0]].record(posted.destinations[key])
        record[expected : expected + len(data.data)] = np.frombuffer(data.data, dtype=np.uint8)
        posted.left[key] = left - len(data.data)
        return ""

    def _finish(self, lease_id: str, outcome: Outcome) -> None:
        self._posted[self._of_lease.pop(lease_id)].outcome = outcome

    def _get(self, handle: Handle) -> _Posted:
        if handle not in self._posted:
            raise HandleMisuse(f"handle {handle} does not exist")
        return self._posted[handle]


def read_ranges(
    pools: Pools,
    names: Sequence[RecordName],
    generation_of: Callable[[RecordKind, int], int | None],
    *,
    message_bytes: int = MESSAGE_BYTES,
) -> Iterator[RecordBytes]:
    """The source's side of a `Fetch`: whole records, cut into messages, lazily.

    `generation_of` tells the life that a record lives now (None: none that may be read); it is asked before every
    message is cut, and a copy is taken after. Raises StaleRecord: the lease ends, the bytes sent so far are worthless.
    """
    for name in names:
        try:
            kind = RecordKind(name.kind)
            pool = pools[kind]
            record = pool.record(name.record)
        except (ValueError, KeyError, IndexError) as error:
            raise StaleRecord(f"{name.kind} record {name.record}: {error}") from error
        for start in range(0, len(record), message_bytes):
            living = generation_of(kind, name.record)
            if living != name.generation:
                raise StaleRecord(f"{name.kind} record {name.record}: asked for life {name.generation}, is {living}")
            yield RecordBytes(name.kind, name.record, start, record[start : start + message_bytes].tobytes())
