"""Messages of gateways and the operator to an engine (`sluice.v1.Engine`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.sampling import Sampling, TokenLogprobs

SCHEMA_VERSION = 2
# 1M prompt ids take at most 3 bytes each as varints; records of the stream transport are cut smaller than this.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class EndReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    PREEMPTED = "preempted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineHello:
    """`health_address`: http://HOST:PORT of its supervisor; empty where there is none."""

    role: Role
    fingerprint: Fingerprint
    incarnation: str
    max_context_tokens: int
    page_tokens: int
    source_address: str
    pid: int
    vocab_size: int
    schema_version: int = SCHEMA_VERSION
    health_address: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One try of one choice. `output_ids` are the tokens that earlier tries produced, in order.

    `stream` names it in token batches: the gateway's choice, below 2^32, of no other request of its that runs.
    """

    request_id: str
    gateway_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    source_address: str = ""
    trace_context: str = ""
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """`reason` is a CamelCase constant; `retry_after_ms` 0 means that the same request will be refused again."""

    reason: str
    detail: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """The way a request took: evidence for people. Bytes are record bytes pulled."""

    prefill_pid: int = 0
    decode_pid: int = 0
    records: int = 0
    bytes: int = 0
    transport: str = ""
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """What a Generate call answers at its end. The reader waits until `num_tokens` tokens of it came over Attach."""

    reason: EndReason
    num_tokens: int
    cached_tokens: int = 0
    error: str = ""
    detail: str = ""
    route: Route = Route()


GenerateReply = Refused | Ended


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All tokens of one step for one gateway.

    Row i belongs to stream `streams[i]` and has `counts[i]` tokens; rows follow each other in `tokens`.
    `logprobs` holds (index into tokens, value) for the rows that asked.
    """

    step: int
    streams: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What routing and autoscaling read. Ages in seconds, `step_p95_ms` in milliseconds.

    `empty`: no generation, room, lease or transfer is held. `running_pages`: cache pages of sequences that have a
    token, `reserved_pages`: of those that wait for their first; a page that several share counts for each. `not_ready`:
    as its supervisor says; `quarantined`: for the reason that it is kept for a person to look at. `failing_sources`:
    addresses of sources that this reader cannot take records from at the moment.
    """

    incarnation: str
    running: int
    waiting: int
    max_running: int
    free_pages: int
    total_pages: int
    oldest_waiting_s: float = 0.0
    draining: bool = False
    empty: bool = False
    quarantined: bool = False
    step_p95_ms: float = 0.0
    block_keys: tuple[bytes, ...] = ()
    running_pages: int = 0
    reserved_pages: int = 0
    not_ready: bool = False
    failing_sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drained:
    """How far a drain is. `remaining`: sequences and rooms. `left_ms`: then what still runs is given back, for others
    to go on with."""

    remaining: int
    empty: bool
    left_ms: int
