"""`StepRecord`: the plan of one step, numbered and chained by digest. What the leader sends and every rank executes.

A rank carries a record out in the order of its fields:

    rows_freed, released           rows and records that are not used any more
    reserved, filling, committed   records that begin a life, begin to be filled from elsewhere, are filled
    reopened                       a committed tail page or state becomes writable again
    checks                         closed records whose trailers and bytes are verified before anything reads them
    rows_bound, pages_appended     deltas of the row table
    resumes                        snapshot -> state, before the batch
    work                           the forward pass over these rows
    snapshots                      state -> snapshot, after the batch
    closed                         digest and trailer; the record is immutable from here on

`pulls` are carried out by the transport, not by ranks.
"""

from __future__ import annotations

import hashlib

import msgspec

from sluice_protocol.sampling import Sampling, TokenLogprobs
from sluice_records import RecordKind

CHAIN_BYTES = 16
CHAIN_START = bytes(CHAIN_BYTES)


class Plain(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything that travels between leader and ranks."""


class RecordRef(Plain, frozen=True, array_like=True):
    """One life of one record of the engine's own pools."""

    kind: RecordKind
    record: int
    generation: int


class RowBinding(Plain, frozen=True, array_like=True):
    """Row `row` now runs a sequence whose first `position` tokens are in `state` and `pages` already.

    `history` are all tokens so far, given only when sampling needs them (`Sampling.needs_history`), the first
    `prompt_tokens` of them the prompt. `last_token` is the token to feed when a `RowWork` has none: the last one of a
    sequence that comes from elsewhere; else -1.
    """

    row: int
    state: int
    pages: tuple[int, ...]
    position: int
    sampling: Sampling
    history: tuple[int, ...] = ()
    last_token: int = -1
    prompt_tokens: int = 0


class PageAppend(Plain, frozen=True, array_like=True):
    row: int
    pages: tuple[int, ...]


class RowWork(Plain, frozen=True, array_like=True):
    """`tokens` go in at positions start, start + 1, …; empty: one token, the last that this row sampled.

    `sample`: the last position's logits choose a token, which the rank remembers for the row and reports.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    sample: bool

    @property
    def q_len(self) -> int:
        return len(self.tokens) or 1


class StateCopy(Plain, frozen=True, array_like=True):
    """Window and overlaps between a state and a snapshot record; which way, the field of the step says."""

    state: int
    snapshot: int


class Close(Plain, frozen=True, array_like=True):
    """Write the trailer. `identity` as `record_identity` makes it."""

    ref: RecordRef
    identity: bytes
    valid_tokens: int


class Check(Plain, frozen=True, array_like=True):
    """Verify a closed record: its trailer says this and the digest of its bytes, or it is reported as bad."""

    ref: RecordRef
    identity: bytes
    valid_tokens: int


class PullItem(Plain, frozen=True, array_like=True):
    """One record to read: from the source's record into ours. Identity, digest and generation are what was granted."""

    kind: RecordKind
    source: int
    source_generation: int
    destination: int
    identity: bytes
    digest: int
    valid_tokens: int


class PullSet(Plain, frozen=True, array_like=True):
    """A set of records whose pull this step authorises. `peer` names the source's incarnation."""

    lease_id: str
    peer: str
    items: tuple[PullItem, ...]


class StepRecord(Plain, frozen=True, array_like=True):
    number: int
    rows_freed: tuple[int, ...] = ()
    released: tuple[RecordRef, ...] = ()
    reserved: tuple[RecordRef, ...] = ()
    filling: tuple[RecordRef, ...] = ()
    committed: tuple[RecordRef, ...] = ()
    reopened: tuple[RecordRef, ...] = ()
    checks: tuple[Check, ...] = ()
    rows_bound: tuple[RowBinding, ...] = ()
    pages_appended: tuple[PageAppend, ...] = ()
    resumes: tuple[StateCopy, ...] = ()
    work: tuple[RowWork, ...] = ()
    snapshots: tuple[StateCopy, ...] = ()
    closed: tuple[Close, ...] = ()
    pulls: tuple[PullSet, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to do but to count."""
        return self == StepRecord(self.number)


class SampledRow(Plain, frozen=True, array_like=True):
    """Tokens that a row chose in this step: a list, so that a later multi-token step needs no new format.

    `failed`: why the row has no token to choose; then `tokens` is empty, and the row can only be freed.
    """

    row: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    failed: str = ""


class RecordDigest(Plain, frozen=True, array_like=True):
    ref: RecordRef
    digest: int


class BadRecord(Plain, frozen=True, array_like=True):
    """A closed record of the rank's own pools that is not what was written. `detail` says how it differs."""

    ref: RecordRef
    detail: str


class StepResult(Plain, frozen=True, array_like=True):
    """What a rank reports of a step. `bad`: the step's checks that failed, in this rank's memory. `busy_ns` and
    `check_ns` (of the checks) are for throughput figures; nothing is decided by them on the rank."""

    number: int
    rank: int
    sampled: tuple[SampledRow, ...]
    digests: tuple[RecordDigest, ...] = ()
    busy_ns: int = 0
    bad: tuple[BadRecord, ...] = ()
    check_ns: int = 0


def objection_to(result: StepResult, record: StepRecord) -> str:
    """What `result` has not of all that `record` asked for, or has beside it; empty if it is whole."""
    asked = [work.row for work in record.work if work.sample]
    told = [sampled.row for sampled in result.sampled if sampled.tokens or sampled.failed]
    if told != asked:
        return f"it was asked for tokens of rows {asked}, and has some of {told}"
    closed, digests = [close.ref for close in record.closed], [entry.ref for entry in result.digests]
    if digests != closed:
        return f"it was asked for digests of {closed}, and has some of {digests}"
    asked_checks, bad = {check.ref for check in record.checks}, [entry.ref for entry in result.bad]
    return "" if asked_checks.issuperset(bad) else f"it was to check {asked_checks}, and calls {bad} bad"


class StepDivergence(Exception):
    """A step record that this rank cannot have been meant to execute. Ends the engine, with evidence."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepRecord)


def encode_step(record: StepRecord, previous: bytes) -> tuple[bytes, bytes]:
    """(frame, chain digest): the digest is over `previous` and this record; the frame carries it in front."""
    body = _encoder.encode(record)
    digest = chain_digest(previous, body)
    return digest + body, digest


def decode_step(frame: bytes | memoryview, previous: bytes) -> tuple[StepRecord, bytes]:
    """(record, chain digest). Raises StepDivergence when the digest does not follow from `previous` and the body."""
    view = memoryview(frame)
    told, body = bytes(view[:CHAIN_BYTES]), view[CHAIN_BYTES:]
    digest = chain_digest(previous, body)
    if told != digest:
        raise StepDivergence(f"chain digest is {told.hex()}, but {digest.hex()} follows from the step before")
    try:
        return _decoder.decode(body), digest
    except msgspec.DecodeError as error:
        raise StepDivergence(f"step record does not decode: {error}") from error


def peek_step(frame: bytes) -> StepRecord:
    """The record alone, whatever it follows: for evidence, never for a rank. Raises StepDivergence."""
    try:
        return _decoder.decode(frame[CHAIN_BYTES:])
    except msgspec.DecodeError as error:
        raise StepDivergence(f"step record does not decode: {error}") from error


def chain_digest(previous: bytes, body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=CHAIN_BYTES, key=previous).digest()
