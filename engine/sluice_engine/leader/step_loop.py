"""The step loop without I/O: facts go in; step records, pulls and published tokens come out.

The caller plans (`plan`) whenever `may_plan` says so and sends the frame to every rank. It hands in what ranks report
(`take`) and carries out what comes back. Overlap: step N+1 is planned and sent while the ranks carry out N, because a
plan sees the results of steps up to N-2 only. In lockstep a step is planned when every rank has reported the one
before; the plans are the same.

Pulls that a step authorises may be posted once the ranks have finished all steps before it: until then they may still
write into these records for the sequences that had them before. `Turn.pulls` and `StepOutcome.pulls` follow this rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from sluice_engine.errors import EngineError, RankFault
from sluice_engine.leader.corruption import Corruption, MemoryCorrupt
from sluice_engine.leader.generation import Generation
from sluice_engine.leader.publish import Published, publish_step
from sluice_engine.leader.scheduling.admission import admit, starving
from sluice_engine.leader.scheduling.condemn import condemn
from sluice_engine.leader.scheduling.ledger import Ledger
from sluice_engine.leader.scheduling.schedule import plan
from sluice_engine.leader.scheduling.scrubber import Scrubber
from sluice_engine.leader.scheduling.sequence import Corrupted, Fact, ScrubDue, SequenceSpec, StepDone
from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.leader.scheduling.turns import PassedOver, Turns
from sluice_engine.leader.scheduling.under_way import SentStep, UnderWay
from sluice_engine.limits import Limits
from sluice_engine.step import CHAIN_START, BadRecord, PullSet, StepResult, encode_step, objection_to
from sluice_protocol.generate import Refused
from sluice_records import ChainKey, Layouts, PoolPlan
from sluice_runtime import fault_points

STEP_TIMES_KEPT = 200


class ReplicaDivergence(EngineError):
    """Two ranks report different results of one step: a bug, or a bad chip."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one plan asks for.

    `frame`: the encoded step record, for every rank; empty when nothing is to be computed. `chain`: the digest that the
    frame continues. `pulls`: may be posted now. `again`: another plan may find more to do even without a new fact.
    """

    planned: Plan
    frame: bytes = b""
    chain: bytes = b""
    pulls: tuple[PullSet, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class Tainted:
    """A sequence that has a bad record among its own; `has_read`: it may have computed from it."""

    sequence: int
    detail: str
    has_read: bool


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step that every rank has reported. `seconds`: that the ranks had it alone. `pulls`: of the next step, may be
    posted now. `bad`: records whose check failed; `tainted` sequences must end. `memory`: set when there were too many
    bad records, and the engine must end."""

    planned: Plan
    result: StepResult
    seconds: float
    pulls: tuple[PullSet, ...]
    published: Published
    bad: tuple[BadRecord, ...] = ()
    tainted: tuple[Tainted, ...] = ()
    memory: MemoryCorrupt | None = None


class StepLoop:
    """Owns the scheduler's state, the steps under way and the generations that the steps' tokens go to."""

    def __init__(
        self, limits: Limits, layouts: Layouts, salt: ChainKey, pools: PoolPlan, *, lockstep: bool = False
    ) -> None:
        self.state = SchedulerState(limits, layouts, salt, Ledger(pools))
        self.generations: dict[int, Generation] = {}  # by sequence
        self.step_times: deque[float] = deque(maxlen=STEP_TIMES_KEPT)  # seconds, of the last steps
        self.next_sequence = 1
        self.has_moved = False  # the books, since they were last checked; scrubbing moves nothing in them
        self._facts: list[Fact] = []
        self._results: deque[StepResult] = deque()  # reported, not shown to a plan yet
        self._chain = CHAIN_START
        self._under_way = UnderWay(lockstep=lockstep)
        self._turns = Turns()
        self._scrubber = Scrubber()
        self._corruption = Corruption()

    # -- what goes in ------------------------------------------------------------------------------------------------

    def admit(self, spec: SequenceSpec) -> Refused | None:
        """None: the sequence waits for the next plan. `spec.id` must be `next_sequence`."""
        refused = admit(self.state, spec)
        if refused is None:
            self.next_sequence += 1
            self.has_moved = True
        return refused

    def tell(self, fact: Fact) -> None:
        """A fact for the next plan."""
        self._facts.append(fact)
        self.has_moved = self.has_moved or not isinstance(fact, ScrubDue)

    def scrub(self, now: float) -> bool:
        """Whether some closed records are to be verified with the next plan. `now` in seconds."""
        nbytes = self._scrubber.due(now)
        if nbytes and self.state.cache:
            self.tell(ScrubDue(nbytes))
            return True
        return False

    # -- plans -------------------------------------------------------------------------------------------------------

    @property
    def may_plan(self) -> bool:
        """Whether all the results are in that the next plan sees."""
        return self._under_way.may_plan(self.state)

    @property
    def has_work(self) -> bool:
        return bool(self._facts) or self.state.has_work

    @property
    def is_computing(self) -> bool:
        """Whether a step is with the ranks."""
        return bool(self._under_way)

    def plan(self, ranks: Ordered[int], now: float) -> Turn:
        """The next step, for these ranks. Only when `may_plan`."""
        while self._results and self.state.sees(self._results[0].number):
            self._facts.append(StepDone(self._results.popleft()))
        facts, self._facts = self._facts, []
        fault_points.reach("leader.plan")
        self.state, planned = plan(self.state, facts)
        if planned.record.is_empty:
            again = planned.progressed or bool(self._results and self.state.sees(self._results[0].number))
            return Turn(planned, again=again)
        chain = self._chain
        frame, self._chain = encode_step(planned.record, chain)
        pulls = () if self._under_way else planned.record.pulls
        self._under_way.add(planned, ranks, now)
        return Turn(planned, frame, chain, pulls, again=True)

    # -- results -----------------------------------------------------------------------------------------------------

    def take(self, result: StepResult, now: float) -> StepOutcome | None:
        """Of one rank. The step, if every rank has reported it with this: ranks report in order, so it is the oldest.

        Raises RankFault for a result that was not asked for or lacks something, ReplicaDivergence when ranks differ.
        """
        step = self._under_way.awaiting(result.number, result.rank)
        if step is None:
            raise RankFault(result.rank, "UnexpectedResult", f"step {result.number} was not asked for")
        if lacking := objection_to(result, step.planned.record):
            raise RankFault(result.rank, "IncompleteResult", f"step {result.number}: {lacking}")
        step.results[result.rank] = result
        done = self._under_way.take_done(now)
        return None if done is None else self._complete(*done, now)

    def _complete(self, step: SentStep, seconds: float, now: float) -> StepOutcome:
        planned, results = step.planned, [result for result in step.results.values() if result is not None]
        first = results[0]
        for other in results[1:]:
            if (other.sampled, other.digests) != (first.sampled, first.digests):
                raise ReplicaDivergence(f"step {first.number}: ranks {first.rank} and {other.rank} differ")
        self.step_times.append(seconds)
        self._results.append(first)
        following = self._under_way.oldest
        pulls = () if following is None else following.planned.record.pulls
        bad: tuple[BadRecord, ...] = ()
        if planned.record.checks:
            self._scrubber.measured(max(result.check_ns for result in results), now)
            bad = tuple(entry for result in results for entry in result.bad)
        tainted, memory = self._condemn(bad, now) if bad else ((), None)
        # Nothing that may have been computed from a bad record is published any more.
        without = {each.sequence for each in tainted}
        published = publish_step(self.generations, planned.rows, first, without)
        return StepOutcome(planned, first, seconds, pulls, published, bad, tainted, memory)

    def _condemn(self, bad: Ordered[BadRecord], now: float) -> tuple[tuple[Tainted, ...], MemoryCorrupt | None]:
        """Closed records are not what was written. The next plan drops what rests on them; several within a while are
        no accident."""
        refs = tuple(dict.fromkeys(entry.ref for entry in bad))
        condemned = condemn(self.state, refs)
        self.tell(Corrupted(refs))
        tainted = tuple(
            Tainted(sequence, bad[0].detail, sequence in condemned.readers) for sequence in condemned.sequences
        )
        if not self._corruption.counts(refs, now):
            return tainted, None
        return tainted, MemoryCorrupt(f"{self._corruption.describe()}, the last: {bad[-1].detail}")

    # -- what others read --------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No sequence is left, and no step is under way."""
        return not self.state.sequences and not self._under_way

    def passed_over(self) -> PassedOver:
        """The running sequences that steps leave out."""
        return self._turns.look(self.state, under_way=bool(self._under_way))

    def starving(self) -> tuple[int, int]:
        """(first, number) of the sequences that wait although a plan could give the first its records."""
        return starving(self.state)

    def num_runnable(self, waiting: int) -> int:
        """Sequences that a plan could advance now: the `waiting` that there is room for, else 1 if any computes."""
        return waiting or int(self.state.can_run and not self.state.stalled)
