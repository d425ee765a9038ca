"""The leader: plans steps, sends them to the ranks, publishes what comes back. One event loop, no torch, no gRPC.

`StepLoop` decides what to do next; this module does it, on the leader's event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from sluice_engine.errors import LedgerError
from sluice_engine.leader.corruption import RECORD_CORRUPT, TOKENS_SUSPECT
from sluice_engine.leader.generation import Generation
from sluice_engine.leader.handoff.reader import ReaderHandoffs
from sluice_engine.leader.handoff.source import SourceHandoffs
from sluice_engine.leader.inspect import summary
from sluice_engine.leader.load import describe_load
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.publish import Published
from sluice_engine.leader.requests import Requests, TakeTokens
from sluice_engine.leader.scheduling.sequence import Aborted, EndCause, Fact, Gone, Mode, Sequence, SequenceSpec
from sluice_engine.leader.scheduling.state import SchedulerState
from sluice_engine.leader.step_loop import StepLoop, StepOutcome, Tainted
from sluice_engine.spec import ResolvedEngine
from sluice_engine.step import BadRecord, StepResult
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Drained, Ended, EndReason, GenerateRequest, Load, Refused, Role, Route
from sluice_records import RecordKind
from sluice_runtime import fault_points, log
from sluice_runtime.tracing import NO_TRACER, Tracer

IDLE_CHECK_S = 0.25
# A sidecar takes a second or two to come up.
TRANSPORT_MS = 200
EMPTY_S = 0.001


class RankLink(Protocol):
    """One rank as the leader sees it: an ordered, reliable way to hand it frames."""

    rank: int

    def send(self, frame: bytes) -> None: ...


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
        self.counters: Counter[str] = Counter()
        self.loop = StepLoop(
            resolved.limits,
            resolved.layouts,
            resolved.fingerprint.digest,
            resolved.pools,
            lockstep=spec.lockstep,
        )
        self.requests = Requests(self.loop.generations)
        shared = self.tell, self.clock, self.counters, self.marks
        self.sources = SourceHandoffs(self.loop, self.admit, *shared, tracer)
        self.readers = ReaderHandoffs(self.loop, self.requests, *shared, spec.transport, on_pair_change)
        self.ranks: list[RankLink] = []
        self._drain_until: float | None = None
        self._turn_due = False
        self._idle_check: asyncio.TimerHandle | None = None
        self._dead = False
        self._on_death = on_death
        self._on_drain = on_drain
        self._events = asyncio.get_running_loop()

    @property
    def state(self) -> SchedulerState:
        return self.loop.state

    @property
    def generations(self) -> dict[int, Generation]:
        """By sequence."""
        return self.loop.generations

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> Generation | Refused:
        """Yes or no at once. The caller ends what it began: `abandon` when its client goes."""
        mode = Mode.UNIFIED if self.spec.role is Role.UNIFIED else Mode.READER
        if self.spec.role is Role.PREFILL:
            return Refused("WrongRole", "a prefill engine serves leases, not Generate: ask a decode engine")
        if mode is Mode.READER and not request.source_address:
            return Refused("NoSource", "source_address is empty: a decode engine needs its pair's prefill engine")
        if mode is Mode.READER and not self.readers.can_pull:
            self.counters["transport_away"] += 1
            return Refused("TransportAway", "this engine's transport is being started again", TRANSPORT_MS)
        if (objection := self.requests.objection_to(request)) is not None:
            return objection
        spec = SequenceSpec(self.loop.next_sequence, mode, request.prompt_ids, request.output_ids, request.sampling)
        refused = self.admit(spec)
        if refused is not None:
            log.info("request refused", request=request.request_id, reason=refused.reason)
            return refused
        sizes = {"prompt_tokens": len(request.prompt_ids), "output_tokens": len(request.output_ids)}
        generation = Generation(
            spec,
            request.stream,
            request.gateway_id,
            request.source_address,
            request.request_id,
            self.clock(),
            route=Route(decode_pid=os.getpid()),
            span=self.tracer.begin(
                f"{self.spec.role} generate", request.trace_context, request=request.request_id, **sizes
            ),
        )
        log.info("request admitted", request=request.request_id, sequence=spec.id, **sizes)
        self.requests.add(generation)
        return generation

    async def run_alone(self, spec: SequenceSpec) -> Ended:
        """A sequence of the engine's own: no gateway hears of its tokens. `spec.id` must be `loop.next_sequence`."""
        refused = self.admit(spec)
        if refused is not None:
            return Ended(EndReason.FAILED, 0, 0, refused.reason, refused.detail, Route())
        generation = Generation(spec, arrived=self.clock())
        self.requests.add(generation)
        return await generation.wait()

    def admit(self, spec: SequenceSpec) -> Refused | None:
        """`spec.id` must be `loop.next_sequence`."""
        if self.draining:
            return Refused("Draining", "this engine finishes what it has and takes no more", 1000)
        refused = self.loop.admit(spec)
        if refused is None:
            self._kick()
        return refused

    def abandon(self, generation: Generation) -> None:
        """Its client is gone: no more work for it. Idempotent."""
        if self.requests.abandon(generation):
            self._stop(generation)

    def attach(self, gateway_id: str, sink: TakeTokens) -> None:
        """Tokens of `gateway_id` go to `sink` from now on; a later attach takes over."""
        self.requests.attach(gateway_id, sink)

    def detach(self, gateway_id: str, sink: TakeTokens) -> None:
        """A gateway without its Attach stream cannot get tokens: what it asked for ends."""
        for generation in self.requests.detach(gateway_id, sink):
            self._stop(generation)

    def _stop(self, generation: Generation) -> None:
        self.readers.cancel(generation.sequence)
        self.tell(Aborted(generation.sequence))

    # -- drain -----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._drain_until is not None

    def drain(self) -> Drained:
        """Nothing new from now on; what runs may take `spec.drain_s`, then it is given back. Never undone, and counted
        from the first time that it was asked for."""
        if self._drain_until is None:
            self._drain_until = self.clock() + self.spec.drain_s
            self._events.call_later(self.spec.drain_s, self._give_back)
            self._on_drain()
        remaining = max(len(self.state.sequences), len(self.generations))
        left_s = max(0.0, self._drain_until - self.clock())
        return Drained(remaining, self.is_empty, int(left_s * 1e3))

    def _give_back(self) -> None:
        """End what still runs: its gateways and readers have it computed elsewhere."""
        detail = f"it was not done within the {self.spec.drain_s:g} s that a drain may take"
        for generation in list(self.generations.values()):
            self.requests.end(generation, EndReason.FAILED, "Draining", detail)
            self._stop(generation)
        self.sources.refuse_all("Draining", detail)

    # -- the loop --------------------------------------------------------------------------------------------------

    def tell(self, fact: Fact) -> None:
        """A fact for the next plan."""
        self.loop.tell(fact)
        self._kick()

    def _kick(self) -> None:
        if fault_points.holds("leader.kick"):
            return
        if not self._turn_due and self.loop.may_plan:
            self._turn_due = True
            self._events.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._dead or not self.loop.has_work or not self.loop.may_plan:
            return
        try:
            self._plan_and_send()
        except Exception as error:  # the books do not add up, or a bug of ours: nothing may go on from here
            self.die(error)

    def _plan_and_send(self) -> None:
        self.marks.planning()
        turn = self.loop.plan([link.rank for link in self.ranks], self.clock())
        planned = turn.planned
        for gone in planned.gone:
            self._on_gone(gone)
        self.sources.on_plan(planned)
        self.readers.on_plan(planned)
        if planned.record.is_empty:
            if self.loop.is_computing:
                self.marks.published()
            else:
                self.marks.resting(self.loop.num_runnable(self.loop.starving()[1]))
            if turn.again:
                self._kick()  # else only a fact can change anything, and brings its own turn
            elif not self.state.sequences and self.loop.has_moved:
                self._check_when_idle()
            return
        self.readers.pull(turn.pulls)
        frame = fault_points.change("leader.frame", turn.frame)
        if frame:
            for link in self.ranks:
                link.send(frame)
        self.marks.sent(planned.record.number, frame, turn.chain, planned.tokens, len(planned.record.work))
        self._kick()

    def on_result(self, result: StepResult) -> None:
        """A rank reports a step under way."""
        if self._dead:
            return
        try:
            outcome = self.loop.take(result, self.clock())
            if outcome is not None:
                self._finish_step(outcome)
        except Exception as error:
            self.die(error)

    def _finish_step(self, outcome: StepOutcome) -> None:
        self.marks.done(outcome.result.number, int(outcome.seconds * 1e9))
        fault_points.reach("leader.publish")
        self.counters["steps"] += 1
        if outcome.planned.record.checks:
            self.counters["records_checked"] += len(outcome.planned.record.checks)
        self.readers.pull(outcome.pulls)
        self._kick()  # before the tokens go out: ranks wait for the next plan, not for the streams
        for entry in outcome.bad:
            self._name_corrupt(entry)
        for tainted in outcome.tainted:
            self._end_tainted(tainted)
        if outcome.memory is not None:
            self.die(outcome.memory)
        self.sources.on_result(outcome.planned, outcome.result, {entry.ref for entry in outcome.bad})
        self._publish(outcome.published)
        self.marks.published()

    def _name_corrupt(self, bad: BadRecord) -> None:
        self.counters["records_corrupt"] += 1
        ref = bad.ref
        told = f"{ref.kind.value} record {ref.record} of generation {ref.generation} is not what was written"
        log.warning("record corrupt", kind=ref.kind.value, record=ref.record, detail=bad.detail)
        self.marks.say(f"RecordCorrupt: {told}: {bad.detail}")

    def _end_tainted(self, tainted: Tainted) -> None:
        """It has a bad record. If it has computed from it, what it published since then cannot be taken back, so only a
        sequence that published nothing is tried again."""
        sequence = tainted.sequence
        generation, state = self.generations.get(sequence), self.state.sequences[sequence]
        if state.mode is Mode.SOURCE:
            self.sources.refuse_tainted(sequence, tainted.detail, has_read=tainted.has_read)
            return
        # A reader's first token was computed by its source.
        published = generation is not None and generation.sent > int(state.mode is Mode.READER)
        reason = TOKENS_SUSPECT if published and tainted.has_read else RECORD_CORRUPT
        if sequence in self.readers:
            self.readers.fail(sequence, reason, tainted.detail)
        else:
            if generation is not None:
                self.requests.end(generation, EndReason.FAILED, reason, tainted.detail)
            self.tell(Aborted(sequence, EndCause.FAILED))

    def _publish(self, published: Published) -> None:
        for generation in (*published.ended, *(each for each, _ in published.failed)):
            sequence = self.state.sequences.get(generation.sequence)
            if sequence is not None and sequence.mode is Mode.UNIFIED:
                generation.cached_tokens = sequence.cached_tokens
                generation.route = Route(decode_pid=os.getpid(), chunks=sequence.chunks)
        self.requests.publish(published)

    def _on_gone(self, gone: Gone) -> None:
        generation = self.generations.get(gone.id)
        self.counters[f"sequences_{gone.cause.value}"] += 1
        if generation is None:
            return
        if gone.cause is EndCause.PREEMPTED:
            self.requests.end(generation, EndReason.PREEMPTED, "Preempted", "older sequences needed its pages")
        elif gone.cause is not EndCause.FINISHED:
            self.requests.end(generation, EndReason.FAILED, "RoomFailed", "its records were given back early")
        else:  # all its tokens were chosen, and not all were published: its stream would never end
            self.counters["tokens_lost"] += 1
            detail = f"{generation.sent} tokens were heard of, and it has finished"
            self.requests.end(generation, EndReason.FAILED, "TokensLost", detail)

    def die(self, error: Exception) -> None:
        """No step may follow. Requests end with the streams, when the process does."""
        if not self._dead:
            self._dead = True
            self._on_death(error)

    # -- looked after by a timer -----------------------------------------------------------------------------------

    def look_after(self) -> None:
        """Whether or not there is work: the marks that say that this loop turns, and the mirrors."""
        fault_points.reach("leader.turn")
        self.marks.row.tick()
        head, waiting = self.loop.starving()
        self.marks.waiting(head, waiting)
        passed = self.loop.passed_over()
        self.marks.passed_over(passed.since, passed.number, self._describe(passed.first))
        if not self.loop.is_computing:
            self.marks.resting(self.loop.num_runnable(waiting))
        if self.loop.scrub(self.clock()):
            self._kick()
        self.sources.look()
        self.readers.look()
        self.mirror_books()

    def _describe(self, passed: Sequence | None) -> str:
        if passed is None:
            return ""
        steps = f"in no step since {passed.last_step}" if passed.last_step >= 0 else "in no step yet"
        return f"{passed.phase} request {self._request_of(passed.id) or '(its own)'}: {steps}"

    def _request_of(self, sequence: int) -> str:
        """The request id, which all processes log; empty for a sequence of the engine's own."""
        generation = self.generations.get(sequence)
        return self.sources.request_of(sequence) if generation is None else generation.request_id

    def mirror_books(self, *, now: bool = False) -> None:
        """At most every MIRROR_S, for it is not free."""
        if now or self.marks.is_mirror_due():
            self.marks.mirror(summary(self), self.sources.describe() + self.readers.describe())

    def _check_when_idle(self) -> None:
        """The books, once nothing has happened for IDLE_CHECK_S: looking at every record takes milliseconds."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._idle_check = self._events.call_later(IDLE_CHECK_S, self._check_integrity)

    def _check_integrity(self) -> None:
        if self.is_idle and not self._dead:
            self.loop.has_moved = False
            try:
                self.state.check_integrity()
            except LedgerError as error:
                self.die(error)

    # -- what others read ------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No sequence is left, and no step is under way."""
        return self.loop.is_idle

    @property
    def is_empty(self) -> bool:
        """Idle, and nothing is held: no generation, no handoff, and no transfer that may still land."""
        ledger, held = self.state.ledger, self.generations or len(self.sources) or len(self.readers)
        return self.is_idle and not held and not any(ledger.count(kind).stranded for kind in RecordKind)

    def oldest_waiting_s(self) -> float:
        """Of requests without a token yet."""
        return self.requests.oldest_waiting_s(self.clock())

    async def emptied(self) -> None:
        """Until the last sequence's records are back; a sequence ends a turn or two before that."""
        while not self.is_idle:
            turn: asyncio.Future[None] = self._events.create_future()
            self._events.call_later(EMPTY_S, turn.set_result, None)
            await turn

    def load(self) -> Load:
        return describe_load(self)
