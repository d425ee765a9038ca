"""What a client sees of the steps' results."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.publish import merge_batches, publish_step, publish_token
from sluice_engine.leader.scheduling.sequence import Mode, SequenceSpec
from sluice_engine.step import SampledRow, StepResult
from sluice_protocol.generate import EndReason, TokenBatch
from sluice_protocol.sampling import Sampling, TokenLogprobs


def stream(number: int, *, max_tokens: int = 10, outputs: tuple[int, ...] = (), gateway: str = "g") -> Generation:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(0,))
    return Generation(SequenceSpec(number, Mode.UNIFIED, (1, 2), outputs, sampling), number, gateway)


def result(*rows: tuple[int, tuple[int, ...]], number: int = 7) -> StepResult:
    return StepResult(number, 0, tuple(SampledRow(row, tokens) for row, tokens in rows))


def test_tokens_of_a_step_go_out_in_one_batch_per_gateway():
    streams = {10: stream(1), 11: stream(2, gateway="h"), 12: stream(3)}
    published = publish_step(streams, {0: 10, 1: 11, 2: 12}, result((0, (5,)), (1, (6,)), (2, (7,))))
    assert published.batches["g"] == TokenBatch(7, (1, 3), (1, 1), (5, 7))
    assert published.batches["h"] == TokenBatch(7, (2,), (1,), (6,))
    assert published.ended == ()


def test_the_surplus_token_after_a_stop_is_dropped():
    streams = {10: stream(1)}
    first = publish_step(streams, {0: 10}, result((0, (0,))))
    assert [s.end for s in first.ended] == [EndReason.STOP]
    surplus = publish_step(streams, {0: 10}, result((0, (9,)), number=8))
    assert surplus.batches == {}
    assert streams[10].sent == 1


def test_several_tokens_of_one_row_end_at_the_stop_among_them():
    streams = {10: stream(1)}
    published = publish_step(streams, {0: 10}, result((0, (4, 0, 9))))
    assert published.batches["g"].tokens == (4, 0)
    assert published.ended[0].end is EndReason.STOP


def test_what_earlier_tries_produced_counts_against_the_length():
    streams = {10: stream(1, max_tokens=3, outputs=(8, 8))}
    published = publish_step(streams, {0: 10}, result((0, (5,))))
    assert published.ended[0].end is EndReason.LENGTH


def test_a_failed_row_ends_its_own_stream_once():
    streams = {10: stream(1), 11: stream(2)}
    told = StepResult(7, 0, (SampledRow(0, (), failed="no numbers"), SampledRow(1, (6,))))
    published = publish_step(streams, {0: 10, 1: 11}, told)
    assert published.batches["g"] == TokenBatch(7, (2,), (1,), (6,))
    assert published.failed == ((streams[10], "no numbers"),)
    assert (published.ended, streams[10].end, streams[10].sent) == ((), EndReason.FAILED, 0)
    surplus = publish_step(streams, {0: 10}, StepResult(8, 0, (SampledRow(0, (), failed="no numbers"),)))
    assert surplus.failed == ()


def test_a_generation_that_is_left_out_gets_no_token_of_the_step():
    streams = {10: stream(1), 11: stream(2)}
    published = publish_step(streams, {0: 10, 1: 11}, result((0, (5,)), (1, (6,))), without={10})
    assert published.batches["g"] == TokenBatch(7, (2,), (1,), (6,))
    assert (streams[10].sent, published.ended) == (0, ())


def test_rows_without_a_stream_are_nobodys():
    assert publish_step({}, {0: 10}, result((0, (5,)))).batches == {}


def test_the_first_token_of_a_room():
    one = stream(1, max_tokens=1)
    published = publish_token(one, 5, TokenLogprobs(-0.5))
    assert published.batches["g"].logprobs == ((0, TokenLogprobs(-0.5)),)
    assert published.ended == (one,)


rows = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 99), min_size=1, max_size=3)), max_size=4)


@given(st.lists(rows, min_size=1, max_size=5))
def test_merged_batches_say_the_same_to_each_stream_in_the_same_order_and_in_one_row(steps):
    batches = [
        TokenBatch(
            number,
            tuple(s for s, _ in step),
            tuple(len(t) for _, t in step),
            tuple(x for _, t in step for x in t),
            ((0, TokenLogprobs(float(number))),) if step else (),
        )
        for number, step in enumerate(steps)
    ]
    merged = merge_batches(batches)

    def told(batches: Iterable[TokenBatch]) -> dict[int, list[tuple[int, float | None]]]:
        """Per stream its tokens, each with the logprob that belongs to it."""
        out: dict[int, list[tuple[int, float | None]]] = {}
        for batch in batches:
            at, logprobs = 0, dict(batch.logprobs)
            for number, count in zip(batch.streams, batch.counts, strict=True):
                for index in range(at, at + count):
                    entry = logprobs.get(index)
                    out.setdefault(number, []).append((batch.tokens[index], entry.logprob if entry else None))
                at += count
        return out

    assert told([merged]) == told(batches)
    assert merged.step == batches[-1].step
    if len(batches) > 1:
        assert len(set(merged.streams)) == len(merged.streams)
