"""What lives from one Hello to the loss of the Attach stream: the tries, and whose tokens are whose."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sluice_gateway.routing.engine import EngineClient, GenerateCall
from sluice_gateway.routing.reasons import TOKENS_LOST
from sluice_gateway.status.histograms import Latencies
from sluice_gateway.status.latency import Gaps
from sluice_protocol.generate import Ended, EngineHello, GenerateRequest, Refused, TokenBatch
from sluice_protocol.sampling import TokenLogprobs

logger = logging.getLogger(__name__)

Logprobs = Sequence[TokenLogprobs | None] | None
Push = Callable[[Sequence[int], Logprobs], bool]
"""Takes the next tokens of a try, with one logprobs entry each if asked for. True: no more are wanted."""

STREAMS = 1 << 32
"""Stream numbers begin anew after so many; no try lives that long."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A try that ended without a word from the engine. `has_begun` False: the engine never had it."""

    reason: str
    detail: str
    has_begun: bool = True


TryResult = Ended | Refused | Lost


class Try:
    """One Generate call and the tokens that belong to it: those of stream `stream`.

    `is_handed_over`: the first token is another engine's, and no second one has come."""

    def __init__(
        self, call: GenerateCall, stream: int, push: Push, on_first: Callable[[], None], is_handed_over: bool = False
    ) -> None:
        self.call = call
        self.stream = stream
        self.received = 0
        self.told_at = 0.0
        self.lost: Lost | None = None
        self.is_handed_over = is_handed_over
        self._push = push
        self._on_first = on_first
        self._enough: asyncio.Event | None = None
        self._target = 0

    def deliver(self, tokens: Sequence[int], logprobs: Logprobs) -> None:
        if not self.received:
            self._on_first()
        self.received += len(tokens)
        try:
            if self._push(tokens, logprobs):
                self.call.cancel()
        except Exception as error:  # input ends its own stream only
            logger.exception("a token could not be handled")
            self.fail(Lost("GatewayFailed", f"{type(error).__name__}: {error}"))
        if self._enough is not None and self.received >= self._target:
            self._enough.set()

    def fail(self, lost: Lost) -> None:
        self.lost = self.lost or lost
        self.call.cancel()
        if self._enough is not None:
            self._enough.set()

    async def wait_for(self, num_tokens: int, timeout_s: float) -> Lost | None:
        """Return once so many tokens came; what went wrong, if they did not."""
        if self.received < num_tokens and self.lost is None:
            self._target, self._enough = num_tokens, asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._enough.wait()
            except TimeoutError:
                return Lost(TOKENS_LOST, f"{self.received} of {num_tokens} tokens came")
        if self.received > num_tokens:
            return Lost(TOKENS_LOST, f"{self.received} tokens came, {num_tokens} were announced")
        return self.lost if self.received < num_tokens else None


class Session:
    """`deliver` is the hot path: once per step, for all tries of this gateway on the engine."""

    def __init__(
        self, client: EngineClient, hello: EngineHello, clock: Callable[[], float], latencies: Latencies | None = None
    ) -> None:
        self.client = client
        self.gaps = Gaps()
        self._latencies = latencies or Latencies()
        self._clock = clock
        self.hello = hello
        self.attached = asyncio.Event()
        self._tries: dict[int, Try] = {}
        self._next_stream = 0

    def begin(
        self, request: GenerateRequest, push: Push, on_first: Callable[[], None], is_handed_over: bool = False
    ) -> Try:
        """Its tokens have their place from here on, however early they come."""
        stream = self._next_stream = (self._next_stream + 1) % STREAMS
        call = self.client.generate(replace(request, stream=stream))
        attempt = self._tries[stream] = Try(call, stream, push, on_first, is_handed_over)
        return attempt

    def deliver(self, batch: TokenBatch) -> None:
        tokens, at, now = batch.tokens, 0, self._clock()
        kept, gaps, waited_s = self._latencies.gap, self.gaps.recent, 0.0
        last, place = -1.0, 0
        bounds, counts = kept.bounds, kept.counts  # `Histogram.add` and `Gaps.add`, without two calls per token
        by_index = dict(batch.logprobs) if batch.logprobs else None
        for stream, count in zip(batch.streams, batch.counts):
            row = tokens[at : at + count]
            logprobs = None if by_index is None else [by_index.get(i) for i in range(at, at + count)]
            at += count
            attempt = self._tries.get(stream)
            if attempt is not None:  # late tokens of an ended try are dropped
                if attempt.received and count:
                    since_s = now - attempt.told_at
                    gap_s = since_s / count
                    gaps.append((now, gap_s))
                    if attempt.is_handed_over:
                        attempt.is_handed_over = False
                        self._latencies.handoff.add(since_s)
                    else:
                        if gap_s != last:  # most rows of a step had their last tokens with one other step
                            last, place = gap_s, bisect_left(bounds, gap_s)
                        counts[place] += count
                        waited_s += since_s
                attempt.told_at = now
                attempt.deliver(row, logprobs)
        kept.total += waited_s

    def end(self, attempt: Try) -> None:
        attempt.call.cancel()
        self._tries.pop(attempt.stream, None)

    def fail_all(self, lost: Lost) -> None:
        for attempt in list(self._tries.values()):
            attempt.fail(lost)
