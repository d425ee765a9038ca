"""Streams of leases without gRPC: what the lease thread would be to a leader. Tests say what the other end says."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_engine.leader.handoff.ports import StreamEnd
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Refused
from sluice_protocol.source import (
    Complete,
    Fetch,
    Granted,
    GrantedRecord,
    LastWord,
    Pulled,
    RecordName,
    Released,
    SourceHello,
    SourceMessage,
    WantPrefill,
)

HELLO = SourceHello(Fingerprint(()), "i.1", (), "stream", "agent", b"", 77)


@dataclass(eq=False)
class SourceEnd:
    """`SourceStream`: what a source has said on one lease, and how it ended the stream."""

    peer: str = "10.0.0.7"
    hello: SourceHello = HELLO
    said: list[SourceMessage] = field(default_factory=list)
    bytes_of: list[RecordName] = field(default_factory=list)
    ended: StreamEnd | None = None
    detail: str = ""

    def send(self, *messages: SourceMessage) -> None:
        assert self.ended is None, f"{messages} after the end"
        self.said += messages

    def send_bytes(self, names: tuple[RecordName, ...]) -> None:
        self.bytes_of += names

    def end(self, how: StreamEnd = StreamEnd.OK, detail: str = "") -> None:
        self.ended, self.detail = how, detail

    @property
    def granted(self) -> list[GrantedRecord]:
        return [record for message in self.said if isinstance(message, Granted) for record in message.records]

    @property
    def refusals(self) -> list[Refused]:
        return [message for message in self.said if isinstance(message, Refused)]

    @property
    def is_complete(self) -> bool:
        return any(isinstance(message, Complete) for message in self.said)

    @property
    def released(self) -> tuple[RecordName, ...] | None:
        return next((message.records for message in self.said if isinstance(message, Released)), None)


@dataclass(eq=False)
class ReaderEnd:
    """`ReaderStream`: what a reader has said on one lease."""

    lease_id: str
    source: str
    want: WantPrefill
    have_prefix: int
    incarnation: str = "peer"
    quiet_since: float = float("inf")
    said: list[Pulled | Fetch | LastWord] = field(default_factory=list)
    is_over: bool = False
    distrusts: bool = False

    def send(self, message: Pulled | Fetch) -> None:
        assert not self.is_over, f"{message} after the end"
        self.said.append(message)

    def say_last(self, word: LastWord) -> None:
        self.said.append(word)

    def end(self, *, distrust: bool = False) -> None:
        self.is_over, self.distrusts = True, distrust


@dataclass
class Leases:
    """`LeasePort`."""

    streams: list[ReaderEnd] = field(default_factory=list)
    watched: tuple[str, ...] = ()

    def open(self, lease_id: str, source: str, want: WantPrefill, have_prefix: int) -> ReaderEnd:
        self.streams.append(ReaderEnd(lease_id, source, want, have_prefix))
        return self.streams[-1]

    def look_after(self, sources: tuple[str, ...]) -> None:
        self.watched = sources
