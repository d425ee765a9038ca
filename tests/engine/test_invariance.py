"""Greedy answers of the trained model do not depend on load: alone, in a batch of 32, chunked, cached, preempted,
handed over, under a perturbed layout. Cached and handed-over arms have bitwise equal records too."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_double import Engine
from handoff_double import Handoff
from tokenizers import Tokenizer

from sluice_engine.model.config import load_model_config
from sluice_engine.model.weights import load_weights
from sluice_engine.pool import Pools
from sluice_engine.rank.device import BatchModel
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.runner import ModelRunner
from sluice_gateway.openai.conversation import parse_messages
from sluice_gateway.text.template import encode_chat
from sluice_gateway.text.tokenizer import load_tokenizer
from sluice_protocol.engine_spec import SnapshotPolicy
from sluice_records import CachePrecision, Layouts, Perturbation, PoolPlan, RecordKind, build_layouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"
NUM_PROMPTS = 40
MAX_TOKENS = 64
PAGE_TOKENS = 16


@cache
def held_out() -> tuple[tuple[tuple[int, ...], str], ...]:
    """(prompt ids, answer): spread over all lengths."""
    rows = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // NUM_PROMPTS)][:NUM_PROMPTS]
    return tuple((encode(r["messages"]), r["answer"]) for r in rows)


def encode(messages: list[dict[str, str]]) -> tuple[int, ...]:
    """As the gateway does it."""
    config, _ = config_and_weights()
    return encode_chat(parse_messages(messages), False, load_tokenizer(str(MODEL)), config.vocab_size)


@cache
def config_and_weights() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    config = load_model_config(MODEL)
    return config, load_weights(MODEL, config)


@cache
def eos() -> int:
    return int(json.loads((MODEL / "config.json").read_text())["eos_token_id"])


def layouts(precision: str = "fp32", perturbation: Perturbation | None = None) -> Layouts:
    config, _ = config_and_weights()
    return build_layouts(config.geometry(), CachePrecision.parse(precision), PAGE_TOKENS, perturbation=perturbation)


def engine(told: Layouts | None = None, **kwargs: Any) -> Engine:
    config, weights = config_and_weights()
    shape = told or layouts()

    def build(pools: Pools, mirror: RecordMirror) -> BatchModel:
        return ModelRunner(config, weights, shape, pools, mirror)

    settings: dict[str, Any] = {
        "pool_plan": PoolPlan(64 * 40, 64, 64),
        "max_running": 64,
        "chunk_tokens": 64,
        "step_tokens": 192,
        "layouts": shape,
        "stop": (eos(),),
        "vocab_size": config.vocab_size,
        "build_model": build,
    }
    return Engine(**(settings | kwargs))


@cache
def alone() -> tuple[tuple[int, ...], ...]:
    """Every prompt in an engine that has nothing else to do and has cached nothing."""
    return tuple(tuple(engine(snapshots=SnapshotPolicy.NEVER).generate(prompt, MAX_TOKENS)) for prompt, _ in held_out())


def together(built: Engine) -> tuple[tuple[int, ...], ...]:
    ids = [built.submit(prompt, MAX_TOKENS) for prompt, _ in held_out()]
    built.run()
    return tuple(tuple(built.outputs[sequence]) for sequence in ids)


def digests(built: Engine) -> dict[bytes, int]:
    """Identity -> digest of everything in the cache, each checked against its bytes."""
    out = {}
    for ref in built.state.cache.references():
        trailer = built.pools[ref.kind].trailer(ref.record)
        assert built.pools[ref.kind].digest(ref.record, trailer.identity) == trailer.digest
        out[trailer.identity] = trailer.digest
    return out


def test_alone_the_answers_are_right():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for tokens, (_, answer) in zip(alone(), held_out(), strict=True):
        assert tokens[-1] == eos()
        assert tokenizer.decode(list(tokens[:-1])) == answer


def test_in_a_batch_of_32():
    built = engine(step_tokens=64 * 40)
    assert together(built) == alone()
    assert max(len(p.record.work) for p in built.plans if p.record.work) >= 32


@pytest.mark.parametrize("chunk_tokens", [16, 32, 1024])
def test_chunked(chunk_tokens):
    assert together(engine(chunk_tokens=chunk_tokens, step_tokens=chunk_tokens)) == alone()


def test_overlapped():
    assert together(engine(overlap=True)) == alone()


def test_from_the_prefix_cache_with_equal_records():
    built, fresh = engine(), engine()
    assert together(built) == alone()
    together(fresh)
    again = together(built)
    assert again == alone()
    cached = [gone.cached_tokens for p in built.plans for gone in p.gone][NUM_PROMPTS:]
    assert min(cached) >= PAGE_TOKENS
    assert digests(built) == digests(fresh)


def test_after_preemption():
    outputs, preempted = [], 0
    for start in range(0, NUM_PROMPTS, 4):
        group = held_out()[start : start + 4]
        pages = sum(-(-len(prompt) // PAGE_TOKENS) for prompt, _ in group) + 1
        built = engine(pool_plan=PoolPlan(pages, 8, 4))
        ids = [built.submit(prompt, MAX_TOKENS) for prompt, _ in group]
        built.run()
        outputs += [tuple(built.outputs[sequence]) for sequence in ids]
        preempted += sum(len(p.record.rows_bound) for p in built.plans) - len(ids)
    assert tuple(outputs) == alone()
    assert preempted > 0


def test_handed_over_with_equal_records():
    handoff, unified = Handoff(engine(), engine()), engine()
    ids = [handoff.submit(prompt, MAX_TOKENS) for prompt, _ in held_out()]
    handoff.run()
    assert tuple(tuple(handoff.outputs[sequence]) for sequence in ids) == alone()
    assert together(unified) == alone()
    there, here = digests(unified), digests(handoff.reader)
    assert len(here) > NUM_PROMPTS
    pages = {key: value for key, value in there.items() if key in here}
    assert pages == {key: value for key, value in here.items() if key in there}
    assert len(pages) == len(here)


@pytest.mark.parametrize("seed", [1, 2])
def test_under_a_perturbed_layout(seed):
    assert together(engine(layouts(perturbation=Perturbation(seed)))) == alone()


@pytest.mark.parametrize("precision", ["fp32/fp8", "fp32/fp4", "bf16/bf16", "bf16/fp8"])
def test_with_a_smaller_cache_the_answers_stay_right(precision):
    """Coarser keys and KV may change a token; what the model knows must survive."""
    right = sum(a == b for a, b in zip(together(engine(layouts(precision))), alone(), strict=True))
    assert right >= NUM_PROMPTS - 1


# -- corruption: what the tests above would catch --------------------------------------------------------------------


def corrupted(change: Callable[[Engine, int], None]) -> tuple[int, ...]:
    """The sample question, with the cache changed between prefill and the first decode step."""
    prompt = encode(json.loads((MODEL / "sample.json").read_text())["messages"])
    built = engine()
    sequence = built.submit(prompt, MAX_TOKENS)
    while built.state.sequences[sequence].computed < len(prompt):
        built.step()
    change(built, sequence)
    built.run()
    return tuple(built.outputs[sequence])


def swap_pages(kinds: tuple[str, ...]) -> Callable[[Engine, int], None]:
    """Swap the named sections of the second page (the asked fact ends there) and the seventh."""

    def change(built: Engine, sequence: int) -> None:
        pages = built.state.sequences[sequence].pages
        pool = built.pools[RecordKind.PAGE]
        one, other = pool.record(pages[1].record), pool.record(pages[6].record)
        for section in pool.layout.sections:
            if section.kind.value in kinds:
                span = slice(section.offset, section.offset + section.nbytes)
                one[span], other[span] = other[span].copy(), one[span].copy()

    return change


def test_swapping_the_index_keys_of_one_page_breaks_the_sample_answer():
    right = corrupted(lambda built, sequence: None)
    assert corrupted(swap_pages(("index_keys",))) != right


def test_swapping_whole_pages_consistently_changes_nothing():
    """The control: rows carry their own rope, so a consistent swap must pass."""
    right = corrupted(lambda built, sequence: None)
    assert corrupted(swap_pages(("index_keys", "csa_kv"))) == right
