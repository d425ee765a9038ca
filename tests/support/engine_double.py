"""An engine in one process: the real plan and the real executor over the scripted model, joined without a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.scheduling.ledger import CACHE
from sluice_engine.leader.scheduling.sequence import Aborted, EndCause, Fact, Mode, SequenceSpec
from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.leader.step_loop import StepLoop, Turn
from sluice_engine.limits import Limits
from sluice_engine.pool import Pools, RecordPool
from sluice_engine.rank.device import BatchModel
from sluice_engine.rank.executor import Executor
from sluice_engine.rank.host_store import HostStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.scripted import Script, ScriptedModel
from sluice_engine.step import StepRecord
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
        self.loop = StepLoop(limits, self.layouts, b"salt" * 4, self.pool_plan, lockstep=not self.overlap)
        self.pools = {
            kind: RecordPool(
                self.layouts[kind],
                self.pool_plan[kind],
                np.zeros(self.pool_plan[kind] * self.layouts[kind].stride, dtype=np.uint8),
            )
            for kind in RecordKind
        }
        self.mirror = RecordMirror(self.pool_plan)
        self.executor = Executor(0, HostStore(0, self.pools), self.mirror, self.build_model(self.pools, self.mirror))
        self.turn = Turn(Plan(StepRecord(0), {}, (), (), (), (), progressed=False, tokens=0))  # the last one
        self.frames: deque[bytes] = deque()  # sent, not carried out yet
        self.chains: list[bytes] = []
        self.plans: list[Plan] = []
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, EndCause] = {}

    @property
    def state(self) -> SchedulerState:
        return self.loop.state

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 8, mode: Mode = Mode.UNIFIED, **kwargs: object) -> int:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=self.stop)
        spec = SequenceSpec(self.loop.next_sequence, mode, prompt, (), sampling, **kwargs)  # type: ignore[arg-type]
        refused = self.loop.admit(spec)
        if refused is not None:
            raise RefusedByEngine(refused)
        # One gateway a sequence, so that its tokens are found again.
        self.loop.generations[spec.id] = Generation(spec, spec.id, str(spec.id))
        self.outputs[spec.id] = []
        return spec.id

    @property
    def specs(self) -> dict[int, SequenceSpec]:
        """Of every sequence that was ever submitted."""
        return {sequence: generation.spec for sequence, generation in self.loop.generations.items()}

    def tell(self, *facts: Fact) -> None:
        for fact in facts:
            self.loop.tell(fact)

    def abort(self, sequence: int) -> None:
        self.tell(Aborted(sequence))

    def step(self) -> Plan:
        """One turn. In overlap the step before runs after this one was planned; in lockstep it runs at once."""
        if not self.loop.may_plan:
            self._execute_all()
        turn = self.turn = self.loop.plan([0], now=0.0)
        self.plans.append(turn.planned)
        for gone in turn.planned.gone:
            self.ended[gone.id] = gone.cause
        if turn.frame:
            self.chains.append(turn.chain)
            if self.overlap:
                self._execute_all()
            self.frames.append(turn.frame)
            if not self.overlap:
                self._execute_all()
        return turn.planned

    def _execute_all(self) -> None:
        while self.frames:
            outcome = self.loop.take(self.executor.execute(self.frames.popleft()), now=0.0)
            assert outcome is not None, "there is one rank"
            for gateway, batch in outcome.published.batches.items():
                self.outputs[int(gateway)].extend(batch.tokens)

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is due. Every byte is accounted for then."""
        for _ in range(max_steps):
            if not (self.loop.has_work or self.frames):
                break
            self.step()
            if not (self.turn.again or self.loop.is_computing):
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
