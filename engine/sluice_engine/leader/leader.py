"""The leader: plans steps, sends them to the ranks, publishes what comes back. One event loop, no torch, no gRPC.

Overlap: step N+1 is planned and sent while the ranks carry out N, for a plan sees results of steps <= N-2 only. In
lockstep (`EngineSpec.lockstep`) it is planned when every rank has reported N; the plans are the very same.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from sluice_engine.errors import EngineError, LedgerError, RankFault
from sluice_engine.leader.inspect import summary
from sluice_engine.leader.lease.corruption import RECORD_CORRUPT, TOKENS_SUSPECT, Corruption, MemoryCorrupt
from sluice_engine.leader.lease.rooms import Rooms
from sluice_engine.leader.load import describe_load
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.publish import Published, Stream, publish_step, publish_token
from sluice_engine.leader.scheduling.admission import admit, starving
from sluice_engine.leader.scheduling.condemn import condemn
from sluice_engine.leader.scheduling.ledger import Ledger
from sluice_engine.leader.scheduling.schedule import plan
from sluice_engine.leader.scheduling.scrubber import Scrubber
from sluice_engine.leader.scheduling.sequence import (
    Aborted,
    Corrupted,
    EndCause,
    Fact,
    Gone,
    Mode,
    ScrubDue,
    Sequence,
    SequenceSpec,
    StepDone,
)
from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.leader.scheduling.turns import Turns
from sluice_engine.leader.scheduling.under_way import SentStep, UnderWay
from sluice_engine.spec import ResolvedEngine
from sluice_engine.step import CHAIN_START, BadRecord, RecordRef, StepResult, encode_step, objection_to
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import (
    Drained,
    Ended,
    EndReason,
    GenerateRequest,
    Load,
    Refused,
    Role,
    Route,
    TokenBatch,
)
from sluice_protocol.sampling import TokenLogprobs
from sluice_records import RecordKind
from sluice_runtime import fault_points, log
from sluice_runtime.tracing import NO_TRACER, Span, Tracer

STEP_TIMES_KEPT = 200
IDLE_CHECK_S = 0.25
# A sidecar takes a second or two to come up.
TRANSPORT_MS = 200
EMPTY_S = 0.001


class RankLink(Protocol):
    """One rank as the leader sees it: an ordered, reliable way to hand it frames."""

    rank: int

    def send(self, frame: bytes) -> None: ...


class ReplicaDivergence(EngineError):
    """Two ranks report different results of one step: a bug, or a bad chip."""


@dataclass(slots=True)
class Generation:
    """A Generate call as the server sees it. `ended` is set exactly once."""

    sequence: int
    stream: Stream
    ended: asyncio.Future[Ended]
    arrived: float
    source_address: str = ""
    cached_tokens: int = 0
    route: Route = field(default_factory=Route)
    request_id: str = ""
    span: Span = field(default_factory=lambda: NO_TRACER.begin(""))


class Leader:
    """Everything here runs on one event loop; `on_death` is called once, with the reason, and the process exits.
    `on_drain` is called when a drain begins, `on_pair_change(source, reason, detail)` when this reader cannot take
    records from a source any more (or can again: no reason)."""

    def __init__(
        self,
        spec: EngineSpec,
        resolved: ResolvedEngine,
        incarnation: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        marks: LeaderMarks | None = None,
        tracer: Tracer = NO_TRACER,
        on_death: Callable[[Exception], None],
        on_drain: Callable[[], None] = lambda: None,
        on_pair_change: Callable[[str, str, str], None] = lambda source, reason, detail: None,
    ) -> None:
        self.spec = spec
        self.resolved = resolved
        self.incarnation = incarnation
        self.clock = clock
        self.marks = marks or LeaderMarks(None)
        self.tracer = tracer
        self.state = SchedulerState(
            resolved.limits, resolved.layouts, resolved.fingerprint.digest, Ledger(resolved.pools)
        )
        self.rooms = Rooms(self)
        self._turns = Turns()
        self._scrubber = Scrubber()
        self._corruption = Corruption()
        self.ranks: list[RankLink] = []
        self.sinks: dict[str, Callable[[TokenBatch], None]] = {}
        self.generations: dict[int, Generation] = {}  # by sequence
        self.streams: dict[int, Stream] = {}  # by sequence
        self._taken: set[tuple[str, int]] = set()  # gateway and number of each of them
        self._drain_until: float | None = None
        self.counters: Counter[str] = Counter()
        self._facts: list[Fact] = []
        self._results: deque[StepResult] = deque()
        self._chain = CHAIN_START
        self._under_way = UnderWay(lockstep=spec.lockstep)
        self._step_times: deque[float] = deque(maxlen=STEP_TIMES_KEPT)
        self._turn_due = False
        self._idle_check: asyncio.TimerHandle | None = None
        self._has_moved = False  # the books, since they were checked: scrubbing moves nothing in them
        self._next_sequence = 1
        self._dead = False
        self._on_death = on_death
        self._on_drain = on_drain
        self.on_pair_change = on_pair_change
        self._loop = asyncio.get_running_loop()

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> Generation | Refused:
        """Yes or no at once. The caller ends what it began: `abandon` when its client goes."""
        mode = Mode.UNIFIED if self.spec.role is Role.UNIFIED else Mode.READER
        if self.spec.role is Role.PREFILL:
            return Refused("WrongRole", "a prefill engine serves leases, not Generate: ask a decode engine")
        if mode is Mode.READER and not request.source_address:
            return Refused("NoSource", "source_address is empty: a decode engine needs its pair's prefill engine")
        if mode is Mode.READER and not self.rooms.can_pull:
            self.counters["transport_away"] += 1
            return Refused("TransportAway", "this engine's transport is being started again", TRANSPORT_MS)
        if request.gateway_id not in self.sinks:
            return Refused("NotAttached", f"gateway {request.gateway_id!r} has no Attach stream here", 50)
        if (request.gateway_id, request.stream) in self._taken:
            return Refused("StreamTaken", f"stream {request.stream} of this gateway is another request's, which runs")
        spec = SequenceSpec(self._next_sequence, mode, request.prompt_ids, request.output_ids, request.sampling)
        refused = self.admit(spec)
        if refused is not None:
            log.info("request refused", request=request.request_id, reason=refused.reason)
            return refused
        stream = Stream(request.stream, request.gateway_id, spec)
        generation = Generation(spec.id, stream, self._loop.create_future(), self.clock(), request.source_address)
        generation.route = Route(decode_pid=self.rooms.pid)
        generation.request_id = request.request_id
        sizes = {"prompt_tokens": len(request.prompt_ids), "output_tokens": len(request.output_ids)}
        generation.span = self.tracer.begin(
            f"{self.spec.role} generate", request.trace_context, request=request.request_id, **sizes
        )
        log.info("request admitted", request=request.request_id, sequence=spec.id, **sizes)
        self.generations[spec.id], self.streams[spec.id] = generation, stream
        self._taken.add((stream.gateway_id, stream.number))
        return generation

    async def run_alone(self, spec: SequenceSpec) -> Ended:
        """A sequence of the engine's own: no gateway hears of its tokens. `spec.id` must be `next_sequence`'s."""
        refused = self.admit(spec)
        if refused is not None:
            return Ended(EndReason.FAILED, 0, 0, refused.reason, refused.detail, Route())
        stream = Stream(0, "", spec)
        generation = Generation(spec.id, stream, self._loop.create_future(), self.clock())
        self.generations[spec.id], self.streams[spec.id] = generation, stream
        return await generation.ended

    def admit(self, spec: SequenceSpec) -> Refused | None:
        """`spec.id` must be `next_sequence`'s; counts it."""
        if self.draining:
            return Refused("Draining", "this engine finishes what it has and takes no more", 1000)
        refused = admit(self.state, spec)
        if refused is None:
            self._next_sequence += 1
            self._has_moved = True
            self._kick()
        return refused

    # -- drain -----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._drain_until is not None

    def drain(self) -> Drained:
        """Nothing new from now on; what runs may take `spec.drain_s`, then it is given back. Never undone, and counted
        from the first time that it was asked for."""
        if self._drain_until is None:
            self._drain_until = self.clock() + self.spec.drain_s
            self._loop.call_later(self.spec.drain_s, self._give_back)
            self._on_drain()
        remaining = max(len(self.state.sequences), len(self.generations))
        left_s = max(0.0, self._drain_until - self.clock())
        return Drained(remaining, self.is_empty, int(left_s * 1e3))

    def _give_back(self) -> None:
        """Time is over: whoever asked for what still runs has it done elsewhere."""
        detail = f"it was not done within the {self.spec.drain_s:g} s that a drain may take"
        for generation in list(self.generations.values()):
            self.end(generation, EndReason.FAILED, "Draining", detail)
            self.rooms.cancel(generation.sequence)
            self.tell(Aborted(generation.sequence))
        self.rooms.refuse_sources("Draining", detail)

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    def abandon(self, generation: Generation) -> None:
        """Its client is gone: no more work for it. Idempotent."""
        if self.generations.pop(generation.sequence, None) is None:
            return
        self._forget(generation)
        self.rooms.cancel(generation.sequence)
        self.tell(Aborted(generation.sequence))
        if not generation.ended.done():
            log.info("request abandoned", request=generation.request_id, tokens=generation.stream.sent)
            generation.span.end("Abandoned", tokens=generation.stream.sent)
            generation.ended.cancel()

    def attach(self, gateway_id: str, sink: Callable[[TokenBatch], None]) -> None:
        """Tokens of `gateway_id` go to `sink` from now on; a later attach takes over."""
        self.sinks[gateway_id] = sink

    def detach(self, gateway_id: str, sink: Callable[[TokenBatch], None]) -> None:
        """A gateway without its Attach stream cannot get tokens: what it asked for ends."""
        if self.sinks.get(gateway_id) != sink:  # equal, not identical: a method is bound anew at every mention
            return
        del self.sinks[gateway_id]
        for generation in list(self.generations.values()):
            if generation.stream.gateway_id == gateway_id:
                self.end(generation, EndReason.FAILED, "AttachLost", "the gateway's Attach stream ended")
                self.tell(Aborted(generation.sequence))

    def end(self, generation: Generation, reason: EndReason, error: str = "", detail: str = "") -> None:
        """The last word on a Generate stream."""
        self.generations.pop(generation.sequence, None)
        self._forget(generation)
        if not generation.ended.done():
            generation.span.end(error, reason=reason.value, tokens=generation.stream.sent)
            if generation.request_id:
                why = {"error": error, "detail": detail} if error else {}
                tokens = generation.stream.sent
                log.info("request ended", request=generation.request_id, reason=reason.value, tokens=tokens, **why)
            generation.ended.set_result(
                Ended(reason, generation.stream.sent, generation.cached_tokens, error, detail, generation.route)
            )

    def _forget(self, generation: Generation) -> None:
        stream = self.streams.pop(generation.sequence, None)
        if stream is not None:
            self._taken.discard((stream.gateway_id, stream.number))

    def tell(self, fact: Fact) -> None:
        """A fact for the next plan."""
        self._facts.append(fact)
        self._has_moved = self._has_moved or not isinstance(fact, ScrubDue)
        self._kick()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        if fault_points.holds("leader.kick"):
            return
        if not self._turn_due and self._under_way.may_plan(self.state):
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._dead or not (self._facts or self.state.has_work) or not self._under_way.may_plan(self.state):
            return
        try:
            self._plan_and_send()
        except Exception as error:  # the books do not add up, or a bug of ours: nothing may go on from here
            self.die(error)

    def _plan_and_send(self) -> None:
        self.marks.planning()
        while self._results and self.state.sees(self._results[0].number):
            self._facts.append(StepDone(self._results.popleft()))
        facts, self._facts = self._facts, []
        fault_points.reach("leader.plan")
        self.state, planned = plan(self.state, facts)
        for gone in planned.gone:
            self._on_gone(gone)
        self.rooms.on_plan(planned)
        if planned.record.is_empty:
            if self._under_way:
                self.marks.published()
            else:
                self.marks.resting(self._runnable(starving(self.state)[1]))
            if planned.progressed or (self._results and self.state.sees(self._results[0].number)):
                self._kick()  # else only a fact can change anything, and brings its own turn
            elif not self.state.sequences and self._has_moved:
                self._check_when_idle()
            return
        chain = self._chain
        frame, self._chain = encode_step(planned.record, chain)
        frame = fault_points.change("leader.frame", frame)
        if not self._under_way:
            self.rooms.pull(planned.record.pulls)
        self._under_way.add(planned, [link.rank for link in self.ranks], self.clock())
        if frame:
            for link in self.ranks:
                link.send(frame)
        rows = sum(len(batch.rows) for batch in planned.record.batches)
        self.marks.sent(planned.record.number, frame, chain, planned.tokens, rows)
        self._kick()

    def _runnable(self, waiting: int) -> int:
        """Sequences that a plan could advance now: those `waiting` that there is room for, else those that compute."""
        return waiting or int(self.state.can_run and not self.state.stalled)

    def look_after(self) -> None:
        """From a timer, whether or not there is work: the marks that say that this loop turns, and the mirrors."""
        fault_points.reach("leader.turn")
        self.marks.row.tick()
        head, waiting = starving(self.state)
        self.marks.waiting(head, waiting)
        passed = self._turns.look(self.state, under_way=bool(self._under_way))
        self.marks.passed_over(passed.since, passed.number, self._describe(passed.first))
        if not self._under_way:
            self.marks.resting(self._runnable(waiting))
        if (nbytes := self._scrubber.due(self.clock())) and self.state.cache:
            self.tell(ScrubDue(nbytes))
        self.mirror_books()

    def _describe(self, passed: Sequence | None) -> str:
        if passed is None:
            return ""
        steps = f"in no step since {passed.last_step}" if passed.last_step >= 0 else "in no step yet"
        return f"{passed.phase} request {self._request_of(passed.id) or '(its own)'}: {steps}"

    def _request_of(self, sequence: int) -> str:
        """The id that leads from one process to the next; "" where nobody asked from outside."""
        generation, room = self.generations.get(sequence), self.rooms.sources.get(sequence)
        return generation.request_id if generation is not None else room.ids["request"] if room is not None else ""

    def mirror_books(self, *, now: bool = False) -> None:
        """At most every MIRROR_S, for it is not free."""
        if now or self.marks.is_mirror_due():
            self.marks.mirror(summary(self), self.rooms.describe())

    def _check_when_idle(self) -> None:
        """The books, once nothing has happened for IDLE_CHECK_S: looking at every record takes milliseconds."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._idle_check = self._loop.call_later(IDLE_CHECK_S, self._check_integrity)

    def _check_integrity(self) -> None:
        if self.is_idle and not self._dead:
            self._has_moved = False
            try:
                self.state.check_integrity()
            except LedgerError as error:
                self.die(error)

    def on_result(self, result: StepResult) -> None:
        """A rank reports a step under way."""
        if self._dead:
            return
        step = self._under_way.awaiting(result.number, result.rank)
        if step is None:
            self.die(RankFault(result.rank, "UnexpectedResult", f"step {result.number} was not asked for"))
            return
        if lacking := objection_to(result, step.planned.record):
            self.die(RankFault(result.rank, "IncompleteResult", f"step {result.number}: {lacking}"))
            return
        step.results[result.rank] = result
        try:
            while (done := self._under_way.take_done(self.clock())) is not None:
                self._complete_step(*done)
        except Exception as error:
            self.die(error)

    def _complete_step(self, step: SentStep, elapsed: float) -> None:
        planned, results = step.planned, [result for result in step.results.values() if result is not None]
        first = results[0]
        for other in results[1:]:
            if (other.sampled, other.digests) != (first.sampled, first.digests):
                raise ReplicaDivergence(f"step {first.number}: ranks {first.rank} and {other.rank} differ")
        self._step_times.append(elapsed)
        self.marks.done(first.number, int(elapsed * 1e9))
        fault_points.reach("leader.publish")
        self.counters["steps"] += 1
        self._results.append(first)
        if (following := self._under_way.oldest) is not None:
            self.rooms.pull(following.planned.record.pulls)
        self._kick()  # before anybody hears of this step: ranks wait for the next plan, not for who writes the tokens
        bad = self._take_checks(planned, results) if planned.record.checks else ()
        self.rooms.on_result(planned, first, bad)
        self._publish(publish_step(self.streams, planned.rows, first))
        self.marks.published()

    def _take_checks(self, planned: Plan, results: list[StepResult]) -> Collection[RecordRef]:
        """What the step has verified. Returns the records that some rank calls bad; what rests on them is ended."""
        self.counters["records_checked"] += len(planned.record.checks)
        self._scrubber.measured(max(result.check_ns for result in results), self.clock())
        if bad := [entry for result in results for entry in result.bad]:
            self._condemn(bad)
        return {entry.ref for entry in bad}

    def _condemn(self, bad: list[BadRecord]) -> None:
        """Closed records are not what was written: nothing that may have been computed from them is published any more,
        and the next plan drops it. Several within a while are no accident: the engine ends itself."""
        for entry in bad:
            self.counters["records_corrupt"] += 1
            ref = entry.ref
            told = f"{ref.kind.value} record {ref.record} of generation {ref.generation} is not what was written"
            log.warning("record corrupt", kind=ref.kind.value, record=ref.record, detail=entry.detail)
            self.marks.say(f"RecordCorrupt: {told}: {entry.detail}")
        refs = tuple(dict.fromkeys(entry.ref for entry in bad))
        condemned = condemn(self.state, refs)
        for sequence in condemned.sequences:
            self._end_tainted(sequence, bad[0].detail, has_read=sequence in condemned.readers)
        self.tell(Corrupted(refs))
        if self._corruption.counts(refs, self.clock()):
            self.die(MemoryCorrupt(f"{self._corruption.describe()}, the last: {bad[-1].detail}"))

    def _end_tainted(self, sequence: int, detail: str, *, has_read: bool) -> None:
        """It has a bad record. If it has computed from it, what it published since then cannot be taken back, so only a
        sequence that published nothing is tried again."""
        generation, state = self.generations.get(sequence), self.state.sequences[sequence]
        if state.mode is Mode.SOURCE:
            self.rooms.refuse_tainted(sequence, detail, has_read=has_read)
            return
        # A reader's first token was computed by its source.
        published = generation is not None and generation.stream.sent > int(state.mode is Mode.READER)
        reason = TOKENS_SUSPECT if published and has_read else RECORD_CORRUPT
        if sequence in self.rooms.readers:
            self.rooms.on_failed(sequence, reason, detail)
        else:
            if generation is not None:
                self.end(generation, EndReason.FAILED, reason, detail)
            self.tell(Aborted(sequence, EndCause.FAILED))

    def _publish(self, published: Published) -> None:
        for gateway, batch in published.batches.items():
            sink = self.sinks.get(gateway)
            if sink is not None and batch.tokens:
                sink(batch)
        for stream in published.ended:
            generation = self.generations.get(stream.spec.id)
            if generation is not None and stream.end is not None:
                self._note_cached(generation)
                self.end(generation, stream.end)
        for stream, detail in published.failed:
            generation = self.generations.get(stream.spec.id)
            if generation is not None:
                self._note_cached(generation)
                self.end(generation, EndReason.FAILED, "BadLogits", detail)

    def publish_first(self, sequence: int, token: int, logprobs: TokenLogprobs | None) -> bool:
        """The first token of a room, streamed before the pull ends. False when it ends the request."""
        stream = self.streams.get(sequence)
        if stream is None:
            return False
        self._publish(publish_token(stream, token, logprobs))
        return stream.end is None

    def _note_cached(self, generation: Generation) -> None:
        sequence = self.state.sequences.get(generation.sequence)
        if sequence is not None and sequence.spec.mode is Mode.UNIFIED:
            generation.cached_tokens = sequence.cached_tokens
            generation.route = Route(decode_pid=self.rooms.pid, chunks=sequence.chunks)

    def _on_gone(self, gone: Gone) -> None:
        generation = self.generations.get(gone.id)
        self.counters[f"sequences_{gone.cause.value}"] += 1
        if generation is None:
            return
        if gone.cause is EndCause.PREEMPTED:
            self.end(generation, EndReason.PREEMPTED, "Preempted", "older sequences needed its pages")
        elif gone.cause is not EndCause.FINISHED:
            self.end(generation, EndReason.FAILED, "RoomFailed", "its records were given back early")
        else:  # all its tokens were chosen, and not all were heard of: nobody would ever end its stream
            self.counters["tokens_lost"] += 1
            sent = generation.stream.sent
            self.end(generation, EndReason.FAILED, "TokensLost", f"{sent} tokens were heard of, and it has finished")

    def die(self, error: Exception) -> None:
        """No step may follow. Requests end with the streams, when the process does."""
        if not self._dead:
            self._dead = True
            self._on_death(error)

    # -- what others read ------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No sequence is left, and no step is under way."""
        return not self.state.sequences and not self._under_way

    @property
    def is_empty(self) -> bool:
        """Idle, and nobody has a hold on anything: no generation, room, lease, or transfer that may still land."""
        rooms, ledger = self.rooms, self.state.ledger
        held = self.generations or rooms.sources or rooms.readers
        return self.is_idle and not held and not any(ledger.count(kind).stranded for kind in RecordKind)

    def oldest_waiting_s(self) -> float:
        """Of requests without a token yet."""
        arrivals = [g.arrived for g in self.generations.values() if g.stream.sent == 0]
        return self.clock() - min(arrivals) if arrivals else 0.0

    async def emptied(self) -> None:
        """Until the last sequence's records are back; a sequence ends a turn or two before that."""
        while not self.is_idle:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._loop.call_later(EMPTY_S, turn.set_result, None)
            await turn

    def load(self) -> Load:
        return describe_load(self)

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds, of the last steps."""
        return tuple(self._step_times)
