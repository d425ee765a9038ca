"""A token is a pure function of its own row's logits, sampling, history and position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.leader.scheduling.sampling_checks import fault_of
from sluice_engine.rank.sampling import BadLogits, Choice, Occurrences, choose_tokens, token_logprobs, uniform
from sluice_protocol.sampling import BIAS, BOUNDS, Sampling

VOCAB = 50


def logits_of(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def draw(logits: np.ndarray, count: int, **sampling: object) -> list[int]:
    s = Sampling(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    return [choose_tokens(logits, [Choice(s, position)])[0] for position in range(count)]


def occurrences(rng: np.random.Generator) -> Occurrences:
    return Occurrences.of(rng.integers(0, VOCAB, 80).tolist(), int(rng.integers(0, 80)), VOCAB)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[0, [7, 9]] = 3
    assert choose_tokens(logits, [Choice(Sampling(), 0), Choice(Sampling(), 1)]) == (7, 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = logits_of(1)
    n = 20_000
    found = np.bincount(draw(logits, n, temperature=temperature), minlength=VOCAB)
    wanted = softmax(logits[0] / temperature) * n
    big = wanted >= 5
    chi2 = ((found - wanted)[big] ** 2 / wanted[big]).sum()
    freedom = big.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)
    shifted = np.roll(wanted, 1)  # the check itself must be able to fail
    assert ((found - shifted) ** 2 / shifted).sum() > 10 * freedom


def test_uniforms_are_uniform_over_positions_seeds_and_choices() -> None:
    for draws in (
        [uniform(5, 0, i) for i in range(5000)],
        [uniform(i, 0, 5) for i in range(5000)],
        [uniform(5, i, 5) for i in range(5000)],
    ):
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert ((counts - 250) ** 2 / 250).sum() < 19 + 4 * np.sqrt(2 * 19)
        lagged = np.corrcoef(draws[:-1], draws[1:])[0, 1]
        assert abs(lagged) < 0.06


@given(st.integers(0, 10_000), st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_the_batch_does_not_matter(seed: int, rows: int) -> None:
    logits = logits_of(seed, rows)
    rng = np.random.default_rng(seed)
    choices = [
        Choice(
            Sampling(
                temperature=float(rng.choice([0.0, 0.7, 1.3])),
                top_p=float(rng.choice([1.0, 0.8])),
                top_k=int(rng.choice([0, 5])),
                min_p=float(rng.choice([0.0, 0.1])),
                presence_penalty=float(rng.choice([0.0, 0.5])),
                seed=int(rng.integers(1 << 40)),
            ),
            int(rng.integers(1000)),
            occurrences(rng),
        )
        for _ in range(rows)
    ]
    together = choose_tokens(logits, choices)
    assert together == tuple(choose_tokens(logits[i : i + 1], [choices[i]])[0] for i in range(rows))
    order = rng.permutation(rows)
    assert choose_tokens(logits[order], [choices[i] for i in order]) == tuple(together[i] for i in order)


def test_top_k_top_p_and_min_p_keep_exactly_their_sets() -> None:
    logits = logits_of(3)
    order = np.argsort(-logits[0], kind="stable")
    p = softmax(logits[0])
    assert set(draw(logits, 3000, top_k=3)) == set(order[:3].tolist())
    kept = int((np.cumsum(p[order]) < 0.6).sum()) + 1
    assert set(draw(logits, 3000, top_p=0.6)) == set(order[:kept].tolist())
    strong = {int(i) for i in order if p[i] >= 0.2 * p.max()}
    assert set(draw(logits, 3000, min_p=0.2)) == strong
    assert set(draw(logits, 50, top_p=1e-9)) == {int(order[0])}
    assert set(draw(np.zeros((1, VOCAB), np.float32), 500, top_k=2)) == {0, 1}


def test_bias_and_mask_change_what_can_be_chosen() -> None:
    logits = logits_of(4)
    best = int(logits[0].argmax())
    assert choose_tokens(logits, [Choice(Sampling(logit_bias=((17, 100.0),)), 0)]) == (17,)
    assert choose_tokens(logits, [Choice(Sampling(logit_bias=((best, -100.0),)), 0)]) != (best,)
    mask = np.zeros(VOCAB, dtype=bool)
    mask[[3, 4]] = True
    s = Sampling(temperature=5.0)
    assert {choose_tokens(logits, [Choice(s, i, mask=mask)])[0] for i in range(100)} == {3, 4}
    (nothing,) = choose_tokens(logits, [Choice(s, 0, mask=np.zeros(VOCAB, dtype=bool))])
    assert isinstance(nothing, BadLogits)
    assert "no token is allowed" in str(nothing)


def test_penalties_count_tokens() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, :4] = [3.0, 2.9, -1.0, 2.0]
    occurred = Occurrences.of([0, 1, 1, 1], 0, VOCAB)

    def greedy(**s: float) -> int:
        return choose_tokens(logits, [Choice(Sampling(**s), 0, occurred)])[0]  # type: ignore[arg-type]

    assert greedy() == 0
    assert greedy(presence_penalty=0.5) == 0  # both alike
    assert greedy(frequency_penalty=0.05) == 0
    assert greedy(presence_penalty=1.5) == 3
    assert greedy(repetition_penalty=2.0) == 3
    logits[0] = -3.0
    logits[0, 0] = -2.0
    assert greedy(repetition_penalty=2.0) != 0  # negative logits are multiplied
    logits[0, :2] = [1.0, 1.1]
    assert greedy(frequency_penalty=0.1) == 0


def test_presence_and_frequency_count_the_output_alone() -> None:
    """Counted over the prompt, the turns before pushed down what ends a turn, and no answer of a conversation ended."""
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, :2] = [1.5, 1.4]

    def greedy(prompt_tokens: int, **s: float) -> int:
        occurred = Occurrences.of([0, 0, 0, 1], prompt_tokens, VOCAB)
        return choose_tokens(logits, [Choice(Sampling(**s), 0, occurred)])[0]  # type: ignore[arg-type]

    for penalty in ("presence_penalty", "frequency_penalty"):
        assert greedy(3, **{penalty: 2.0}) == 0  # only 1 was chosen
        assert greedy(0, **{penalty: 2.0}) not in (0, 1)
    assert greedy(4, repetition_penalty=2.0) == 0  # both alike, in the prompt
    assert greedy(4, repetition_penalty=1000.0, frequency_penalty=2.0) == 0
    occurred = Occurrences.of([0], 1, VOCAB)
    occurred.add(0)
    assert choose_tokens(logits, [Choice(Sampling(presence_penalty=0.2), 0, occurred)]) == (1,)


def test_logprobs_are_the_models_own_and_best_first() -> None:
    logits = logits_of(6)[0]
    logits[[5, 9]] = 8.0
    p = np.log(softmax(logits))
    found = token_logprobs(logits, 30, 3)
    assert found.logprob == pytest.approx(p[30])
    assert found.top_ids[:2] == (5, 9)
    assert found.top_logprobs == pytest.approx([p[i] for i in found.top_ids])
    assert token_logprobs(logits, 5, 0).top_ids == ()


def test_numbers_that_are_none_are_an_error() -> None:
    logits = logits_of(7)
    logits[0, 3] = np.nan
    (bad,) = choose_tokens(logits, [Choice(Sampling(), 12)])
    assert isinstance(bad, BadLogits)
    assert "position 12" in str(bad)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, top_k=5, min_p=0.1)])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_without_numbers_fails_alone(sampling: Sampling, wrong: float) -> None:
    logits = logits_of(7, rows=3)
    fine = choose_tokens(logits, [Choice(sampling, 4)] * 3)
    logits[1] = wrong
    found = choose_tokens(logits, [Choice(sampling, 4)] * 3)
    assert isinstance(found[1], BadLogits)
    assert (found[0], found[2]) == (fine[0], fine[2])


@pytest.mark.filterwarnings("error")
@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_any_sampling_that_an_engine_takes_chooses_a_token(seed: int) -> None:
    """At every corner of the bounds, over extreme but finite logits."""
    rng = np.random.default_rng(seed)
    corners = {
        name: float(rng.choice([*bound, 1e-45 if bound.low == 0 else bound.low])) for name, bound in BOUNDS.items()
    }
    bias = ((0, float(rng.choice(BIAS))), (VOCAB - 1, float(rng.choice(BIAS))))
    s = Sampling(**corners, top_k=int(rng.choice([0, 1, 2**31 - 1])), logit_bias=bias, seed=seed)  # type: ignore[arg-type]
    assert fault_of(s, VOCAB) is None
    logits = (logits_of(seed) * float(rng.choice([0.0, 1.0, 1e37]))).astype(np.float32)
    (token,) = choose_tokens(logits, [Choice(s, 3, occurrences(rng))])
    assert isinstance(token, int)
    assert 0 <= token < VOCAB
