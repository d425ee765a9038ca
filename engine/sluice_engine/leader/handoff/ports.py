"""What handoffs need of the world: the streams of leases, and the transport. Every call returns at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sluice_engine.step import PullSet
from sluice_protocol.source import (
    Fetch,
    LastWord,
    Pulled,
    ReaderMessage,
    RecordBytes,
    RecordName,
    SourceHello,
    SourceMessage,
    WantPrefill,
)

# The last resort: a process that hangs is named long before by its own supervisor, and a prefill may be slow and well.
LEASE_TTL_MS = 3_600_000
# Handoffs of each side, in a mirror of fixed size.
MAX_DESCRIBED = 128


class StreamEnd(StrEnum):
    """How a source ends a stream."""

    OK = "ok"
    UNKNOWN_MESSAGE = "unknown message"  # UNIMPLEMENTED
    OUT_OF_TIME = "out of time"  # DEADLINE_EXCEEDED


@dataclass(frozen=True, slots=True)
class Why:
    """The reason that a request or a lease ends with, and what it says beside it."""

    reason: str
    detail: str


class SourceStream(Protocol):
    """The stream of one lease at its source. `hello`: what this source said of itself when the stream began; `peer`:
    the reader's host."""

    @property
    def hello(self) -> SourceHello: ...

    @property
    def peer(self) -> str: ...

    def send(self, *messages: SourceMessage) -> None: ...

    def send_bytes(self, names: tuple[RecordName, ...]) -> None:
        """Byte-stream transport: the contents of these records, which the lease holds."""
        ...

    def end(self, how: StreamEnd = StreamEnd.OK, detail: str = "") -> None:
        """After all that was sent."""
        ...


class SourceEar(Protocol):
    """What the streams of a source are heard by, on the leader's loop."""

    def hear(self, stream: SourceStream, messages: Sequence[ReaderMessage]) -> None: ...

    def hear_unknown(self, stream: SourceStream, detail: str) -> None:
        """What came is no message, or of an unknown kind."""
        ...

    def hear_end(self, stream: SourceStream) -> None: ...


class ReaderStream(Protocol):
    """The stream of one lease at its reader."""

    @property
    def incarnation(self) -> str:
        """Of the source; empty until it has said Hello."""
        ...

    @property
    def quiet_since(self) -> float:
        """Seconds, by the monotonic clock: when the source last said something, or was last asked. Infinite until the
        stream is open."""
        ...

    def send(self, message: Pulled | Fetch) -> None: ...

    def say_last(self, word: LastWord) -> None:
        """The last message; `end` follows."""
        ...

    def end(self, *, distrust: bool = False) -> None:
        """`distrust`: the next lease of this source begins with a new Hello."""
        ...


class ReaderEar(Protocol):
    """What the streams of a reader are heard by, on the leader's loop."""

    def hear(self, lease_id: str, messages: Sequence[SourceMessage]) -> None: ...

    def hear_unknown(self, lease_id: str, detail: str) -> None: ...

    def hear_end(self, lease_id: str, why: Why) -> None: ...


class LeasePort(Protocol):
    """The lease thread's half of a reader."""

    def open(self, lease_id: str, source: str, want: WantPrefill, have_prefix: int) -> ReaderStream:
        """`have_prefix`: full pages that the reader holds already. A source that is not known yet says Hello first."""
        ...

    def look_after(self, sources: tuple[str, ...]) -> None:
        """Leases of these sources may be wanted: the lane to each is tried now and then from now on."""
        ...


class TransferPort(Protocol):
    """The transport, as `sluice_engine.transfer.link` implements it. Events come back to `Readers`."""

    @property
    def is_up(self) -> bool:
        """Whether a pull could be posted just now."""
        ...

    def describe(self) -> dict[str, object]:
        """Its name, process, and the lane that its self-test measured; empty while it is being started."""
        ...

    def pull(self, pulls: PullSet) -> bool:
        """False: there is no transport just now, and nothing was posted."""
        ...

    def feed(self, lease_id: str, data: RecordBytes) -> None: ...

    def stop(self, lease_id: str) -> None: ...

    def forget(self, lease_id: str) -> None: ...

    def stream_ended(self, lease_id: str) -> None:
        """No bytes come on the lease any more; of interest to the byte stream only."""
        ...


PairChanged = Callable[[str, str, str], None]
