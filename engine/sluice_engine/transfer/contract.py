"""What a transport does, whatever it is: attach a source, post a piece, poll its handle to the end, release it.

Rules that every implementation keeps and the contract suite checks:

- a handle is terminal once `poll` said DONE or a `Failure`, and stays what it is; after that not one byte of its piece
  lands any more. Until then every byte of it may land at any time: there is no abort;
- only terminal handles are released; anything else raises HandleMisuse;
- `post` raises PeerLost for a peer that is not attached (any more); what goes wrong later is a Failure of the handle;
- a source's name is good for one incarnation: other words under the same name are refused with BadPeer;
- `detach` forbids new posts at once; handles in flight live on until they are terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from sluice_engine.transfer.plan import Piece
from sluice_protocol.source import SourceHello

Handle = NewType("Handle", int)


class Progress(StrEnum):
    PENDING = "pending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Failure:
    """`reason` is one word: the name of an error of this package, or of a mismatch."""

    reason: str
    detail: str


Outcome = Progress | Failure
PENDING, DONE = Progress.PENDING, Progress.DONE


class Transfer(Protocol):
    """`splits_records`: a piece may end inside a record."""

    name: str
    splits_records: bool

    def attach(self, peer: SourceHello) -> None:
        """Make records of this incarnation readable. Twice the same is once. Raises BadPeer, PeerLost."""
        ...

    def post(self, piece: Piece) -> Handle:
        """Start to move it. Raises PeerLost."""
        ...

    def ping(self, peer: str) -> Handle | None:
        """Start to read one record of `peer`, of whatever content, into memory that is no record's. None: records come
        another way, and there is no lane of its own to try. Raises PeerLost."""
        ...

    def poll(self, handle: Handle) -> Outcome: ...

    def release(self, handle: Handle) -> None: ...

    def detach(self, peer: str) -> None:
        """`peer` is an incarnation; an unknown one is ignored."""
        ...
