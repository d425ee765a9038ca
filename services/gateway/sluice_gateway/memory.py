"""An engine in memory: the seam without a wire. Deterministic tokens, and faults on demand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from sluice_gateway.routing.engine import EngineClient, EngineLost
from sluice_gateway.routing.fleet import Member
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import (
    Ended,
    EndReason,
    EngineHello,
    GenerateReply,
    GenerateRequest,
    Load,
    Refused,
    Role,
    Route,
    TokenBatch,
)
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import TokenLogprobs

NextToken = Callable[[Sequence[int], int], int]
"""(prompt ids, position in the output) to token: a pure function, so that a retry goes on with the same text."""

Replies = asyncio.Queue[GenerateReply | EngineLost | None]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one try after it made `after` tokens: the engine dies, preempts it, fails it, or goes quiet."""

    kind: str  # die | preempt | fail | hang
    after: int = 0
    error: str = ""
    detail: str = ""


@dataclass(eq=False, slots=True)
class _Sequence:
    request: GenerateRequest
    stream: int
    fault: Fault | None
    replies: Replies
    made: int = 0
    quiet: bool = False


@dataclass(eq=False)
class MemoryEngine:
    """One engine process. `faults` and `refusals` are used up by the next tries, in order. `gate` holds the steps, and
    `voice` the answers to Load."""

    role: Role
    next_token: NextToken
    facts: dict[str, str] = field(default_factory=lambda: {"model": "memory"})
    max_running: int = 64
    vocab_size: int = 512
    max_context_tokens: int = 4096
    page_tokens: int = 16
    pid: int = 4242
    step_s: float = 0.0
    faults: deque[Fault] = field(default_factory=deque)
    refusals: deque[Refused] = field(default_factory=deque)
    draining: bool = False
    quarantined: bool = False
    not_ready: bool = False
    block_keys: tuple[bytes, ...] = ()
    requests: list[GenerateRequest] = field(default_factory=list)
    named_sources: list[tuple[str, ...]] = field(default_factory=list)
    cancelled: int = 0
    alive: bool = True
    life: int = 1

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.voice = asyncio.Event()
        self.voice.set()
        self.running: dict[int, _Sequence] = {}
        self._attached: dict[str, asyncio.Queue[TokenBatch | None]] = {}
        self._next_stream = 0
        self._step = 0
        self._work = asyncio.Event()

    @property
    def hello(self) -> EngineHello:
        return EngineHello(
            role=self.role,
            fingerprint=Fingerprint.of(self.facts),
            incarnation=f"life-{self.life}",
            max_context_tokens=self.max_context_tokens,
            page_tokens=self.page_tokens,
            source_address="" if self.role is Role.UNIFIED else f"memory-source-{self.pid}",
            pid=self.pid,
            vocab_size=self.vocab_size,
        )

    @property
    def load(self) -> Load:
        return Load(
            incarnation=f"life-{self.life}",
            running=len(self.running),
            waiting=0,
            max_running=self.max_running,
            free_pages=1000,
            total_pages=1000,
            draining=self.draining,
            quarantined=self.quarantined,
            not_ready=self.not_ready or self.quarantined,
            empty=not self.running,
            block_keys=self.block_keys,
        )

    def die(self) -> None:
        """Everything that is open breaks; nothing answers until `revive`."""
        self.alive = False
        for sequence in self.running.values():
            sequence.replies.put_nowait(EngineLost("the engine died"))
        self.running.clear()
        for queue in self._attached.values():
            queue.put_nowait(None)
        self._attached.clear()

    def revive(self) -> None:
        self.alive = True
        self.life += 1

    def open(self, request: GenerateRequest) -> tuple[_Sequence | None, Replies]:
        replies: Replies = asyncio.Queue()
        if not self.alive:
            replies.put_nowait(EngineLost("nothing listens there"))
            return None, replies
        self.requests.append(request)
        refusal = self._refusal(request)
        if refusal is not None:
            replies.put_nowait(refusal)
            return None, replies
        self._next_stream += 1
        fault = self.faults.popleft() if self.faults else None
        sequence = _Sequence(request, self._next_stream, fault, replies)
        self.running[sequence.stream] = sequence
        self._work.set()
        return sequence, replies

    def _refusal(self, request: GenerateRequest) -> Refused | None:
        if self.refusals:
            return self.refusals.popleft()
        if self.draining:
            return Refused("Draining", "it takes no more", retry_after_ms=1000)
        if request.gateway_id not in self._attached:
            return Refused("NotAttached", request.gateway_id, retry_after_ms=20)
        if len(self.running) >= self.max_running:
            return Refused("ResourceExhausted", "no running slot", retry_after_ms=20)
        return None

    def close(self, sequence: _Sequence) -> None:
        if self.running.pop(sequence.stream, None) is not None:
            self.cancelled += 1

    def attach(self, gateway_id: str) -> asyncio.Queue[TokenBatch | None]:
        if not self.alive:
            raise EngineLost("nothing listens there")
        queue: asyncio.Queue[TokenBatch | None] = asyncio.Queue()
        queue.put_nowait(TokenBatch(0, (), (), ()))
        self._attached[gateway_id] = queue
        return queue

    async def run(self) -> None:
        """The step loop: one token per running sequence and step, one batch per gateway."""
        while True:
            await self._work.wait()
            await self.gate.wait()
            await asyncio.sleep(self.step_s)
            self.step()
            if not any(not sequence.quiet for sequence in self.running.values()):
                self._work.clear()

    def step(self) -> None:
        self._step += 1
        rows: dict[str, list[tuple[int, int, TokenLogprobs | None]]] = {}
        for sequence in list(self.running.values()):
            if sequence.quiet or self._strike(sequence) or not self.alive:
                continue
            token = self._token(sequence)
            row = (sequence.request.stream, token, self._logprobs(sequence, token))
            rows.setdefault(sequence.request.gateway_id, []).append(row)
            self._end(sequence, token)
        for gateway_id, batch in rows.items():
            queue = self._attached.get(gateway_id)
            if queue is not None:
                queue.put_nowait(_batch(self._step, batch))

    def _token(self, sequence: _Sequence) -> int:
        request = sequence.request
        token = self.next_token(request.prompt_ids, len(request.output_ids) + sequence.made)
        sequence.made += 1
        return token

    def _logprobs(self, sequence: _Sequence, token: int) -> TokenLogprobs | None:
        top = sequence.request.sampling.top_logprobs
        if top is None:
            return None
        shown = max(1, top)  # an engine may send more than was asked for
        ids = tuple((token + i) % self.vocab_size for i in range(shown))
        return TokenLogprobs(-0.5, ids, tuple(-0.5 - i for i in range(shown)))

    def _strike(self, sequence: _Sequence) -> bool:
        """Whether the sequence's fault comes now."""
        fault = sequence.fault
        if fault is None or sequence.made < fault.after:
            return False
        if fault.kind == "die":
            self.die()
        elif fault.kind == "hang":
            sequence.quiet = True
        else:
            reason = EndReason.PREEMPTED if fault.kind == "preempt" else EndReason.FAILED
            self._finish(sequence, Ended(reason, sequence.made, error=fault.error, detail=fault.detail))
        return True

    def _end(self, sequence: _Sequence, token: int) -> None:
        limit = OutputLimit.of(sequence.request.sampling, len(sequence.request.output_ids))
        if (reason := limit.end_after(token, sequence.made)) is not None:
            self._finish(sequence, self._ended(sequence, reason))

    def _ended(self, sequence: _Sequence, reason: EndReason) -> Ended:
        route = Route(prefill_pid=7, decode_pid=self.pid, records=3, bytes=3072, transport="memory", chunks=1)
        return Ended(reason, sequence.made, cached_tokens=2, route=route)

    def _finish(self, sequence: _Sequence, ended: Ended) -> None:
        self.running.pop(sequence.stream, None)
        sequence.replies.put_nowait(ended)


def _batch(step: int, rows: list[tuple[int, int, TokenLogprobs | None]]) -> TokenBatch:
    return TokenBatch(
        step,
        streams=tuple(stream for stream, _, _ in rows),
        counts=(1,) * len(rows),
        tokens=tuple(token for _, token, _ in rows),
        logprobs=tuple((i, logprobs) for i, (_, _, logprobs) in enumerate(rows) if logprobs is not None),
    )


class _MemoryCall:
    def __init__(self, engine: MemoryEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._sequence, self._replies = engine.open(request)

    def cancel(self) -> None:
        if self._sequence is not None:
            self._engine.close(self._sequence)
        self._replies.put_nowait(None)

    async def reply(self) -> GenerateReply | None:
        reply = await self._replies.get()
        if isinstance(reply, EngineLost):
            raise reply
        return reply


class MemoryClient:
    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    async def hello(self) -> EngineHello:
        await asyncio.sleep(0)
        return self._answering().hello

    async def load(self, sources: tuple[str, ...] = ()) -> Load:
        if sources:
            self._engine.named_sources.append(sources)
        await self._engine.voice.wait()
        return self._answering().load

    def _answering(self) -> MemoryEngine:
        if not self._engine.alive:
            raise EngineLost("nothing listens there")
        return self._engine

    async def attach(self, gateway_id: str) -> AsyncIterator[TokenBatch]:
        queue = self._engine.attach(gateway_id)
        while (batch := await queue.get()) is not None:
            yield batch
        raise EngineLost("the engine died")

    def generate(self, request: GenerateRequest) -> _MemoryCall:
        return _MemoryCall(self._engine, request)

    async def close(self) -> None:
        return None


@dataclass
class MemoryFleet:
    """Engines by address; `factory` is what the gateway is given. Nothing listens at an unknown address."""

    engines: dict[str, MemoryEngine]

    def factory(self, member: Member) -> EngineClient:
        address = member.address
        engine = self.engines.get(address)
        if engine is None:
            engine = MemoryEngine(Role.UNIFIED, lambda _prompt, _position: 0, alive=False)
        return MemoryClient(engine)
