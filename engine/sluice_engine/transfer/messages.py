"""What leader and transport sidecar say to each other over their Unix socket, and the events of a puller.

Frames of `sluice_engine.wire`, msgpack inside. The sidecar speaks first (`SidecarHello`).
"""

from __future__ import annotations

import msgspec

from sluice_engine import wire
from sluice_engine.step import PullSet
from sluice_engine.wire import FrameError
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.source import Fetch, PoolInfo, RecordName, SourceHello
from sluice_records import RecordKind


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# -- leader -> sidecar -------------------------------------------------------------------------------------------------


class Attach(Message, frozen=True, array_like=True, tag=True):
    source: SourceHello


class Detach(Message, frozen=True, array_like=True, tag=True):
    peer: str


class Pull(Message, frozen=True, array_like=True, tag=True):
    """Sets of one lease add up until it is stopped or forgotten."""

    pulls: PullSet


class Stop(Message, frozen=True, array_like=True, tag=True):
    """Post nothing more for this lease; `PullsTerminal` follows, always."""

    lease_id: str


class Forget(Message, frozen=True, array_like=True, tag=True):
    """The lease is over: committed, or its `PullsTerminal` was seen. Its id means nothing any more."""

    lease_id: str


class Ping(Message, frozen=True, array_like=True, tag=True):
    """Read one record of this source, whose content does not matter; `Pinged` follows."""

    peer: str


class AskStats(Message, frozen=True, array_like=True, tag=True):
    pass


class Allow(Message, frozen=True, array_like=True, tag=True):
    """Tests only: the poller may post so many pieces more; -1: as many as it likes. Refused without --test-hooks."""

    pieces: int


Command = Attach | Detach | Pull | Stop | Forget | Ping | AskStats | Allow

# -- sidecar -> leader -------------------------------------------------------------------------------------------------


class LaneReport(Message, frozen=True, array_like=True, tag=True):
    """What the start-up self-test measured between two agents of this process.

    `warning`: empty when all is as expected. `lanes`: what UCX could choose from; empty where no UCX is used.
    """

    lane: str
    expected: str
    bytes_per_second: float
    warning: str = ""
    lanes: str = ""


class SidecarHello(Message, frozen=True, array_like=True, tag=True):
    """`agent_metadata` is sealed (`seal.py`) and empty where the sidecar serves no reader."""

    transport: str
    incarnation: str
    agent_name: str
    agent_metadata: bytes
    pools: tuple[PoolInfo, ...]
    pid: int
    lane: LaneReport

    def source_hello(self, fingerprint: Fingerprint) -> SourceHello:
        """What the leader tells readers, word for word: the seal covers it."""
        return SourceHello(
            fingerprint,
            self.incarnation,
            self.pools,
            self.transport,
            self.agent_name,
            self.agent_metadata,
            self.pid,
        )


class Attached(Message, frozen=True, array_like=True, tag=True):
    """Answer to Attach; `reason` is empty when the source's records can be pulled from now on."""

    peer: str
    reason: str = ""
    detail: str = ""


class RecordsDone(Message, frozen=True, array_like=True, tag=True):
    """All items added to the lease so far have arrived and are verified. Totals of the lease."""

    lease_id: str
    num_records: int
    num_bytes: int


class PullFailed(Message, frozen=True, array_like=True, tag=True):
    """The lease will not be done. Nothing more is posted for it; `PullsTerminal` follows. `mismatched`: the source's
    records that arrived and are not what was granted."""

    lease_id: str
    reason: str
    detail: str
    mismatched: tuple[RecordName, ...] = ()


class PullsTerminal(Message, frozen=True, array_like=True, tag=True):
    """Once a lease, after Stop or PullFailed: nothing can land any more, except in the `stranded` records."""

    lease_id: str
    stranded: tuple[tuple[RecordKind, int], ...]


class StrandedEnded(Message, frozen=True, array_like=True, tag=True):
    """A zombie became terminal after all: nothing can land in these records any more."""

    lease_id: str
    records: tuple[tuple[RecordKind, int], ...]


class PeerRefused(Message, frozen=True, array_like=True, tag=True):
    """More is stranded than the cap allows: every lease with this source fails, and new ones do at once."""

    peer: str
    stranded: int
    cap: int


class FenceWanted(Message, frozen=True, array_like=True, tag=True):
    """Still so a while later: kill this sidecar and start another."""

    peer: str
    stranded: int


class Pinged(Message, frozen=True, array_like=True, tag=True):
    """`reason`: empty where the record came, else why it did not."""

    peer: str
    reason: str = ""
    detail: str = ""


class FetchWanted(Message, frozen=True, array_like=True, tag=True):
    """Byte stream only: to be sent on the lease."""

    lease_id: str
    fetch: Fetch


class Stats(Message, frozen=True, array_like=True, tag=True):
    """Counters since the start, and ages of now."""

    counters: dict[str, int]
    poller_turns: int
    leases: int
    in_flight: int
    stranded: int


class Ticked(Message, frozen=True, array_like=True, tag=True):
    """Sent a few times a second: turns of the two loops since the start. A loop that stands still is dead or stuck."""

    socket_turns: int
    poller_turns: int
    in_flight: int


PullEvent = RecordsDone | PullFailed | PullsTerminal | StrandedEnded | PeerRefused | FenceWanted | FetchWanted | Pinged
Report = SidecarHello | Attached | Stats | Ticked | PullEvent


_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode_frame(message: Command | Report) -> bytes:
    return wire.pack(_encoder.encode(message))


def decode_command(body: bytes) -> Command:
    try:
        return _commands.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"not a command: {error}") from error


def decode_report(body: bytes) -> Report:
    try:
        return _reports.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"not a report: {error}") from error


class FrameReader:
    """Cuts a byte stream into frame bodies. Sans-IO."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete now. Raises FrameError for a length that no frame of ours has."""
        self._buffer += data
        return list(wire.split(self._buffer))
