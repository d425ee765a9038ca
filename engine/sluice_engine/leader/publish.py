"""From results of steps to tokens of streams: what a client sees, and where its stream ends. No I/O.

The scheduler learns of a stop token one plan later; whatever a row chose after it is dropped here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from sluice_engine.leader.scheduling.sequence import SequenceSpec
from sluice_engine.step import StepResult
from sluice_protocol.generate import EndReason, TokenBatch
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import TokenLogprobs


@dataclass(slots=True)
class Stream:
    """One Generate call: `number` names it in token batches, `sent` counts its tokens there."""

    number: int
    gateway_id: str
    spec: SequenceSpec
    sent: int = 0
    end: EndReason | None = None
    limit: OutputLimit = field(init=False)

    def __post_init__(self) -> None:
        self.limit = self.spec.limit

    def take(self, token: int) -> bool:
        """Whether the client gets this token; moves `sent` and `end`."""
        if self.end is not None:
            return False
        self.sent += 1
        self.end = self.limit.end_after(token, self.sent)
        return True


@dataclass(slots=True)
class _Builder:
    streams: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def add(self, number: int, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> None:
        count = 0
        for token, logprobs in tokens:
            if logprobs is not None:
                self.logprobs.append((len(self.tokens), logprobs))
            self.tokens.append(token)
            count += 1
        if count:
            self.streams.append(number)
            self.counts.append(count)

    def build(self, step: int) -> TokenBatch:
        return TokenBatch(step, tuple(self.streams), tuple(self.counts), tuple(self.tokens), tuple(self.logprobs))


@dataclass(frozen=True, slots=True)
class Published:
    """`batches`: gateway -> tokens of this step. `ended`: streams whose last token is among them.

    `failed`: streams that get no further token, and why.
    """

    batches: Mapping[str, TokenBatch]
    ended: tuple[Stream, ...]
    failed: tuple[tuple[Stream, str], ...] = ()


def publish_step(streams: Mapping[int, Stream], rows: Mapping[int, int], result: StepResult) -> Published:
    """`streams`: by sequence; `rows`: row -> sequence, as the step was planned. Rows without a stream are skipped."""
    builders: dict[str, _Builder] = {}
    ended: list[Stream] = []
    failed: list[tuple[Stream, str]] = []
    for sampled in result.sampled:
        stream = streams.get(rows[sampled.row])
        if stream is None or stream.end is not None:
            continue
        if sampled.failed:
            stream.end = EndReason.FAILED
            failed.append((stream, sampled.failed))
            continue
        builder = builders.get(stream.gateway_id)
        if builder is None:
            builder = builders[stream.gateway_id] = _Builder()
        if len(sampled.tokens) == 1 and not sampled.logprobs:  # nearly every row of nearly every step
            token = sampled.tokens[0]
            stream.take(token)
            builder.streams.append(stream.number)
            builder.counts.append(1)
            builder.tokens.append(token)
        else:
            logprobs = sampled.logprobs or (None,) * len(sampled.tokens)
            builder.add(
                stream.number,
                [pair for pair in zip(sampled.tokens, logprobs, strict=True) if stream.take(pair[0])],
            )
        if stream.end is not None:
            ended.append(stream)
    batches = {gateway: builder.build(result.number) for gateway, builder in builders.items()}
    return Published(batches, tuple(ended), tuple(failed))


def publish_token(stream: Stream, token: int, logprobs: TokenLogprobs | None) -> Published:
    """A single token that came another way: the first one of a room."""
    builder = _Builder()
    builder.add(stream.number, [(token, logprobs)] if stream.take(token) else [])
    return Published({stream.gateway_id: builder.build(0)}, (stream,) if stream.end is not None else ())


def merge_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """One batch with the tokens of all, a row per stream, each in order. `step` is the last one's."""
    if len(batches) == 1:
        return batches[0]
    rows: defaultdict[int, list[int]] = defaultdict(list)
    told: dict[int, dict[int, TokenLogprobs]] = {}  # stream -> by index in its row
    for batch in batches:
        if len(batch.tokens) == len(batch.streams) and not batch.logprobs:  # a token each, as nearly always
            for number, token in zip(batch.streams, batch.tokens, strict=True):
                rows[number].append(token)
            continue
        at, logprobs = 0, dict(batch.logprobs)
        for number, count in zip(batch.streams, batch.counts, strict=True):
            row = rows[number]
            for index in range(at, at + count) if logprobs else ():
                if index in logprobs:
                    told.setdefault(number, {})[len(row) + index - at] = logprobs[index]
            row += batch.tokens[at : at + count]
            at += count
    starts = dict(zip(rows, accumulate(map(len, rows.values()), initial=0), strict=False))
    return TokenBatch(
        batches[-1].step,
        tuple(rows),
        tuple(map(len, rows.values())),
        tuple(chain.from_iterable(rows.values())),
        tuple((starts[number] + index, entry) for number in told for index, entry in told[number].items()),
    )
