"""The pure plan over the real executor."""

from __future__ import annotations

import pytest
from engine_double import PAGE, Engine, RefusedByEngine, cache_alone_by_the_books, tiny_layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.leader.scheduling import step_builder
from sluice_engine.leader.scheduling.admission import pages_of_cache_alone, starving
from sluice_engine.leader.scheduling.ledger import RecordState
from sluice_engine.leader.scheduling.sequence import EndCause, LeaseEnded, Mode, Phase
from sluice_protocol.engine_spec import SnapshotPolicy
from sluice_records import Perturbation, PoolPlan, RecordKind


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7 + i * i) % 64 for i in range(length))


def alone(tokens: tuple[int, ...], max_tokens: int = 8, **kwargs: object) -> list[int]:
    return Engine(**kwargs).generate(tokens, max_tokens)


def test_one_request_gets_all_its_tokens_and_leaves_only_the_cache(engine):
    assert len(engine.generate(prompt(40), 10)) == 10
    assert not engine.state.sequences
    assert engine.state.ledger.count(RecordKind.STATE).free == engine.pool_plan.states


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 100])
def test_tokens_do_not_depend_on_chunks(length):
    expected = alone(prompt(length), chunk_tokens=1024, step_tokens=2048)
    assert alone(prompt(length), chunk_tokens=8, step_tokens=8) == expected
    assert alone(prompt(length), overlap=True) == expected


def test_tokens_do_not_depend_on_the_batch(engine):
    prompts = [prompt(5 + 9 * i, i) for i in range(8)]
    ids = [engine.submit(p, 6 + i) for i, p in enumerate(prompts)]
    engine.run()
    for i, (sequence, tokens) in enumerate(zip(ids, prompts, strict=True)):
        assert engine.outputs[sequence] == alone(tokens, 6 + i)


def test_a_prefix_hit_resumes_from_the_snapshot_and_changes_nothing(engine):
    first = engine.generate(prompt(50), 8)
    second = engine.submit(prompt(50), 8)
    engine.run()
    assert engine.outputs[second] == first
    gone = [g for p in engine.plans for g in p.gone if g.id == second]
    assert gone[0].cached_tokens == 48


def test_cached_and_fresh_pages_have_equal_digests():
    fresh, cached = Engine(), Engine()
    for _ in range(2):
        cached.generate(prompt(50), 8)
    fresh.generate(prompt(50), 8)

    def digests(engine: Engine) -> dict[bytes, int]:
        out = {}
        for ref in engine.state.cache.references():
            trailer = engine.pools[ref.kind].trailer(ref.record)
            assert engine.pools[ref.kind].digest(ref.record, trailer.identity) == trailer.digest
            out[trailer.identity] = trailer.digest
        return out

    assert digests(fresh) == digests(cached)
    assert len(digests(fresh)) == 50 // PAGE + (57 // PAGE - 50 // PAGE) + 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_ends_the_row_after_one_surplus_step(overlap):
    plain = alone(prompt(20), 12)
    stop = plain[5]
    engine = Engine(overlap=overlap, stop=(stop,))
    sequence = engine.submit(prompt(20), 12)
    engine.run()
    assert engine.outputs[sequence] == plain[: plain.index(stop) + 1]
    sampled = sum(sequence in p.rows.values() for p in engine.plans)
    assert sampled == plain.index(stop) + 2


@pytest.mark.parametrize("overlap", [False, True])
def test_pressure_preempts_the_newest_and_nothing_is_lost(overlap):
    small = Engine(pool_plan=PoolPlan(9, 4, 2), max_running=4, overlap=overlap)
    ids = [small.submit(prompt(14, i), 30) for i in range(3)]
    small.run()
    assert sum(len(p.record.rows_bound) for p in small.plans) > 3, "nobody was preempted: the test tests nothing"
    for i, sequence in enumerate(ids):
        assert small.outputs[sequence] == alone(prompt(14, i), 30)


def grants_of(engine: Engine, tokens: int) -> list[tuple[int, bool]]:
    """(records, final) of each grant of one room over `tokens` tokens."""
    engine.submit(prompt(tokens), 8, mode=Mode.SOURCE)
    engine.run()
    return [(len(g.records), g.final) for p in engine.plans for g in p.grants]


def test_pages_are_granted_as_chunks_finish_but_the_last_few_with_the_end(engine):
    assert grants_of(engine, 40) == [(2, False), (4, True)]


def test_what_is_worth_a_pull_is_granted_at_once_also_before_the_last_chunk(engine, monkeypatch):
    monkeypatch.setattr(step_builder, "LEAST_GRANT_BYTES", 2 * engine.layouts[RecordKind.PAGE].record_bytes)
    assert grants_of(engine, 40) == [(2, False), (2, False), (2, True)]


def test_a_source_holds_its_records_until_the_lease_ends(engine):
    sequence = engine.submit(prompt(20), 8, mode=Mode.SOURCE)
    engine.run()
    grants = [g for p in engine.plans for g in p.grants]
    assert [(index, valid) for g in grants for index, _, valid in g.records] == [(0, 8), (1, 8), (2, 4), (0, 20)]
    assert [g.final for g in grants] == [True]
    assert engine.state.sequences[sequence].phase is Phase.HELD
    for grant in grants:
        for _, ref, valid in grant.records:
            trailer = engine.pools[ref.kind].trailer(ref.record)
            assert (trailer.generation, trailer.valid_tokens) == (ref.generation, valid)
            assert engine.state.ledger.is_closed(ref)
    engine.tell(LeaseEnded(sequence))
    engine.run()
    assert engine.ended[sequence] is EndCause.FINISHED
    assert engine.state.ledger.count(RecordKind.STATE).free == engine.pool_plan.states


def test_what_ranks_only_forget_makes_no_step_of_its_own(engine):
    """Rows given back and lives that ended wait for a step that has something to do, and are all told then."""
    sequence = engine.submit(prompt(20), 8, mode=Mode.SOURCE)
    engine.run()
    engine.tell(LeaseEnded(sequence))
    engine.run()
    sent = [p.record for p in engine.plans if not p.record.is_empty]
    assert all(record.work for record in sent)
    assert not any(record.rows_freed or record.released for record in sent)
    engine.generate(prompt(20, 1), 1)
    told = [p.record for p in engine.plans if p.record.rows_freed or p.record.released]
    assert (len(told), told[0].rows_freed) == (1, (sent[0].rows_bound[0].row,))
    assert [ref.kind for ref in told[0].released] == [RecordKind.PAGE, RecordKind.STATE]
    assert engine.state.ledger.count(RecordKind.STATE).free == engine.pool_plan.states


def test_a_source_grants_nothing_for_a_single_token(engine):
    sequence = engine.submit(prompt(20), 1, mode=Mode.SOURCE)
    engine.run()
    assert len(engine.outputs[sequence]) == 1
    assert not [g for p in engine.plans for g in p.grants]
    engine.tell(LeaseEnded(sequence))


def test_pages_the_reader_has_are_not_granted(engine):
    sequence = engine.submit(prompt(36), 8, mode=Mode.SOURCE, have_prefix=3)
    engine.run()
    kinds = [(r.kind, i) for p in engine.plans for g in p.grants for i, r, _ in g.records]
    assert kinds == [(RecordKind.PAGE, 3), (RecordKind.PAGE, 4), (RecordKind.STATE, 0)]
    engine.tell(LeaseEnded(sequence))


@pytest.mark.parametrize(
    ("length", "max_tokens", "reason"),
    [(2000, 8, "ContextTooLong"), (600, 8, "LargerThanPool"), (8, 0, "NothingToProduce")],
)
def test_what_can_never_run_is_refused_at_once(length, max_tokens, reason):
    with pytest.raises(RefusedByEngine) as info:
        Engine().submit(prompt(length), max_tokens)
    assert (info.value.refused.reason, info.value.refused.retry_after_ms) == (reason, 0)


def test_a_full_engine_refuses_with_a_hint():
    engine = Engine(max_running=2)
    for i in range(2):
        engine.submit(prompt(9, i))
        engine.step()
    with pytest.raises(RefusedByEngine) as info:
        engine.submit(prompt(9))
    assert info.value.refused.reason == "NoRowFree"
    assert info.value.refused.retry_after_ms > 0
    engine.run()


def test_snapshots_of_outputs_make_the_next_turn_resumable():
    engine = Engine(snapshot_outputs=True, snapshots=SnapshotPolicy.EVERY_PAGE)
    answer = engine.generate(prompt(20), 25)
    following = (*prompt(20), *answer, 5, 6, 7)
    sequence = engine.submit(following, 8)
    engine.run()
    gone = next(g for p in engine.plans for g in p.gone if g.id == sequence)
    assert gone.cached_tokens == 40
    assert engine.outputs[sequence] == alone(following, 8)


traces = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 60), st.integers(1, 24), st.integers(0, 3)),
        st.tuples(st.just("source"), st.integers(1, 60), st.integers(1, 24), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("lease-ended"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def drive(trace, *, overlap: bool, perturbation: Perturbation | None = None) -> Engine:
    engine = Engine(
        pool_plan=PoolPlan(20, 6, 2),
        max_running=5,
        overlap=overlap,
        snapshot_outputs=True,
        stop=(3, 9),
        layouts=tiny_layouts(perturbation),
    )
    for kind, a, b, seed in trace:
        if kind in ("submit", "source"):
            try:
                engine.submit(prompt(a, seed), b, mode=Mode.UNIFIED if kind == "submit" else Mode.SOURCE)
            except RefusedByEngine:
                continue
        elif kind == "abort":
            engine.abort(a)
        elif kind == "lease-ended":
            if a in engine.specs and engine.specs[a].mode is Mode.SOURCE:
                engine.tell(LeaseEnded(a))
        else:
            for _ in range(a):
                engine.step()
                engine.state.check_integrity()
                assert pages_of_cache_alone(engine.state) == cache_alone_by_the_books(engine.state)
    for sequence, spec in engine.specs.items():
        if spec.mode is Mode.SOURCE:
            engine.tell(LeaseEnded(sequence))
    engine.run()
    assert not engine.state.sequences
    for kind in RecordKind:
        count = engine.state.ledger.count(kind)
        assert (count.filling, count.stranded) == (0, 0)
        assert count.total == engine.pool_plan[kind]
    return engine


@given(traces)
@settings(max_examples=60, deadline=None)
def test_any_trace_keeps_the_books_and_the_answers(trace):
    engine = drive(trace, overlap=False)
    for sequence, spec in engine.specs.items():
        if spec.mode is Mode.UNIFIED and engine.ended[sequence] is EndCause.FINISHED:
            expected = alone(spec.prompt, spec.sampling.max_tokens, stop=(3, 9))
            assert engine.outputs[sequence] == expected


@given(traces)
@settings(max_examples=60, deadline=None)
def test_lockstep_and_overlap_plan_the_same_steps(trace):
    lockstep, overlap = drive(trace, overlap=False), drive(trace, overlap=True)
    assert lockstep.chains == overlap.chains
    assert lockstep.outputs == overlap.outputs


@given(traces)
@settings(max_examples=20, deadline=None)
def test_a_perturbed_layout_changes_no_token(trace):
    assert drive(trace, overlap=False).outputs == drive(trace, overlap=False, perturbation=Perturbation(7)).outputs


def test_a_record_in_the_wrong_state_is_a_divergence(engine):
    engine.generate(prompt(20))
    ref = next(iter(engine.state.cache.references()))
    assert engine.state.ledger.state(ref) is RecordState.LIVE
    with pytest.raises(Exception, match="LIVE and closed"):
        engine.mirror.check_writable(ref.kind, ref.record)


def test_who_waits_while_the_cache_alone_holds_the_pages_starves_and_who_waits_for_others_does_not():
    """A pool that is full of cached prefixes is the usual state of an engine that has run for a while."""
    engine = Engine(pool_plan=PoolPlan(12, 8, 8))
    for seed in range(6):
        engine.generate(prompt(3 * PAGE, seed), 2)
    state = engine.state
    free = state.ledger.num_free(RecordKind.PAGE)
    assert free < 8, "the cache holds most of the pool"
    long = engine.submit(prompt(8 * PAGE, 9), 4 * PAGE)
    assert starving(state) == (long, 1)
    while state.waiting:
        engine.step()
    assert starving(state) == (0, 0)
    for _ in range(3):
        engine.step()
    state.waiting.append(long)  # another one of its size: its pages are the first one's
    assert starving(state) == (0, 0)
    state.waiting.clear()
    engine.run()
