"""Rooms on the leader's side: what is granted to readers, what is pulled from sources. No I/O of its own.

The lease thread owns the lease tables and the streams; it is reached through `LeasePort`, the transport through
`TransferPort`. Everything here runs on the leader's loop.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sluice_engine.leader.corruption import RECORD_CORRUPT, TOKENS_SUSPECT
from sluice_engine.leader.lease.granted import fault_of_commit, fault_of_grant
from sluice_engine.leader.lease.pair_health import LANE_REASONS, PairHealth
from sluice_engine.leader.lease.suspicion import Suspicion
from sluice_engine.leader.scheduling.sequence import (
    Aborted,
    EndCause,
    Grant,
    LeaseEnded,
    Mode,
    PullCommitted,
    PullGranted,
    PullsTerminal,
    SequenceSpec,
    Suspected,
)
from sluice_engine.leader.scheduling.state import Plan
from sluice_engine.step import PullSet, RecordRef, StepRecord, StepResult
from sluice_protocol.generate import EndReason, Refused, Route
from sluice_protocol.lease import LeaseEvent
from sluice_protocol.source import (
    Complete,
    FirstToken,
    Granted,
    GrantedRecord,
    LastWord,
    LeaseAdmitted,
    Mismatch,
    Open,
    Progress,
    RecordName,
    SourceHello,
    SourceMessage,
    WantPrefill,
)
from sluice_records import RecordKind
from sluice_runtime import log
from sluice_runtime.tracing import NO_TRACER, Span

if TYPE_CHECKING:
    from sluice_engine.leader.leader import Leader

# The last resort: whoever hangs is named long before by his own supervisor, and a prefill may be slow and healthy.
LEASE_TTL_MS = 3_600_000
# Of each side, in a mirror of fixed size.
MAX_DESCRIBED = 128


class SourceLeasePort(Protocol):
    """One lease at its source, owned by the lease thread."""

    def post(self, event: LeaseEvent, message: SourceMessage | None) -> None:
        """From any thread: a local fact, with the message that goes with it."""
        ...


class LeasePort(Protocol):
    """The lease thread's reader half. Every call is safe from the leader's loop and returns at once."""

    def open_reader(self, sequence: int, lease_id: str, address: str, want: WantPrefill, have_prefix: int) -> None: ...

    def look_after(self, sources: tuple[str, ...]) -> None:
        """Leases of these sources may be wanted: the lane to each is tried now and then from now on."""
        ...

    def reader_event(self, sequence: int, event: LeaseEvent, last_word: LastWord | None = None) -> None:
        """A local fact; with PULL_FAILED goes what the source is told of it."""
        ...


class TransferPort(Protocol):
    """The transport, as `sluice_engine.transfer.link` implements it. Events come back to `Rooms.on_*`."""

    @property
    def is_up(self) -> bool:
        """Whether a pull could be posted just now."""
        ...

    def describe(self) -> dict[str, object]:
        """Its name, process, and the lane that its self-test measured; empty while it is being started."""
        ...

    def attach(self, peer: SourceHello) -> None: ...

    def pull(self, pulls: PullSet) -> bool:
        """False: there is no transport just now, and nothing was posted."""
        ...

    def stop(self, lease_id: str) -> None: ...

    def forget(self, lease_id: str) -> None: ...

    def stream_ended(self, lease_id: str) -> None:
        """No bytes come on the lease any more; of interest to the byte stream only."""
        ...


@dataclass(slots=True)
class SourceRoom:
    spec: SequenceSpec
    port: SourceLeasePort
    ids: dict[str, str] = field(default_factory=dict)
    span: Span = field(default_factory=lambda: NO_TRACER.begin(""))
    granted: int = 0
    granted_bytes: int = 0
    chunks: int = 0
    ended: bool = False
    completed: bool = False
    has_first_token: bool = False
    delayed: list[Grant] = field(default_factory=list)  # until suspect records in them are verified
    peer: str = ""  # the reader's host


@dataclass(slots=True)
class ReaderRoom:
    sequence: int
    lease_id: str
    posted: bool = False  # some pull went to the transport
    stopped: bool = False
    committed: bool = False
    first_token: int = -1
    granted: int = 0
    total: int | None = None  # records, as Complete says
    done: int = 0
    done_bytes: int = 0
    source_pid: int = 0
    chunks: int = 0


class Rooms:
    """Both halves: an engine in role prefill has source rooms, one in role decode reader rooms."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self.pid = os.getpid()
        self.leases: LeasePort | None = None
        self.transfer: TransferPort | None = None
        self.transport_name = leader.spec.transport
        self.sources: dict[int, SourceRoom] = {}
        self.readers: dict[int, ReaderRoom] = {}
        self._by_lease: dict[str, ReaderRoom] = {}
        self._closed: dict[RecordRef, tuple[bytes, int]] = {}  # identity, digest
        self._closing: dict[RecordRef, bytes] = {}
        self.suspicion = Suspicion()
        self._has_delayed = False
        self.pairs = PairHealth()  # by the source's address

    @property
    def can_pull(self) -> bool:
        return self.transfer is None or self.transfer.is_up

    # -- with every step -------------------------------------------------------------------------------------------

    def on_plan(self, planned: Plan) -> None:
        """Before the step record goes out."""
        for ref in planned.record.released:  # maybe closed by a step that is under way
            self._closed.pop(ref, None)
            self._closing.pop(ref, None)
            self.suspicion.forget(ref)
        for close in planned.record.closed:
            self._closing[close.ref] = close.identity
        for sequence, have_prefix in planned.rooms:
            self._open(sequence, have_prefix)
        for sequence in planned.cancelled:
            self.cancel(sequence)

    def pull(self, sets: tuple[PullSet, ...]) -> None:
        """What a step authorises goes to the transport once the ranks have done with all steps before it: until then
        they may still write into these records for whoever had them last."""
        for pulls in sets:
            room = self._by_lease.get(pulls.lease_id)
            if room is None or room.stopped or self.transfer is None:
                continue
            if self.transfer.pull(pulls):
                room.posted = True
            else:
                self.on_failed(room.sequence, "TransportLost", "the decode engine's transport is being started again")

    def on_result(self, planned: Plan, result: StepResult, bad: Collection[RecordRef] = ()) -> None:
        """`bad`: records whose check failed in this step. What was computed from them is ended already."""
        for entry in result.digests:
            if (identity := self._closing.pop(entry.ref, None)) is not None:
                self._closed[entry.ref] = (identity, entry.digest)
        if self.suspicion or self._has_delayed:
            self._end_suspicion(planned.record, bad)
        if not self.sources:
            return
        for sampled in result.sampled:
            room = self.sources.get(planned.rows[sampled.row])
            if room is None or room.ended:
                continue
            if sampled.failed:  # no token to hand over: the lease ends with the reason, and with it the room
                room.ended = True
                room.port.post(LeaseEvent.REFUSED, Refused("BadLogits", sampled.failed))
            else:
                self._first_token(room, sampled.tokens[0], sampled.logprobs[0] if sampled.logprobs else None)
        for grant in planned.grants:
            room = self.sources.get(grant.id)
            if room is not None and not room.ended:
                self._grant(room, grant)

    # -- source ----------------------------------------------------------------------------------------------------

    def open_source(self, opened: Open, port: SourceLeasePort, peer: str = "") -> None:
        """The lease thread asks: may this room begin? `peer`: the reader's host."""
        leader = self._leader
        spec = SequenceSpec(
            leader.loop.next_sequence,
            Mode.SOURCE,
            opened.want.prompt_ids,
            opened.want.output_ids,
            opened.want.sampling,
            opened.have_prefix,
        )
        refused = leader.admit(spec)
        ids = {"request": opened.want.request_id, "lease": opened.lease_id}
        if refused is not None:
            log.info("lease refused", **ids, reason=refused.reason)
            port.post(LeaseEvent.REFUSED, refused)
            return
        tokens = spec.num_tokens
        span = leader.tracer.begin("prefill lease", opened.want.trace_context, **ids, tokens=tokens)
        log.info("lease admitted", **ids, sequence=spec.id, tokens=tokens, have_prefix=opened.have_prefix)
        self.sources[spec.id] = SourceRoom(spec, port, ids, span, peer=peer)
        port.post(LeaseEvent.ADMITTED, LeaseAdmitted(self.pid))

    def reassure(self, port: SourceLeasePort) -> None:
        """The lease thread asks: is it still meant to be granted? Silence says no."""
        room = self._source_of(port)
        if room is not None and not (room.ended or room.completed) and room.spec.id in self._leader.state.sequences:
            port.post(LeaseEvent.GRANTED, Granted(()))

    def on_progress(self, port: SourceLeasePort, progress: Progress) -> None:
        """A reader gives up, and says how far it had come."""
        room = self._source_of(port)
        if room is not None:
            told = {"granted_bytes": room.granted_bytes, "arrived_bytes": progress.num_bytes}
            log.info("a reader's pull failed", **room.ids, peer=room.peer, **told)

    def on_stalled(self, port: SourceLeasePort, budget_s: float) -> None:
        """A completed lease was not pulled in time: its records go back, and who kept them is named."""
        room = self._source_of(port)
        if room is None:
            return
        self._leader.counters["leases_stalled"] += 1
        told = f"{room.peer} has not pulled {room.granted_bytes} bytes within {budget_s:.0f} s"
        log.warning("lease stalled", **room.ids, peer=room.peer, budget_s=budget_s)
        self._leader.marks.say(f"LeaseStalled: {told}")

    def lease_ended(self, port: SourceLeasePort) -> None:
        """The reader's hold is gone, however it went."""
        room = self._source_of(port)
        if room is None:
            return
        room.ended = True
        del self.sources[room.spec.id]
        told = {"granted": room.granted, "bytes": room.granted_bytes, "chunks": room.chunks}
        log.info("lease ended", **room.ids, **told)
        room.span.end("", **told)
        self._leader.tell(LeaseEnded(room.spec.id))

    def _source_of(self, port: SourceLeasePort) -> SourceRoom | None:
        return next((room for room in self.sources.values() if room.port is port), None)

    def refuse_sources(self, reason: str, detail: str) -> None:
        """Their readers are told why, and go elsewhere."""
        for room in self.sources.values():
            if not room.ended:
                room.ended = True
                room.port.post(LeaseEvent.REFUSED, Refused(reason, detail))

    def end_all_sources(self) -> None:
        """A new incarnation: nothing that was granted can be read any more."""
        for room in self.sources.values():
            room.port.post(LeaseEvent.CANCEL, None)

    # -- a reader's mismatch ---------------------------------------------------------------------------------------

    def on_mismatch(self, port: SourceLeasePort, mismatch: Mismatch) -> None:
        """A reader says that records of its lease are not what was granted: verify them here before anybody gets them.
        A reader may lie, so it counts only for what its own lease holds, and no peer may ask for too many checks."""
        room = self._source_of(port)
        sequence = None if room is None else self._leader.state.sequences.get(room.spec.id)
        if room is None or sequence is None:
            return
        named = {(name.kind, name.record, name.generation) for name in mismatch.records}
        refs = tuple(ref for ref in sequence.leased if (ref.kind.value, ref.record, ref.generation) in named)
        leader = self._leader
        leader.counters["mismatches_reported"] += 1
        suspects = self.suspicion.cast(refs, room.peer, leader.state.next_number, leader.clock())
        leader.counters["mismatches_ignored"] += len(suspects) < len(refs)
        if suspects:
            log.warning("a reader reports a mismatch", **room.ids, peer=room.peer, records=len(suspects))
            leader.tell(Suspected(tuple(suspects)))

    def _end_suspicion(self, record: StepRecord, bad: Collection[RecordRef]) -> None:
        """Of records that this step has verified; grants that waited for them go out."""
        suspect_lanes = Counter(self.suspicion.judge(record, bad))
        self._leader.counters["lane_mismatches"] += suspect_lanes.total()
        for peer, records in suspect_lanes.items():
            self._leader.marks.say(
                f"LaneSuspect: {peer} received {records} records otherwise than this engine has them"
            )
        self._has_delayed = False
        for room in list(self.sources.values()):
            delayed, room.delayed = room.delayed, []
            for grant in delayed:
                if not room.ended:
                    self._grant(room, grant)

    def refuse_tainted(self, sequence: int, detail: str, *, has_read: bool) -> None:
        """A source's sequence has a bad record, and may have computed from it: its reader commits nothing of it."""
        room = self.sources.get(sequence)
        if room is None or room.ended:
            return
        reason = TOKENS_SUSPECT if room.has_first_token and has_read else RECORD_CORRUPT
        room.ended = True
        room.port.post(LeaseEvent.REFUSED, Refused(reason, detail))

    def _first_token(self, room: SourceRoom, token: int, logprobs: object) -> None:
        sequence = self._leader.state.sequences[room.spec.id]
        ends = room.spec.limit.end_after(token, 1) is not None
        room.ended, room.has_first_token = ends, True
        room.chunks = sequence.chunks
        room.span.event("first token", chunks=sequence.chunks, cached_tokens=sequence.cached_tokens)
        message = FirstToken(token, logprobs, sequence.cached_tokens, sequence.chunks, ends)  # type: ignore[arg-type]
        room.port.post(LeaseEvent.FIRST_TOKEN_ENDS if ends else LeaseEvent.FIRST_TOKEN, message)

    def _grant(self, room: SourceRoom, grant: Grant) -> None:
        if room.delayed or self.suspicion.rests_on(ref for _, ref, _ in grant.records):
            room.delayed.append(grant)
            self._has_delayed = True
            return
        records, layouts = [], self._leader.resolved.layouts
        for index, ref, valid in grant.records:
            identity, digest = self._closed[ref]
            records.append(GrantedRecord(str(ref.kind), ref.record, ref.generation, identity, digest, valid, index))
            room.granted_bytes += layouts[ref.kind].record_bytes
        room.granted += len(records)
        room.port.post(LeaseEvent.GRANTED, Granted(tuple(records)))
        if grant.final:
            room.completed = True
            total = Complete(room.granted, room.granted_bytes, room.spec.num_tokens)
            room.port.post(LeaseEvent.COMPLETE, total)

    # -- reader ----------------------------------------------------------------------------------------------------

    def _open(self, sequence: int, have_prefix: int) -> None:
        generation = self._leader.generations.get(sequence)
        room = ReaderRoom(sequence, uuid.uuid4().hex)
        self.readers[sequence] = self._by_lease[room.lease_id] = room
        if generation is None or self.leases is None:  # abandoned before its turn came
            self.cancel(sequence)
            return
        spec = generation.spec
        generation.cached_tokens = have_prefix * self._leader.resolved.limits.page_tokens
        want = WantPrefill(spec.prompt, spec.outputs, spec.sampling, generation.request_id, generation.span.context)
        log.info("room opened", request=generation.request_id, lease=room.lease_id, source=generation.source_address)
        generation.span.event("room opened", lease=room.lease_id)
        self.leases.open_reader(sequence, room.lease_id, generation.source_address, want, have_prefix)

    def look_after(self, sources: Iterable[str]) -> None:
        """A gateway may send requests with these sources here: a lane that fails is found before it does."""
        if self.leases is not None:
            self.leases.look_after(tuple(sources))

    def on_granted(self, sequence: int, peer: str, records: tuple[GrantedRecord, ...]) -> None:
        room, state = self.readers.get(sequence), self._leader.state.sequences.get(sequence)
        if room is None or room.stopped or state is None:
            return
        fault = fault_of_grant(self._leader.state, state, records)
        if fault:
            self.on_failed(sequence, "BadSource", fault)
        else:
            room.granted += len(records)
            self._leader.tell(PullGranted(sequence, room.lease_id, peer, records))

    def on_first_token(self, sequence: int, first: FirstToken, source_pid: int) -> None:
        room, generation = self.readers.get(sequence), self._leader.generations.get(sequence)
        if room is None or generation is None or room.stopped:
            return
        if first.token >= self._leader.resolved.limits.vocab_size:
            self.on_failed(sequence, "BadSource", f"its first token is {first.token}, beyond the vocabulary")
            return
        room.first_token, room.source_pid, room.chunks = first.token, source_pid, first.chunks
        generation.cached_tokens = first.cached_tokens
        self._note_route(room)
        generation.span.event("first token", chunks=first.chunks)
        self._leader.requests.publish_first(generation, first.token, first.logprobs)
        if first.ends or generation.end is not None:
            # The request ended with its first token: post no READ, commit nothing.
            self._leader.tell(Aborted(sequence, EndCause.FINISHED))
            self.cancel(sequence)

    def on_complete(self, sequence: int, complete: Complete) -> None:
        room = self.readers.get(sequence)
        if room is None or room.stopped:
            return
        state = self._leader.state.sequences.get(sequence)
        if state is None:
            return
        missing = len(state.pages) - state.num_closed + 1
        if room.first_token < 0:
            self.on_failed(sequence, "BadSource", "it completed without a first token")
        elif not room.granted == complete.num_records == missing:
            told = f"{complete.num_records} said, {room.granted} granted, {missing} needed"
            self.on_failed(sequence, "BadSource", f"it completed with the wrong number of records: {told}")
        else:
            room.total = complete.num_records
            self._check_pulled(room)

    def on_committed(self, sequence: int) -> None:
        """Released came for all that was granted: the records are ours, if they are of this sequence's own tokens."""
        room, state = self.readers.get(sequence), self._leader.state.sequences.get(sequence)
        if room is None or room.stopped or state is None:
            return
        if fault := fault_of_commit(self._leader.state, state):
            self.on_failed(sequence, "BadSource", fault)
            return
        room.committed = True
        self._note_route(room)
        generation = self._leader.generations.get(sequence)
        log.info(
            "room committed",
            request=generation.request_id if generation else "",
            lease=room.lease_id,
            records=room.done,
            bytes=room.done_bytes,
        )
        if generation is not None:
            generation.span.event("room committed", records=room.done, bytes=room.done_bytes)
            self.on_pair(generation.source_address, by_lease=True)
        self._leader.tell(PullCommitted(sequence, room.first_token))
        self._forget(room)

    def on_failed(self, sequence: int, reason: str, detail: str, last_word: LastWord | None = None) -> None:
        """The lease ended before its time: the request needs a new room, which is the gateway's to open."""
        room = self.readers.get(sequence)
        if room is None or room.stopped:
            return
        generation = self._leader.generations.get(sequence)
        request = generation.request_id if generation else ""
        if generation is not None and reason in LANE_REASONS:
            self.on_pair(generation.source_address, reason, detail, by_lease=True)
        log.warning("room failed", request=request, lease=room.lease_id, reason=reason, detail=detail)
        if generation is not None:
            self._leader.requests.end(generation, EndReason.FAILED, reason, detail)
        self._leader.tell(Aborted(sequence, EndCause.FAILED))
        self.cancel(sequence, last_word)

    def on_pair(self, source: str, reason: str = "", detail: str = "", *, by_lease: bool = False) -> None:
        """A lease, or a look (Hello, ping), of this source has succeeded, or has failed for this reason."""
        now = self._leader.clock()
        if reason and self.pairs.failed(source, reason, detail, now, by_lease=by_lease):
            self._leader.counters["pairs_failed"] += 1
            self._leader.marks.say(f"PairFailing: {source}: {reason}: {detail}")
            self._leader.on_pair_change(source, reason, detail)
        elif not reason and self.pairs.succeeded(source, now, by_lease=by_lease):
            self._leader.marks.say(f"PairRecovered: {source}")
            self._leader.on_pair_change(source, "", "")

    def cancel(self, sequence: int, last_word: LastWord | None = None) -> None:
        """No further READ is posted; the sequence's records go back when nothing can land any more. Idempotent."""
        room = self.readers.get(sequence)
        if room is None or room.stopped or room.committed:
            return
        room.stopped = True
        if self.leases is not None:
            event = LeaseEvent.CANCEL if last_word is None else LeaseEvent.PULL_FAILED
            self.leases.reader_event(sequence, event, last_word)
        if room.posted and self.transfer is not None:
            self.transfer.stop(room.lease_id)
            self.transfer.stream_ended(room.lease_id)
        else:
            self._terminal(room, ())

    # -- transport -------------------------------------------------------------------------------------------------

    def on_records_done(self, lease_id: str, num_records: int, num_bytes: int) -> None:
        """All records added so far are here and verified."""
        room = self._by_lease.get(lease_id)
        if room is not None:
            room.done, room.done_bytes = num_records, num_bytes
            self._check_pulled(room)

    def on_pull_failed(self, lease_id: str, reason: str, detail: str, mismatched: tuple[RecordName, ...] = ()) -> None:
        room = self._by_lease.get(lease_id)
        if room is not None:
            last_word = Mismatch(mismatched) if mismatched else Progress(room.done_bytes)
            self.on_failed(room.sequence, reason, detail, last_word)

    def on_pulls_terminal(self, lease_id: str, stranded: tuple[tuple[RecordKind, int], ...]) -> None:
        room = self._by_lease.get(lease_id)
        if room is not None:
            ledger = self._leader.state.ledger
            self._terminal(room, tuple(ledger.ref(kind, record) for kind, record in stranded))

    def on_transport_lost(self) -> None:
        """The transport's process is dead: nothing can land any more, and whatever it was pulling has failed."""
        for room in list(self.readers.values()):
            self.on_failed(room.sequence, "TransportLost", "the transport sidecar of the decode engine died")
        for room in list(self.readers.values()):
            if room.stopped:
                self._terminal(room, ())

    def _check_pulled(self, room: ReaderRoom) -> None:
        if room.total is not None and room.done == room.total and not room.stopped and self.leases is not None:
            self.leases.reader_event(room.sequence, LeaseEvent.PULLS_DONE)
            room.total = None  # said once

    def _terminal(self, room: ReaderRoom, stranded: tuple[RecordRef, ...]) -> None:
        self._leader.tell(PullsTerminal(room.sequence, stranded))
        self._forget(room)

    def _forget(self, room: ReaderRoom) -> None:
        self.readers.pop(room.sequence, None)
        self._by_lease.pop(room.lease_id, None)
        if room.posted and self.transfer is not None:
            self.transfer.forget(room.lease_id)

    def _note_route(self, room: ReaderRoom) -> None:
        generation = self._leader.generations.get(room.sequence)
        if generation is not None:
            generation.route = Route(
                room.source_pid, self.pid, room.done, room.done_bytes, self.transport_name, room.chunks
            )

    def sequence_of(self, lease_id: str) -> int | None:
        room = self._by_lease.get(lease_id)
        return None if room is None else room.sequence

    def describe(self) -> list[dict[str, object]]:
        """Every room, for the mirror: what it holds, what it waits for."""
        granting: list[dict[str, object]] = [
            {"side": "source", "sequence": s, **r.ids, "granted": r.granted, "bytes": r.granted_bytes, "ended": r.ended}
            for s, r in list(self.sources.items())[:MAX_DESCRIBED]
        ]
        reading: list[dict[str, object]] = [
            {
                "side": "reader",
                "sequence": s,
                "lease": r.lease_id,
                "granted": r.granted,
                "total": r.total,
                "done": r.done,
                "bytes": r.done_bytes,
                "state": "committed" if r.committed else "stopped" if r.stopped else "pulling",
                "source_pid": r.source_pid,
            }
            for s, r in list(self.readers.items())[:MAX_DESCRIBED]
        ]
        return granting + reading

    def summary(self) -> Mapping[str, int]:
        return {"source": len(self.sources), "reader": len(self.readers)}

    def describe_transport(self) -> dict[str, object]:
        return self.transfer.describe() if self.transfer is not None else {}
