"""The sources a puller reads from: what their pools look like, how much of each is in flight and still owed."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_engine.transfer.errors import BadPeer, PeerLost
from sluice_engine.transfer.plan import Piece, PoolShape, Shapes
from sluice_protocol.source import SourceHello


@dataclass(slots=True)
class Source:
    shapes: Shapes
    attached: bool = True
    in_flight: int = 0
    # Bytes queued or in flight, over all leases.
    owed_bytes: int = 0


@dataclass(slots=True)
class Sources:
    max_in_flight: int
    _by_name: dict[str, Source] = field(default_factory=dict)

    def attach(self, peer: SourceHello) -> None:
        """Raises BadPeer for a kind of record that does not exist."""
        try:
            shapes = {shape.kind: shape for shape in map(PoolShape.told, peer.pools)}
        except ValueError as error:
            raise BadPeer(f"{peer.incarnation!r}: {error}") from error
        known = self._by_name.setdefault(peer.incarnation, Source(shapes))
        known.attached = True

    def detach(self, name: str) -> None:
        known = self._by_name.get(name)
        if known is not None:
            known.attached = False
            self._tidy(name, known)

    def get(self, name: str) -> Source:
        """Raises PeerLost for one that is not attached."""
        known = self._by_name.get(name)
        if known is None or not known.attached:
            raise PeerLost(f"{name!r} is not attached")
        return known

    def has_room(self, name: str) -> bool:
        known = self._by_name.get(name)
        return known is not None and known.in_flight < self.max_in_flight

    def owe(self, name: str, nbytes: int) -> None:
        """More (or, negative, less) to come from it."""
        known = self._by_name.get(name)
        if known is not None:
            known.owed_bytes += nbytes
            self._tidy(name, known)

    def post(self, piece: Piece) -> None:
        self._by_name[piece.peer].in_flight += 1

    def land(self, piece: Piece) -> None:
        self._by_name[piece.peer].in_flight -= 1
        self.owe(piece.peer, -piece.nbytes)

    def items(self) -> list[tuple[str, Source]]:
        return list(self._by_name.items())

    def _tidy(self, name: str, known: Source) -> None:
        if not known.attached and not known.in_flight and not known.owed_bytes:
            del self._by_name[name]
