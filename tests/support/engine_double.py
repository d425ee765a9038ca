"""An engine in one process: the real plan and the real executor over the scripted model, joined without a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from sluice_engine.leader.scheduling.admission import admit
from sluice_engine.leader.scheduling.ledger import CACHE, Ledger
from sluice_engine.leader.scheduling.schedule import plan
from sluice_engine.leader.scheduling.sequence import Aborted, EndCause, Fact, Mode, SequenceSpec, StepDone
from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.limits import Limits
from sluice_engine.pool import Pools, RecordPool
from sluice_engine.rank.executor import Executor
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.scripted import Script, ScriptedModel
from sluice_engine.step import CHAIN_START, BatchModel, StepResult, encode_step
from sluice_protocol.engine_spec import SnapshotPolicy
from sluice_protocol.generate import Refused
from sluice_protocol.sampling import Sampling
from sluice_records import (
    CacheGeometry,
    CachePrecision,
    LayerKind,
    Layouts,
    Perturbation,
    PoolPlan,
    RecordKind,
    build_layouts,
)

PAGE = 8
GEOMETRY = CacheGeometry((LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA), 16, 8, 8, 4, 4, 8)


def tiny_layouts(perturbation: Perturbation | None = None) -> Layouts:
    return build_layouts(GEOMETRY, CachePrecision.parse("fp32"), PAGE, perturbation=perturbation)


def scripted_model(pools: Pools, mirror: RecordMirror) -> BatchModel:
    return ScriptedModel(Script(0, 63), pools, mirror)


@dataclass
class Engine:
    """`overlap`: the result of a step reaches the loop only after the next one is planned."""

    pool_plan: PoolPlan = field(default_factory=lambda: PoolPlan(64, 8, 8))
    max_running: int = 8
    chunk_tokens: int = 16
    step_tokens: int = 48
    overlap: bool = False
    snapshots: SnapshotPolicy = SnapshotPolicy.END_OF_PROMPT
    snapshot_outputs: bool = False
    layouts: Layouts = field(default_factory=tiny_layouts)
    stop: tuple[int, ...] = ()
    vocab_size: int = 64
    build_model: Callable[[Pools, RecordMirror], BatchModel] = scripted_model

    def __post_init__(self) -> None:
        limits = Limits(
            page_tokens=self.layouts.page_tokens,
            chunk_tokens=self.chunk_tokens,
            step_tokens=self.step_tokens,
            max_running=self.max_running,
            max_context_tokens=1024,
            vocab_size=self.vocab_size,
            snapshots=self.snapshots,
            snapshot_outputs=self.snapshot_outputs,
        )
        self.state = SchedulerState(limits, self.layouts, b"salt" * 4, Ledger(self.pool_plan))
        self.pools = {
            kind: RecordPool(
                self.layouts[kind],
                self.pool_plan[kind],
                np.zeros(self.pool_plan[kind] * self.layouts[kind].stride, dtype=np.uint8),
            )
            for kind in RecordKind
        }
        self.mirror = RecordMirror(self.pool_plan)
        self.executor = Executor(0, self.pools, self.mirror, self.build_model(self.pools, self.mirror))
        self.chain = CHAIN_START
        self.facts: list[Fact] = []
        self.results: deque[StepResult] = deque()
        self.frames: deque[bytes] = deque()
        self.plans: list[Plan] = []
        self.outputs: dict[int, list[int]] = {}
        self.specs: dict[int, SequenceSpec] = {}
        self.ended: dict[int, EndCause] = {}
        self.rows: dict[int, dict[int, int]] = {}
        self.next_id = 1

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 8, mode: Mode = Mode.UNIFIED, **kwargs: object) -> int:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=self.stop)
        spec = SequenceSpec(self.next_id, mode, prompt, (), sampling, **kwargs)  # type: ignore[arg-type]
        self.next_id += 1
        refused = admit(self.state, spec)
        if refused is not None:
            raise RefusedByEngine(refused)
        self.specs[spec.id] = spec
        self.outputs[spec.id] = []
        return spec.id

    def abort(self, sequence: int) -> None:
        self.facts.append(Aborted(sequence))

    def step(self) -> Plan:
        """One turn. In overlap the step before runs after this one was planned; in lockstep it ran before."""
        while self.results and self.state.sees(self.results[0].number):
            self.facts.append(StepDone(self.results.popleft()))
        if self.overlap and (self.state.stalled or not self.state.can_run):
            self._execute_all()
            while self.results:
                self.facts.append(StepDone(self.results.popleft()))
        facts, self.facts = self.facts, []
        self.state, planned = plan(self.state, facts)
        self.plans.append(planned)
        for gone in planned.gone:
            self.ended[gone.id] = gone.cause
        if not planned.record.is_empty:
            frame, self.chain = encode_step(planned.record, self.chain)
            self.rows[planned.record.number] = planned.rows
            if self.overlap:
                self._execute_all()
            self.frames.append(frame)
            if not self.overlap:
                self._execute_all()
        return planned

    def _execute_all(self) -> None:
        while self.frames:
            result = self.executor.execute_frame(self.frames.popleft())
            self.results.append(result)
            for row in result.sampled:
                self._publish(self.rows[result.number][row.row], row.tokens)

    def _publish(self, sequence: int, tokens: tuple[int, ...]) -> None:
        out, spec = self.outputs[sequence], self.specs[sequence]
        if not (out and out[-1] in spec.sampling.stop_token_ids) and len(out) < spec.sampling.max_tokens:
            out.extend(tokens)

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is due. Every byte is accounted for then."""
        for _ in range(max_steps):
            if not (self.facts or self.state.has_work):
                break
            planned = self.step()
            if not (planned.progressed or self.facts or self.results or self.frames):
                break  # only a fact could change anything
        else:
            raise AssertionError(f"still busy after {max_steps} steps: {self.state.sequences}")
        self.state.check_integrity()

    def generate(self, prompt: tuple[int, ...], max_tokens: int = 8) -> list[int]:
        sequence = self.submit(prompt, max_tokens)
        self.run()
        return self.outputs[sequence]


def cache_alone_by_the_books(state: SchedulerState) -> int:
    """Pages that do leave a copy of the cache, one after the other, as long as the ledger has nobody else for them."""
    cache, number = deepcopy(state.cache), 0
    while cache.evict_page(lambda ref: state.ledger.holders(ref) == (CACHE,)):
        number += 1
    return number


class RefusedByEngine(Exception):
    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused
