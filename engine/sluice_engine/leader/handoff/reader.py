"""Handoffs at their reader: opens leases, pulls what is granted, commits it. On the leader's loop.

What happens next is the table's (`sluice_protocol.handoff`); this module finds out which event a message is, and
carries the effects out.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.handoff.granted import fault_of_commit, fault_of_grant
from sluice_engine.leader.handoff.pair_health import LANE_REASONS, PairHealth
from sluice_engine.leader.handoff.ports import (
    MAX_DESCRIBED,
    LeasePort,
    PairChanged,
    ReaderStream,
    TransferPort,
    Why,
)
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.requests import Requests
from sluice_engine.leader.scheduling.sequence import (
    Aborted,
    EndCause,
    Fact,
    PullCommitted,
    PullGranted,
    PullsTerminal,
)
from sluice_engine.leader.scheduling.state import Plan
from sluice_engine.leader.step_loop import StepLoop
from sluice_engine.step import PullSet, RecordRef
from sluice_protocol.generate import EndReason, Refused, Route
from sluice_protocol.handoff import (
    Handoff,
    HandoffEffect,
    HandoffEvent,
    HandoffProtocolError,
    HandoffSide,
    HandoffState,
)
from sluice_protocol.source import (
    Complete,
    Fetch,
    FirstToken,
    Granted,
    LastWord,
    LeaseAdmitted,
    Mismatch,
    Progress,
    Pulled,
    RecordBytes,
    RecordName,
    Released,
    SourceMessage,
    WantPrefill,
)
from sluice_records import RecordKind
from sluice_runtime import log

# A source answers an Open and a Pulled at once, whatever it computes; one that does not will not be waited for.
MIN_ANSWER_S = 5.0
# One that computes says now and then that it still means to, if only by a Granted of nothing.
MIN_SILENT_S = 10.0
SOURCE_SILENT = "SourceSilent"

Event, Effect, State = HandoffEvent, HandoffEffect, HandoffState
_EVENTS: dict[type[SourceMessage], HandoffEvent] = {
    LeaseAdmitted: Event.ADMITTED,
    Refused: Event.REFUSED,
    Granted: Event.GRANTED,
    FirstToken: Event.FIRST_TOKEN,
    Complete: Event.COMPLETE,
    Released: Event.RELEASED,
    RecordBytes: Event.BYTES,
}
_AWAITED = {State.OPENED: "answered Open", State.RELEASING: "answered Pulled", State.GRANTING: "said anything of it"}


@dataclass(frozen=True, slots=True)
class _Failure(Why):
    """Of a pull, with what the source is told of it."""

    last_word: LastWord | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the source is asked for. `have_prefix`: full pages that are here already."""

    want: WantPrefill
    have_prefix: int


@dataclass(frozen=True, slots=True)
class _Stranded:
    """Records in which a READ may still land."""

    refs: tuple[RecordRef, ...] = ()


Payload = SourceMessage | Why | _Asked | _Stranded | None


@dataclass(slots=True, eq=False)
class ReaderHandoff:
    """`posted`: some pull went to the transport. `done`: of the granted records, those that are here and verified.
    `late`: looks in a row that found its source silent."""

    sequence: int
    lease_id: str
    source: str
    machine: Handoff = field(default_factory=lambda: Handoff(HandoffSide.READER))
    stream: ReaderStream | None = None
    granted: list[RecordName] = field(default_factory=list)
    first_token: int = -1
    done: int = 0
    done_bytes: int = 0
    posted: bool = False
    source_pid: int = 0
    chunks: int = 0
    late: int = 0


class ReaderHandoffs:
    """All of one engine. `tell` is the leader's; streams are heard by `hear*`, the transport by `on_*`."""

    def __init__(
        self,
        loop: StepLoop,
        requests: Requests,
        tell: Callable[[Fact], None],
        clock: Callable[[], float],
        counters: Counter[str],
        marks: LeaderMarks,
        transport_name: str = "",
        on_pair_change: PairChanged = lambda source, reason, detail: None,
    ) -> None:
        self._loop, self._requests, self._tell, self._clock = loop, requests, tell, clock
        self._counters, self._marks, self._on_pair_change = counters, marks, on_pair_change
        self._transport_name = transport_name
        self._pid = os.getpid()
        self.leases: LeasePort | None = None
        self.transfer: TransferPort | None = None
        # How long a source may say nothing where it has to answer, and while it computes. Seconds.
        self.answer_s, self.silent_s = MIN_ANSWER_S, MIN_SILENT_S
        self._by_sequence: dict[int, ReaderHandoff] = {}
        self._by_lease: dict[str, ReaderHandoff] = {}
        self.pairs = PairHealth()  # by the source's address

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._by_sequence

    @property
    def can_pull(self) -> bool:
        return self.transfer is None or self.transfer.is_up

    def look_after(self, sources: Iterable[str]) -> None:
        """A gateway may send requests with these sources here: a lane that fails is found before it does."""
        if self.leases is not None:
            self.leases.look_after(tuple(sources))

    # -- with every step -------------------------------------------------------------------------------------------

    def on_plan(self, planned: Plan) -> None:
        """Before the step record goes out."""
        for sequence, have_prefix in planned.rooms:
            self._open(sequence, have_prefix)
        for sequence in planned.cancelled:
            self.cancel(sequence)

    def _open(self, sequence: int, have_prefix: int) -> None:
        generation = self._loop.generations.get(sequence)
        source = "" if generation is None else generation.source_address
        handoff = ReaderHandoff(sequence, uuid.uuid4().hex, source)
        self._by_sequence[sequence] = self._by_lease[handoff.lease_id] = handoff
        if generation is None or self.leases is None:  # abandoned before its turn came
            self._feed(handoff, Event.CANCEL)
            return
        generation.cached_tokens = have_prefix * self._loop.state.limits.page_tokens
        log.info("room opened", request=generation.request_id, lease=handoff.lease_id, source=source)
        generation.span.event("room opened", lease=handoff.lease_id)
        spec = generation.spec
        want = WantPrefill(spec.prompt, spec.outputs, spec.sampling, generation.request_id, generation.span.context)
        self._feed(handoff, Event.OPEN, _Asked(want, have_prefix))

    def pull(self, sets: Iterable[PullSet]) -> None:
        """What a step authorised goes to the transport, now that the ranks have finished all steps before it."""
        for pulls in sets:
            handoff = self._by_lease.get(pulls.lease_id)
            if handoff is None or handoff.machine.is_stream_over or self.transfer is None:
                continue
            if self.transfer.pull(pulls):
                handoff.posted = True
            else:
                why = "the decode engine's transport is being started again"
                self._feed(handoff, Event.PULL_FAILED, _Failure("TransportLost", why))

    def look(self) -> None:
        """From a timer: sources that say nothing. A process that was stopped has not read yet what has come meanwhile:
        a source is silent when two looks in a row find it so."""
        now = self._clock()
        for handoff in list(self._by_sequence.values()):
            state, stream = handoff.machine.state, handoff.stream
            patience_s = self.silent_s if state is State.GRANTING else self.answer_s
            if stream is None or state not in _AWAITED or now - stream.quiet_since <= patience_s:
                handoff.late = 0
            elif handoff.late:
                why = f"the source has not {_AWAITED[state]} for {patience_s:.0f} s"
                self._feed(handoff, Event.SILENT, Why(SOURCE_SILENT, why))
            else:
                handoff.late += 1

    # -- what the streams say --------------------------------------------------------------------------------------

    def hear(self, lease_id: str, messages: Sequence[SourceMessage]) -> None:
        handoff = self._by_lease.get(lease_id)
        if handoff is None:
            return
        for message in messages:
            if isinstance(message, LeaseAdmitted):
                handoff.source_pid = message.pid
            event = _EVENTS[type(message)]
            # A message that the table does not know here is told by its event alone.
            fault = self._fault_of(handoff, message) if handoff.machine.expects(event) else None
            if fault is not None:
                self._feed(handoff, Event.BAD_WORD, fault)
            elif isinstance(message, FirstToken) and (message.ends or self._is_last(handoff, message.token)):
                self._feed(handoff, Event.FIRST_TOKEN_ENDS, message)
            else:
                self._feed(handoff, event, message)

    def hear_unknown(self, lease_id: str, detail: str) -> None:
        if (handoff := self._by_lease.get(lease_id)) is not None:
            self._feed(handoff, Event.UNKNOWN, Why("UnknownMessage", detail))

    def hear_end(self, lease_id: str, why: Why) -> None:
        if (handoff := self._by_lease.get(lease_id)) is not None:
            self._feed(handoff, Event.STREAM_ENDED, why)

    def _fault_of(self, handoff: ReaderHandoff, message: SourceMessage) -> Why | None:
        """What does not fit this request: the source is not to be believed."""
        sequence = self._loop.state.sequences.get(handoff.sequence)
        if sequence is None:
            return None
        match message:
            case Granted(records):
                fault = fault_of_grant(self._loop.state, sequence, records)
            case FirstToken(token) if token >= self._loop.state.limits.vocab_size:
                fault = f"its first token is {token}, beyond the vocabulary"
            case FirstToken(token, ends=True) if not self._is_last(handoff, token):
                fault = f"it calls its first token {token} the last, and this request has more to come"
            case Complete(num_records):
                missing = len(sequence.pages) - sequence.num_closed + 1
                fault = ""
                if handoff.first_token < 0:
                    fault = "it completed without a first token"
                elif not len(handoff.granted) == num_records == missing:
                    told = f"{num_records} said, {len(handoff.granted)} granted, {missing} needed"
                    fault = f"it completed with the wrong number of records: {told}"
            case Released(names):
                # Only what was still held after the last byte, in the very generations that were granted.
                if set(names) != set(handoff.granted):
                    return Why("GenerationMismatch", "Released does not name what was granted")
                fault = fault_of_commit(self._loop.state, sequence)
            case _:
                return None
        return Why("BadSource", fault) if fault else None

    def _is_last(self, handoff: ReaderHandoff, token: int) -> bool:
        """Whether this first token ends the request, by the rule that source, reader and gateway share."""
        sequence = self._loop.state.sequences.get(handoff.sequence)
        return sequence is not None and sequence.limit.end_after(token, 1) is not None

    # -- what the transport says -----------------------------------------------------------------------------------

    def on_records_done(self, lease_id: str, num_records: int, num_bytes: int) -> None:
        """All records added so far are here and verified."""
        handoff = self._by_lease.get(lease_id)
        if handoff is not None:
            handoff.done, handoff.done_bytes = num_records, num_bytes
            self._check_done(handoff)

    def on_pull_failed(self, lease_id: str, reason: str, detail: str, mismatched: tuple[RecordName, ...] = ()) -> None:
        handoff = self._by_lease.get(lease_id)
        if handoff is not None:
            last_word = Mismatch(mismatched) if mismatched else Progress(handoff.done_bytes)
            self._feed(handoff, Event.PULL_FAILED, _Failure(reason, detail, last_word))

    def on_pulls_terminal(self, lease_id: str, stranded: tuple[tuple[RecordKind, int], ...]) -> None:
        handoff = self._by_lease.get(lease_id)
        if handoff is not None:
            ledger = self._loop.state.ledger
            refs = tuple(ledger.ref(kind, record) for kind, record in stranded)
            self._feed(handoff, Event.PULLS_TERMINAL, _Stranded(refs))

    def on_fetch_wanted(self, lease_id: str, fetch: Fetch) -> None:
        """Byte-stream transport: asked for on the lease itself."""
        handoff = self._by_lease.get(lease_id)
        if handoff is not None and handoff.stream is not None and not handoff.machine.is_stream_over:
            handoff.stream.send(fetch)

    def on_transport_lost(self) -> None:
        """The transport's process is dead: nothing can land any more, and whatever it was pulling has failed."""
        lost = _Failure("TransportLost", "the transport sidecar of the decode engine died")
        for handoff in list(self._by_sequence.values()):
            self._feed(handoff, Event.PULL_FAILED, lost)
            self._feed(handoff, Event.PULLS_TERMINAL, _Stranded())

    def on_pair(self, source: str, reason: str = "", detail: str = "", *, by_lease: bool = False) -> None:
        """A lease, or a look (Hello, ping), of this source has succeeded, or has failed for this reason."""
        now = self._clock()
        if reason and self.pairs.failed(source, reason, detail, now, by_lease=by_lease):
            self._counters["pairs_failed"] += 1
            self._marks.say(f"PairFailing: {source}: {reason}: {detail}")
            self._on_pair_change(source, reason, detail)
        elif not reason and self.pairs.succeeded(source, now, by_lease=by_lease):
            self._marks.say(f"PairRecovered: {source}")
            self._on_pair_change(source, "", "")

    # -- what happens here -----------------------------------------------------------------------------------------

    def cancel(self, sequence: int) -> None:
        """No further READ is posted; the sequence's records go back when nothing can land any more. Idempotent."""
        handoff = self._by_sequence.get(sequence)
        if handoff is not None:
            self._feed(handoff, Event.CANCEL)

    def fail(self, sequence: int, reason: str, detail: str) -> None:
        """A record that this sequence rests on is bad: its request ends with the reason."""
        handoff = self._by_sequence.get(sequence)
        if handoff is not None:
            self._feed(handoff, Event.PULL_FAILED, _Failure(reason, detail))

    # -- the machine -----------------------------------------------------------------------------------------------

    def _feed(self, handoff: ReaderHandoff, event: HandoffEvent, payload: Payload = None) -> None:
        try:
            effects = handoff.machine.on(event)
        except HandoffProtocolError as error:
            effects, payload = handoff.machine.on(Event.UNKNOWN), Why("LeaseProtocolError", str(error))
        for effect in effects:
            self._do(handoff, effect, payload)
        if event is Event.COMPLETE:
            self._check_done(handoff)

    def _do(self, handoff: ReaderHandoff, effect: HandoffEffect, payload: Payload) -> None:
        match effect, payload:
            case Effect.SEND_OPEN, _Asked(want, have_prefix):
                if self.leases is not None:
                    handoff.stream = self.leases.open(handoff.lease_id, handoff.source, want, have_prefix)
            case Effect.AUTHORISE_PULL, Granted(records):
                self._authorise(handoff, payload) if records else None
            case Effect.FEED_BYTES, RecordBytes():
                if self.transfer is not None:
                    self.transfer.feed(handoff.lease_id, payload)
            case Effect.PUBLISH_TOKEN, FirstToken():
                self._publish(handoff, payload)
            case Effect.FINISH_REQUEST, _:
                self._tell(Aborted(handoff.sequence, EndCause.FINISHED))
            case Effect.SEND_PULLED, _:
                if handoff.stream is not None:
                    handoff.stream.send(Pulled())
            case Effect.COMMIT, _:
                self._commit(handoff)
            case Effect.FAIL_REQUEST, Refused() | Why():
                self._fail(handoff, payload.reason, payload.detail)
            case Effect.SEND_LAST_WORD, _Failure(last_word=word):
                if handoff.stream is not None and word is not None:
                    handoff.stream.say_last(word)
            case Effect.END_STREAM, _:
                if handoff.stream is not None:
                    handoff.stream.end(distrust=isinstance(payload, Why) and payload.reason == SOURCE_SILENT)
            case Effect.STOP_PULLING, _:
                self._stop_pulling(handoff)
            case Effect.FREE_RECORDS, _:
                refs = payload.refs if isinstance(payload, _Stranded) else ()
                self._tell(PullsTerminal(handoff.sequence, refs))
                self._forget(handoff)
            case Effect.COUNT_UNKNOWN, _:
                self._counters["unknown_messages"] += 1
            case _:
                raise AssertionError(f"{effect} with {payload!r}")

    def _authorise(self, handoff: ReaderHandoff, granted: Granted) -> None:
        assert handoff.stream is not None
        handoff.granted += [record.name for record in granted.records]
        peer = handoff.stream.incarnation
        self._tell(PullGranted(handoff.sequence, handoff.lease_id, peer, granted.records))

    def _publish(self, handoff: ReaderHandoff, first: FirstToken) -> None:
        handoff.first_token, handoff.chunks = first.token, first.chunks
        generation = self._note_route(handoff)
        if generation is not None:
            generation.cached_tokens = first.cached_tokens
            generation.span.event("first token", chunks=first.chunks)
            self._requests.publish_first(generation, first.token, first.logprobs)

    def _check_done(self, handoff: ReaderHandoff) -> None:
        if handoff.machine.expects(Event.PULLS_DONE) and handoff.done == len(handoff.granted):
            self._feed(handoff, Event.PULLS_DONE)

    def _commit(self, handoff: ReaderHandoff) -> None:
        """Released came for all that was granted: the records are this sequence's own."""
        generation = self._note_route(handoff)
        told = {"records": handoff.done, "bytes": handoff.done_bytes}
        log.info(
            "room committed",
            request=generation.request_id if generation else "",
            lease=handoff.lease_id,
            **told,
        )
        if generation is not None:
            generation.span.event("room committed", **told)
        self.on_pair(handoff.source, by_lease=True)
        self._tell(PullCommitted(handoff.sequence, handoff.first_token))
        self._forget(handoff)

    def _fail(self, handoff: ReaderHandoff, reason: str, detail: str) -> None:
        """The lease ended before its time: the request needs a new one, which is the gateway's to ask for."""
        generation = self._loop.generations.get(handoff.sequence)
        request = generation.request_id if generation else ""
        if generation is not None and reason in LANE_REASONS:
            self.on_pair(handoff.source, reason, detail, by_lease=True)
        log.warning("room failed", request=request, lease=handoff.lease_id, reason=reason, detail=detail)
        if generation is not None:
            self._requests.end(generation, EndReason.FAILED, reason, detail)
        self._tell(Aborted(handoff.sequence, EndCause.FAILED))

    def _stop_pulling(self, handoff: ReaderHandoff) -> None:
        if handoff.posted and self.transfer is not None:
            self.transfer.stop(handoff.lease_id)
            self.transfer.stream_ended(handoff.lease_id)
        else:
            self._feed(handoff, Event.PULLS_TERMINAL, _Stranded())

    def _forget(self, handoff: ReaderHandoff) -> None:
        self._by_sequence.pop(handoff.sequence, None)
        self._by_lease.pop(handoff.lease_id, None)
        if handoff.posted and self.transfer is not None:
            self.transfer.forget(handoff.lease_id)

    def _note_route(self, handoff: ReaderHandoff) -> Generation | None:
        """The request of this handoff, which hears how its records came."""
        generation = self._loop.generations.get(handoff.sequence)
        if generation is not None:
            told = (handoff.done, handoff.done_bytes, self._transport_name, handoff.chunks)
            generation.route = Route(handoff.source_pid, self._pid, *told)
        return generation

    # -- what others read ------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, object]]:
        """Every handoff, for the mirror: what it holds, what it waits for."""
        return [
            {
                "side": "reader",
                "sequence": sequence,
                "lease": handoff.lease_id,
                "granted": len(handoff.granted),
                "done": handoff.done,
                "bytes": handoff.done_bytes,
                "state": handoff.machine.state.value,
                "source_pid": handoff.source_pid,
            }
            for sequence, handoff in list(self._by_sequence.items())[:MAX_DESCRIBED]
        ]

    def describe_transport(self) -> dict[str, object]:
        return self.transfer.describe() if self.transfer is not None else {}
