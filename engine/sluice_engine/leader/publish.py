"""From the results of steps to the tokens that clients see. No I/O.

The scheduler learns of a stop token one plan later; the tokens that a row chose after it are dropped here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from sluice_engine.leader.generation import Generation
from sluice_engine.step import StepResult
from sluice_protocol.generate import EndReason, TokenBatch
from sluice_protocol.sampling import TokenLogprobs


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
    """`batches`: gateway -> tokens of this step. `ended`: generations whose last token is among them.

    `failed`: generations that get no further token, and why.
    """

    batches: Mapping[str, TokenBatch]
    ended: tuple[Generation, ...] = ()
    failed: tuple[tuple[Generation, str], ...] = ()


def publish_step(
    generations: Mapping[int, Generation],
    rows: Mapping[int, int],
    result: StepResult,
    without: Collection[int] = (),
) -> Published:
    """`generations`: by sequence; `rows`: row -> sequence, as the step was planned. Rows without a generation are
    skipped, and so are the sequences in `without`."""
    builders: dict[str, _Builder] = {}
    ended: list[Generation] = []
    failed: list[tuple[Generation, str]] = []
    for sampled in result.sampled:
        sequence = rows[sampled.row]
        generation = generations.get(sequence)
        if generation is None or generation.end is not None or (without and sequence in without):
            continue
        if sampled.failed:
            generation.end = EndReason.FAILED
            failed.append((generation, sampled.failed))
            continue
        builder = builders.get(generation.gateway_id)
        if builder is None:
            builder = builders[generation.gateway_id] = _Builder()
        if len(sampled.tokens) == 1 and not sampled.logprobs:  # nearly every row of nearly every step
            token = sampled.tokens[0]
            generation.take(token)
            builder.streams.append(generation.number)
            builder.counts.append(1)
            builder.tokens.append(token)
        else:
            logprobs = sampled.logprobs or (None,) * len(sampled.tokens)
            builder.add(
                generation.number,
                [pair for pair in zip(sampled.tokens, logprobs, strict=True) if generation.take(pair[0])],
            )
        if generation.end is not None:
            ended.append(generation)
    batches = {gateway: builder.build(result.number) for gateway, builder in builders.items()}
    return Published(batches, tuple(ended), tuple(failed))


def publish_token(generation: Generation, token: int, logprobs: TokenLogprobs | None) -> Published:
    """A single token that did not come from a step: the first one of a handoff."""
    builder = _Builder()
    builder.add(generation.number, [(token, logprobs)] if generation.take(token) else [])
    ended = (generation,) if generation.end is not None else ()
    return Published({generation.gateway_id: builder.build(0)}, ended)


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
