"""Logits equal transformers 5.24.0's within 1e-4 in fp32, and our own bit for bit however a prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

TOLERANCE = 1e-4


def tokens_of(checkpoint: Any, count: int, seed: int = 7) -> list[int]:
    return [random.Random(seed + i).randrange(checkpoint.config.vocab_size) for i in range(count)]


def in_chunks(world: Any, tokens: Sequence[int], size: int) -> torch.Tensor:
    sequence = world.sequence()
    return torch.cat([world.feed((sequence, tokens[i : i + size])) for i in range(0, len(tokens), size)])


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.5, "an oracle of zeros proves nothing"
    assert (ours - theirs).abs().max().item() <= TOLERANCE
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


FROZEN = Path(__file__).parent / "frozen_logits.safetensors"


def test_logits_equal_what_transformers_gave(tiny: Any) -> None:
    """Frozen by `tests/model/freeze_logits.py`; the slow tests ask transformers itself."""
    frozen = load_file(FROZEN)
    tokens = frozen["tokens"].tolist()
    weights = load_file(tiny.directory / "model.safetensors")
    total = sum(w.double().abs().sum() for w in weights.values())
    assert total == pytest.approx(frozen["weights"].item(), rel=1e-9), "torch draws other random weights: freeze again"
    assert_same(in_chunks(tiny.world(), tokens, len(tokens)), frozen["logits"])
    assert_same(in_chunks(tiny.world(), tokens, 9), frozen["logits"])


@pytest.mark.slow
def test_the_frozen_logits_are_those_of_transformers(tiny: Any) -> None:
    frozen = load_file(FROZEN)
    assert_same(frozen["logits"], tiny.logits(frozen["tokens"].tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("perturbed", [False, True])
def test_whole_forward_equals_transformers(tiny: Any, perturbed: bool) -> None:
    tokens = tokens_of(tiny, 150)
    assert_same(in_chunks(tiny.world(perturbed=perturbed), tokens, 150), tiny.logits(tokens))


VARIANTS: dict[str, dict[str, Any]] = {
    "seed 1": {"seed": 1},
    "window 5, rates 2 and 8": {
        "seed": 2,
        "sliding_window": 5,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    },
    "one stream pair, plain rope": {"seed": 3, "hc_mult": 2, "hc_sinkhorn_iters": 3, "rope_parameters": None},
    "three streams": {"seed": 10, "hc_mult": 3, "hc_sinkhorn_iters": 5},
    "topk 1": {"seed": 4, "index_topk": 1},
    "topk beyond a block": {"seed": 5, "index_topk": 70},
    "20 experts, grouped": {"seed": 6, "n_routed_experts": 20, "num_experts_per_tok": 3},
    "all dims rotate": {"seed": 7, "partial_rotary_factor": 0.5, "index_head_dim": 18, "head_dim": 36},
    "only sliding": {"seed": 8, "layer_types": ["sliding_attention"] * 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_other_shapes_equal_transformers_whole_and_in_chunks(make_checkpoint: Any, variant: dict[str, Any]) -> None:
    checkpoint = make_checkpoint(**variant)
    tokens = tokens_of(checkpoint, 150)
    theirs = checkpoint.logits(tokens)
    whole = in_chunks(checkpoint.world(), tokens, 150)
    assert_same(whole, theirs)
    assert torch.equal(in_chunks(checkpoint.world(seed=1), tokens, 13), whole)


@pytest.mark.slow
def test_published_rates_equal_transformers(make_checkpoint: Any) -> None:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    checkpoint = make_checkpoint(seed=9, sliding_window=128, compress_rates=rates, index_topk=16)
    tokens = tokens_of(checkpoint, 301)
    theirs = checkpoint.logits(tokens)
    whole = in_chunks(checkpoint.world(page_tokens=128), tokens, 301)
    assert_same(whole, theirs)
    assert torch.equal(in_chunks(checkpoint.world(page_tokens=256), tokens, 47), whole)
    assert torch.equal(in_chunks(checkpoint.world(page_tokens=128), tokens, 1), whole)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_short_prompts_equal_transformers(tiny: Any, length: int) -> None:
    tokens = tokens_of(tiny, length, seed=length)
    assert_same(in_chunks(tiny.world(), tokens, length), tiny.logits(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("perturbed", [False, True])
def test_every_chunk_size_gives_the_same_bits(tiny: Any, perturbed: bool) -> None:
    tokens = tokens_of(tiny, 150)
    whole = in_chunks(tiny.world(), tokens, 150)
    assert_same(whole, tiny.logits(tokens))
    for size in range(1, 18):
        assert torch.equal(in_chunks(tiny.world(seed=size, perturbed=perturbed), tokens, size), whole), size


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_give_the_same_bits(tiny: Any, size: int) -> None:
    tokens = tokens_of(tiny, 70)
    assert torch.equal(in_chunks(tiny.world(seed=1), tokens, size), in_chunks(tiny.world(seed=2), tokens, 70))


@pytest.mark.parametrize("perturbed", [False, True])
def test_resume_at_every_page_boundary_gives_the_same_bits(tiny: Any, perturbed: bool) -> None:
    tokens = tokens_of(tiny, 90)
    world = tiny.world(perturbed=perturbed, pages=120)
    straight = world.sequence()
    whole = world.feed((straight, tokens))
    for boundary in range(16, 90, 16):
        first = world.sequence()
        world.feed((first, tokens[:boundary]))
        resumed = world.resume(first)
        rest = world.feed((resumed, tokens[boundary:]))
        assert torch.equal(rest, whole[boundary:]), boundary
        assert world.state_bytes(resumed) == world.state_bytes(straight)
        assert world.page_bytes(resumed) == world.page_bytes(straight)


def test_records_are_a_function_of_tokens_alone(tiny: Any) -> None:
    """Whatever the chunks, the layout, the record ids and the neighbours were."""
    tokens = tokens_of(tiny, 61)
    reference = tiny.world(seed=1)
    straight = reference.sequence()
    reference.feed((straight, tokens))
    for size, perturbed in ((1, False), (5, True), (16, False), (23, True)):
        world = tiny.world(seed=size + 1, perturbed=perturbed)
        sequence, other = world.sequence(), world.sequence()
        for i in range(0, 61, size):
            world.feed((other, tokens_of(tiny, 3, seed=i)), (sequence, tokens[i : i + size]))
        assert world.state_bytes(sequence) == reference.state_bytes(straight)
        assert world.page_bytes(sequence) == reference.page_bytes(straight)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8/fp4"])
def test_a_batch_of_32_gives_the_bits_of_each_prompt_alone(tiny: Any, precision: str) -> None:
    rng = random.Random(3)
    prompts = [tokens_of(tiny, rng.choice((1, 2, 9, 17, 40, 75)), seed=100 * i) for i in range(32)]
    crowd = tiny.world(seed=5, pages=300, precision=precision)
    held = [crowd.sequence() for _ in prompts]
    together = crowd.feed(*[(s, p[:-1] or p) for s, p in zip(held, prompts)]).split([len(p[:-1] or p) for p in prompts])
    after = crowd.feed(*[(s, [7]) for s in held])
    for i in range(0, 32, 3):
        lone = tiny.world(seed=6, precision=precision)
        sequence = lone.sequence()
        assert torch.equal(lone.feed((sequence, prompts[i][:-1] or prompts[i])), together[i]), i
        assert torch.equal(lone.feed((sequence, [7])), after[i : i + 1]), i
        assert lone.state_bytes(sequence) == crowd.state_bytes(held[i])
        assert lone.page_bytes(sequence) == crowd.page_bytes(held[i])
