"""Messages between a reader and a source of records (`sluice.v1.Source`).

What there are dozens of in a message is a `Struct`: making and comparing it takes a fifth of a dataclass's time.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import SCHEMA_VERSION, Refused
from sluice_protocol.sampling import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Where one pool of the source lies. `base` is an address in the process that owns the transfer agent."""

    kind: str
    format_id: str
    base: int
    stride: int
    record_bytes: int
    num_records: int
    memory: str = "DRAM"


@dataclass(frozen=True, slots=True)
class SourceHello:
    """Metadata flows from source to reader only: a reader never hands out its own."""

    fingerprint: Fingerprint
    incarnation: str
    pools: tuple[PoolInfo, ...]
    transport: str
    agent_name: str
    agent_metadata: bytes
    pid: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class WantPrefill:
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    request_id: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True)
class Open:
    """`have_prefix` counts the leading full pages the reader holds already; `ttl_ms` is relative."""

    lease_id: str
    incarnation: str
    fingerprint: Fingerprint
    want: WantPrefill
    have_prefix: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Pulled:
    pass


class RecordName(Struct, frozen=True):
    """One life of one record of the source."""

    kind: str
    record: int
    generation: int


@dataclass(frozen=True, slots=True)
class Fetch:
    records: tuple[RecordName, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The last word of a reader whose pull failed: these records, as they arrived, are not what was granted. Nothing is
    cleaned up because of it, for a reader may lie."""

    records: tuple[RecordName, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """The last word of a reader whose pull failed otherwise: how many bytes of what was granted had arrived."""

    num_bytes: int


class GrantedRecord(Struct, frozen=True):
    """`identity` and `digest` as in the record's trailer; `index` is the page's place in the sequence (0: a state)."""

    kind: str
    record: int
    generation: int
    identity: bytes
    digest: int
    valid_tokens: int
    index: int

    @property
    def name(self) -> RecordName:
        return RecordName(self.kind, self.record, self.generation)


@dataclass(frozen=True, slots=True)
class LeaseAdmitted:
    """`pid` of the source's leader: evidence for people."""

    pid: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    records: tuple[GrantedRecord, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """`ends`: this token ends the request, so no READ may be posted after it and nothing is committed."""

    token: int
    logprobs: TokenLogprobs | None
    cached_tokens: int
    chunks: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """Totals of everything granted on this lease."""

    num_records: int
    num_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Released:
    """What was held until after the last byte arrived: the reader commits only what is named here."""

    records: tuple[RecordName, ...]


@dataclass(frozen=True, slots=True)
class RecordBytes:
    kind: str
    record: int
    offset: int
    data: bytes


ReaderMessage = Open | Pulled | Fetch | Mismatch | Progress
LastWord = Mismatch | Progress
SourceMessage = LeaseAdmitted | Refused | Granted | FirstToken | Complete | Released | RecordBytes
