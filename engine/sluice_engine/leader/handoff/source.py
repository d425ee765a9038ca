"""Handoffs at their source: admits readers, grants records as chunks finish, gives them back. On the leader's loop.

What happens next is the table's (`sluice_protocol.handoff`); this module carries its effects out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from sluice_engine.leader.corruption import RECORD_CORRUPT, TOKENS_SUSPECT
from sluice_engine.leader.handoff.ports import LEASE_TTL_MS, MAX_DESCRIBED, SourceStream, StreamEnd
from sluice_engine.leader.handoff.suspicion import Suspicion
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.scheduling.sequence import Fact, Grant, LeaseEnded, Mode, SequenceSpec, Suspected
from sluice_engine.leader.scheduling.state import Plan
from sluice_engine.leader.step_loop import StepLoop
from sluice_engine.step import RecordRef, SampledRow, StepRecord, StepResult
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Refused
from sluice_protocol.handoff import Handoff, HandoffEffect, HandoffEvent, HandoffProtocolError, HandoffSide
from sluice_protocol.source import (
    Complete,
    Fetch,
    FirstToken,
    Granted,
    GrantedRecord,
    LeaseAdmitted,
    Mismatch,
    Open,
    Progress,
    Pulled,
    ReaderMessage,
    RecordName,
    Released,
    SourceHello,
    SourceMessage,
)
from sluice_runtime import log
from sluice_runtime.tracing import NO_TRACER, Span, Tracer

# While a prompt is computed, its reader hears so often that it still is.
REASSURE_S = 2.0
# What a reader has for a lease that is complete; its own limits are tighter.
PULL_BASE_S, PULL_BYTES_PER_S = 10.0, 10e6

Event, Effect = HandoffEvent, HandoffEffect
_EVENTS: dict[type[ReaderMessage], HandoffEvent] = {
    Open: Event.OPEN,
    Pulled: Event.PULLED,
    Fetch: Event.FETCH,
    Mismatch: Event.MISMATCH,
    Progress: Event.PROGRESS,
}
Payload = ReaderMessage | SourceMessage | str | None


@dataclass(slots=True, eq=False)
class SourceHandoff:
    """`deadline`: seconds, by the leader's clock; `budget_s`: what its reader has for the pull, once that decides it.
    `delayed`: grants that wait until suspect records are verified. `told_at`: when its reader last heard of it."""

    stream: SourceStream
    machine: Handoff = field(default_factory=lambda: Handoff(HandoffSide.SOURCE))
    spec: SequenceSpec | None = None
    ids: dict[str, str] = field(default_factory=dict)
    span: Span = field(default_factory=lambda: NO_TRACER.begin(""))
    granted: list[RecordName] = field(default_factory=list)
    granted_bytes: int = 0
    chunks: int = 0
    has_first_token: bool = False
    delayed: list[Grant] = field(default_factory=list)
    deadline: float = float("inf")
    told_at: float = 0.0
    budget_s: float = 0.0


@dataclass(slots=True)
class ClosedRecords:
    """Identity and digest of every record that is closed. A record that closes with a step that is under way has its
    digest once the step is done."""

    _closed: dict[RecordRef, tuple[bytes, int]] = field(default_factory=dict)
    _closing: dict[RecordRef, bytes] = field(default_factory=dict)

    def on_plan(self, record: StepRecord) -> None:
        for ref in record.released:  # maybe closed by a step that is under way
            self._closed.pop(ref, None)
            self._closing.pop(ref, None)
        for close in record.closed:
            self._closing[close.ref] = close.identity

    def on_result(self, result: StepResult) -> None:
        for entry in result.digests:
            if (identity := self._closing.pop(entry.ref, None)) is not None:
                self._closed[entry.ref] = (identity, entry.digest)

    def __getitem__(self, ref: RecordRef) -> tuple[bytes, int]:
        """(identity, digest)."""
        return self._closed[ref]

    def refs(self) -> set[RecordRef]:
        return self._closed.keys() | self._closing.keys()


class SourceHandoffs:
    """All of one engine. `admit` and `tell` are the leader's; streams are heard by `hear*`."""

    def __init__(
        self,
        loop: StepLoop,
        admit: Callable[[SequenceSpec], Refused | None],
        tell: Callable[[Fact], None],
        clock: Callable[[], float],
        counters: Counter[str],
        marks: LeaderMarks,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._loop, self._admit, self._tell, self._clock = loop, admit, tell, clock
        self._counters, self._marks, self._tracer = counters, marks, tracer
        self._by_stream: dict[SourceStream, SourceHandoff] = {}
        self._by_sequence: dict[int, SourceHandoff] = {}
        self.closed = ClosedRecords()
        self.suspicion = Suspicion()
        self._has_delayed = False

    def __len__(self) -> int:
        return len(self._by_sequence)

    def request_of(self, sequence: int) -> str:
        """The request's id; empty where no lease has this sequence."""
        handoff = self._by_sequence.get(sequence)
        return "" if handoff is None else handoff.ids["request"]

    # -- with every step -------------------------------------------------------------------------------------------

    def on_plan(self, planned: Plan) -> None:
        """Before the step record goes out."""
        self.closed.on_plan(planned.record)
        for ref in planned.record.released:
            self.suspicion.forget(ref)

    def on_result(self, planned: Plan, result: StepResult, bad: Collection[RecordRef] = ()) -> None:
        """`bad`: records whose check failed in this step. What was computed from them is ended already."""
        self.closed.on_result(result)
        if self.suspicion or self._has_delayed:
            self._end_suspicion(planned.record, bad)
        if not self._by_sequence:
            return
        for sampled in result.sampled:
            handoff = self._by_sequence.get(planned.rows[sampled.row])
            if handoff is not None:
                self._sampled(handoff, sampled)
        for grant in planned.grants:
            handoff = self._by_sequence.get(grant.id)
            if handoff is not None:
                self._grant(handoff, grant)

    def _sampled(self, handoff: SourceHandoff, sampled: SampledRow) -> None:
        if sampled.failed:  # there is no token to hand over: the lease ends with the reason
            self._feed(handoff, Event.REFUSED, Refused("BadLogits", sampled.failed))
            return
        assert handoff.spec is not None
        token, logprobs = sampled.tokens[0], sampled.logprobs[0] if sampled.logprobs else None
        sequence = self._loop.state.sequences[handoff.spec.id]
        ends = handoff.spec.limit.end_after(token, 1) is not None
        handoff.chunks, handoff.has_first_token = sequence.chunks, True
        handoff.span.event("first token", chunks=sequence.chunks, cached_tokens=sequence.cached_tokens)
        message = FirstToken(token, logprobs, sequence.cached_tokens, sequence.chunks, ends)
        self._feed(handoff, Event.FIRST_TOKEN_ENDS if ends else Event.FIRST_TOKEN, message)

    def _grant(self, handoff: SourceHandoff, grant: Grant) -> None:
        if handoff.delayed or self.suspicion.rests_on(ref for _, ref, _ in grant.records):
            handoff.delayed.append(grant)
            self._has_delayed = True
            return
        assert handoff.spec is not None
        records, layouts = [], self._loop.state.layouts
        for index, ref, valid in grant.records:
            identity, digest = self.closed[ref]
            records.append(GrantedRecord(str(ref.kind), ref.record, ref.generation, identity, digest, valid, index))
            handoff.granted_bytes += layouts[ref.kind].record_bytes
        handoff.granted += [record.name for record in records]
        self._feed(handoff, Event.GRANTED, Granted(tuple(records)))
        if grant.final:
            total = Complete(len(handoff.granted), handoff.granted_bytes, handoff.spec.num_tokens)
            self._feed(handoff, Event.COMPLETE, total)

    def _end_suspicion(self, record: StepRecord, bad: Collection[RecordRef]) -> None:
        """Of records that this step has verified; grants that waited for them go out."""
        suspect_lanes = Counter(self.suspicion.judge(record, bad))
        self._counters["lane_mismatches"] += suspect_lanes.total()
        for peer, records in suspect_lanes.items():
            self._marks.say(f"LaneSuspect: {peer} received {records} records otherwise than this engine has them")
        self._has_delayed = False
        for handoff in list(self._by_sequence.values()):
            delayed, handoff.delayed = handoff.delayed, []
            for grant in delayed:
                if not handoff.machine.ended:
                    self._grant(handoff, grant)

    # -- what the streams say --------------------------------------------------------------------------------------

    def hear(self, stream: SourceStream, messages: Sequence[ReaderMessage]) -> None:
        for message in messages:
            self._feed(self._of(stream), _EVENTS[type(message)], message)

    def hear_unknown(self, stream: SourceStream, detail: str) -> None:
        self._feed(self._of(stream), Event.UNKNOWN, detail)

    def hear_end(self, stream: SourceStream) -> None:
        handoff = self._by_stream.pop(stream, None)
        if handoff is not None:
            self._feed(handoff, Event.STREAM_ENDED)

    def _of(self, stream: SourceStream) -> SourceHandoff:
        handoff = self._by_stream.get(stream)
        if handoff is None:
            self._counters["source_leases_opened"] += 1
            handoff = self._by_stream[stream] = SourceHandoff(stream)
        return handoff

    # -- what happens here -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """From a timer. Leases whose time is over end; readers whose prompts are computed hear that they still are.
        Silence says no: a leader that has lost a lease says nothing of it."""
        now = self._clock()
        for handoff in list(self._by_sequence.values()):
            if now > handoff.deadline:
                self._feed(handoff, Event.STALLED if handoff.budget_s else Event.TTL)
            elif now - handoff.told_at > REASSURE_S and handoff.machine.expects(Event.GRANTED):
                assert handoff.spec is not None
                if handoff.spec.id in self._loop.state.sequences:
                    self._feed(handoff, Event.GRANTED, Granted(()))

    def refuse_all(self, reason: str, detail: str) -> None:
        """Their readers are told why, and go elsewhere."""
        for handoff in list(self._by_sequence.values()):
            self._feed(handoff, Event.REFUSED, Refused(reason, detail))

    def end_all(self) -> None:
        """A new incarnation: nothing that was granted can be read any more."""
        for handoff in list(self._by_sequence.values()):
            self._feed(handoff, Event.CANCEL)

    def refuse_tainted(self, sequence: int, detail: str, *, has_read: bool) -> None:
        """A sequence has a bad record, and may have computed from it: its reader commits nothing of it."""
        handoff = self._by_sequence.get(sequence)
        if handoff is not None:
            reason = TOKENS_SUSPECT if handoff.has_first_token and has_read else RECORD_CORRUPT
            self._feed(handoff, Event.REFUSED, Refused(reason, detail))

    # -- the machine -----------------------------------------------------------------------------------------------

    def _feed(self, handoff: SourceHandoff, event: HandoffEvent, payload: Payload = None) -> None:
        try:
            effects = handoff.machine.on(event)
        except HandoffProtocolError as error:
            effects, payload = handoff.machine.on(Event.UNKNOWN), str(error)
        for effect in effects:
            self._do(handoff, effect, payload)

    def _do(self, handoff: SourceHandoff, effect: HandoffEffect, payload: Payload) -> None:
        match effect, payload:
            case Effect.DECIDE, Open():
                self._decide(handoff, payload)
            case Effect.SEND_BYTES, Fetch():
                self._send_bytes(handoff, payload)
            case Effect.SEND_RELEASED, _:
                self._send(handoff, Released(tuple(handoff.granted)))
            case Effect.SEND_COMPLETE, Complete():
                self._limit_pull(handoff)
                self._send(handoff, payload)
            case (
                Effect.SEND_ADMITTED | Effect.SEND_REFUSED | Effect.SEND_GRANTED | Effect.SEND_FIRST_TOKEN,
                LeaseAdmitted() | Refused() | Granted() | FirstToken(),
            ):
                self._send(handoff, payload)
            case Effect.SUSPECT, Mismatch():
                self._suspect(handoff, payload)
            case Effect.NOTE_PROGRESS, Progress(num_bytes):
                told = {"granted_bytes": handoff.granted_bytes, "arrived_bytes": num_bytes}
                log.info("a reader's pull failed", **handoff.ids, peer=handoff.stream.peer, **told)
            case Effect.NOTE_STALL, _:
                self._note_stall(handoff)
            case Effect.COUNT_UNKNOWN, _:
                self._counters["unknown_messages"] += 1
            case Effect.END_STREAM, _:
                handoff.stream.end()
            case Effect.REJECT_STREAM, str():
                handoff.stream.end(StreamEnd.UNKNOWN_MESSAGE, f"lease: {payload}")
            case Effect.EXPIRE_STREAM, _:
                budget = f"complete, and not pulled within {handoff.budget_s:.0f} s"
                why = budget if handoff.budget_s else "its ttl ran out"
                handoff.stream.end(StreamEnd.OUT_OF_TIME, f"lease: {why}")
            case Effect.RELEASE_RECORDS, _:
                self._release(handoff)
            case _:
                raise AssertionError(f"{effect} with {payload!r}")

    def _send(self, handoff: SourceHandoff, message: SourceMessage) -> None:
        handoff.told_at = self._clock()
        handoff.stream.send(message)

    def _decide(self, handoff: SourceHandoff, opened: Open) -> None:
        want = opened.want
        spec = SequenceSpec(
            self._loop.next_sequence,
            Mode.SOURCE,
            want.prompt_ids,
            want.output_ids,
            want.sampling,
            opened.have_prefix,
        )
        handoff.ids = {"request": want.request_id, "lease": opened.lease_id}
        refused = objection_to(handoff.stream.hello, opened) or self._admit(spec)
        if refused is not None:
            log.info("lease refused", **handoff.ids, reason=refused.reason)
            self._feed(handoff, Event.REFUSED, refused)
            return
        tokens = spec.num_tokens
        handoff.spec = spec
        handoff.deadline = self._clock() + min(opened.ttl_ms, LEASE_TTL_MS) / 1e3
        handoff.span = self._tracer.begin("prefill lease", want.trace_context, **handoff.ids, tokens=tokens)
        log.info("lease admitted", **handoff.ids, sequence=spec.id, tokens=tokens, have_prefix=opened.have_prefix)
        self._by_sequence[spec.id] = handoff
        self._feed(handoff, Event.ADMITTED, LeaseAdmitted(os.getpid()))

    def _limit_pull(self, handoff: SourceHandoff) -> None:
        """From here on only the reader has something to do. It may be slow, and it may lie: its records are held for as
        long as they take at PULL_BYTES_PER_S, and no longer."""
        budget_s = PULL_BASE_S + handoff.granted_bytes / PULL_BYTES_PER_S
        until = self._clock() + budget_s
        if until < handoff.deadline:
            handoff.deadline, handoff.budget_s = until, budget_s

    def _send_bytes(self, handoff: SourceHandoff, fetch: Fetch) -> None:
        if not set(handoff.granted).issuperset(fetch.records):
            self._feed(handoff, Event.UNKNOWN, "Fetch of what was not granted")
        else:
            handoff.stream.send_bytes(fetch.records)

    def _suspect(self, handoff: SourceHandoff, mismatch: Mismatch) -> None:
        """A reader says that records of its lease are not what was granted: verify them here before they are granted
        again. A reader may lie, so it counts only for what its own lease holds, and no peer may ask for too many
        checks."""
        sequence = None if handoff.spec is None else self._loop.state.sequences.get(handoff.spec.id)
        if sequence is None:
            return
        named = {(name.kind, name.record, name.generation) for name in mismatch.records}
        refs = tuple(ref for ref in sequence.leased if (ref.kind.value, ref.record, ref.generation) in named)
        self._counters["mismatches_reported"] += 1
        peer = handoff.stream.peer
        suspects = self.suspicion.cast(refs, peer, self._loop.state.next_number, self._clock())
        self._counters["mismatches_ignored"] += len(suspects) < len(refs)
        if suspects:
            log.warning("a reader reports a mismatch", **handoff.ids, peer=peer, records=len(suspects))
            self._tell(Suspected(tuple(suspects)))

    def _note_stall(self, handoff: SourceHandoff) -> None:
        self._counters["leases_stalled"] += 1
        peer, budget_s = handoff.stream.peer, handoff.budget_s
        told = f"{peer} has not pulled {handoff.granted_bytes} bytes within {budget_s:.0f} s"
        log.warning("lease stalled", **handoff.ids, peer=peer, budget_s=budget_s)
        self._marks.say(f"LeaseStalled: {told}")

    def _release(self, handoff: SourceHandoff) -> None:
        """The reader's hold is gone, however it went."""
        assert handoff.spec is not None
        del self._by_sequence[handoff.spec.id]
        told = {"granted": len(handoff.granted), "bytes": handoff.granted_bytes, "chunks": handoff.chunks}
        log.info("lease ended", **handoff.ids, **told)
        handoff.span.end("", **told)
        self._tell(LeaseEnded(handoff.spec.id))

    def describe(self) -> list[dict[str, object]]:
        """Every handoff, for the mirror."""
        return [
            {
                "side": "source",
                "sequence": sequence,
                **handoff.ids,
                "granted": len(handoff.granted),
                "bytes": handoff.granted_bytes,
                "state": handoff.machine.state.value,
            }
            for sequence, handoff in list(self._by_sequence.items())[:MAX_DESCRIBED]
        ]


def objection_to(mine: SourceHello, opened: Open) -> Refused | None:
    """Why a reader with this Open cannot read from this source, whatever it wants."""
    refused = compare(mine, opened.fingerprint)
    if refused is None and opened.incarnation != mine.incarnation:
        detail = f"{opened.incarnation} is gone, {mine.incarnation} is here: say Hello"
        return Refused("IncarnationChanged", detail, 1)
    return refused


def compare(mine: SourceHello, fingerprint: Fingerprint) -> Refused | None:
    """Names the fields that differ."""
    names = mine.fingerprint.differences(fingerprint)
    if not names:
        return None
    theirs, ours = fingerprint.as_dict(), mine.fingerprint.as_dict()
    detail = "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in names)
    return Refused("FingerprintMismatch", detail)
