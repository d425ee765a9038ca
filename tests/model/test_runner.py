"""The runner behind `BatchModel`: same tokens alone, together, chunked, resumed; refuses what cannot be meant."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from sluice_engine.model.page_table import Records
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.runner import ModelRunner
from sluice_engine.step import RecordRef, RowBinding, RowWork, SampledRow, StepDivergence
from sluice_protocol.sampling import Sampling
from sluice_records import PoolPlan, RecordKind

PAGE = 16


class Driver:
    """A leader in miniature: binds rows, appends pages, feeds chunks."""

    def __init__(self, checkpoint: Any, mirror: Any = None, gate: Any = None, **options: Any) -> None:
        self.world = checkpoint.world(pages=220, **options)
        extra = {} if gate is None else {"gate": gate}
        self.runner = ModelRunner(
            checkpoint.config,
            checkpoint.weights,
            self.world.layouts,
            self.world.pools,
            mirror or self.world.views._mirror,
            **extra,
        )
        self.bound: dict[int, RowBinding] = {}
        self.own: dict[int, list[int]] = {}

    def bind(
        self, row: int, tokens: Sequence[int], sampling: Sampling | None = None, *, outputs: Sequence[int] = ()
    ) -> None:
        binding = RowBinding(
            row,
            self.world.take(RecordKind.STATE),
            (),
            0,
            sampling or Sampling(),
            history=(*tokens, *outputs),
            prompt_tokens=len(tokens),
        )
        self.runner.bind(binding)
        self.bound[row], self.own[row] = binding, []

    def room(self, row: int, end: int) -> None:
        while len(self.own[row]) * PAGE < end:
            self.own[row].append(self.world.take(RecordKind.PAGE))
            self.runner.append_pages(row, (self.own[row][-1],))

    def step(self, *works: RowWork) -> dict[int, int]:
        for work in works:
            self.room(work.row, work.start + work.q_len)
        return {s.row: s.tokens[0] for s in self.runner.run(works)}

    def generate(self, prompts: dict[int, list[int]], count: int, chunk: int) -> dict[int, list[int]]:
        """All rows at once, chunks and decode rows mixed."""
        done = dict.fromkeys(prompts, 0)
        out: dict[int, list[int]] = {row: [] for row in prompts}
        while any(len(tokens) < count for tokens in out.values()):
            works = []
            for row, prompt in prompts.items():
                if len(out[row]) >= count:
                    continue
                if done[row] < len(prompt):
                    part = tuple(prompt[done[row] : done[row] + chunk])
                    works.append(RowWork(row, done[row], part, done[row] + len(part) == len(prompt)))
                else:
                    works.append(RowWork(row, done[row], (), True))
                done[row] += works[-1].q_len
            for row, token in self.step(*works).items():
                out[row].append(token)
        return out


def prompts_of(count: int) -> dict[int, list[int]]:
    g = torch.Generator().manual_seed(11)
    return {
        row: torch.randint(2, 320, (int(torch.randint(1, 60, (1,), generator=g)),), generator=g).tolist()
        for row in range(count)
    }


@pytest.mark.slow
def test_greedy_equals_transformers_generate(tiny: Any) -> None:
    prompts = prompts_of(4)
    driver = Driver(tiny)
    for row, prompt in prompts.items():
        driver.bind(row, prompt)
    ours = driver.generate(prompts, 12, chunk=16)
    for row, prompt in prompts.items():
        with torch.no_grad():
            theirs = tiny.oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert ours[row] == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_do_not_depend_on_company_or_chunks(tiny: Any, temperature: float) -> None:
    prompts = prompts_of(9)

    def sampling(row: int) -> Sampling:
        penalty = 0.5 if row % 2 else 0.0
        return Sampling(temperature=temperature, top_p=0.9, seed=row, presence_penalty=penalty)

    crowd = Driver(tiny)
    for row, prompt in prompts.items():
        crowd.bind(row, prompt, sampling(row))
    together = crowd.generate(prompts, 10, chunk=16)
    for row in (0, 4, 7):
        alone = Driver(tiny, seed=row + 20, perturbed=True)
        alone.bind(row, prompts[row], sampling(row))
        assert alone.generate({row: prompts[row]}, 10, chunk=5) == {row: together[row]}


def test_a_retry_over_prompt_and_output_continues_the_same_stream(tiny: Any) -> None:
    prompt, sampling = prompts_of(1)[0], Sampling(temperature=1.0, seed=3, frequency_penalty=0.3)
    driver = Driver(tiny)
    driver.bind(0, prompt, sampling)
    whole = driver.generate({0: prompt}, 12, chunk=16)[0]
    driver.bind(1, prompt, sampling, outputs=whole[:5])
    assert driver.generate({1: prompt + whole[:5]}, 7, chunk=16)[1] == whole[5:]


def test_a_sequence_from_elsewhere_is_fed_its_last_token(tiny: Any) -> None:
    prompt = prompts_of(1)[0]
    driver = Driver(tiny)
    driver.bind(0, prompt)
    whole = driver.generate({0: prompt}, 6, chunk=16)[0]
    driver.bind(1, prompt)
    driver.step(RowWork(1, 0, tuple(prompt), False))
    state, pages = driver.bound[1].state, tuple(driver.own[1])
    driver.runner.bind(RowBinding(2, state, pages, len(prompt), Sampling(), last_token=whole[0]))
    driver.own[2] = list(pages)
    found = [driver.step(RowWork(2, len(prompt) + n, (), True))[2] for n in range(5)]
    assert found == whole[1:]


def test_logprobs_come_with_the_token_when_asked(tiny: Any) -> None:
    driver = Driver(tiny)
    driver.bind(0, [5, 6], Sampling(top_logprobs=3))
    driver.room(0, 2)
    (sampled,) = driver.runner.run((RowWork(0, 0, (5, 6), True),))
    assert sampled.logprobs[0].top_ids[0] == sampled.tokens[0]
    world = tiny.world()
    raw = torch.log_softmax(world.feed((world.sequence(), [5, 6]))[-1].double(), -1)
    assert sampled.logprobs[0].logprob == pytest.approx(raw.max().item(), abs=1e-4)
    assert len(sampled.logprobs[0].top_logprobs) == 3


def test_work_that_cannot_be_meant_is_a_divergence(tiny: Any) -> None:
    driver = Driver(tiny)
    with pytest.raises(StepDivergence, match="row 3 is not bound"):
        driver.runner.run((RowWork(3, 0, (1,), True),))
    driver.bind(0, [1])
    with pytest.raises(StepDivergence, match="has 0 pages"):
        driver.runner.run((RowWork(0, 0, (1,), True),))
    driver.room(0, 1)
    with pytest.raises(StepDivergence, match="has sampled none yet"):
        driver.runner.run((RowWork(0, 0, (), True),))
    with pytest.raises(StepDivergence, match="outside"):
        driver.runner.run((RowWork(0, 0, (320,), True),))
    driver.runner.free(0)
    with pytest.raises(StepDivergence, match="row 0 is not bound"):
        driver.runner.free(0)
    assert driver.runner.run(()) == ()


def test_records_in_the_wrong_state_are_not_touched(tiny: Any) -> None:
    mirror = RecordMirror(PoolPlan(220, 40, 40))
    driver = Driver(tiny, mirror=mirror)
    driver.bind(0, list(range(20)))
    driver.room(0, 20)
    refs = [RecordRef(RecordKind.PAGE, page, 1) for page in driver.own[0]]
    state = RecordRef(RecordKind.STATE, driver.bound[0].state, 1)
    work = (RowWork(0, 0, tuple(range(10)), True),)
    with pytest.raises(StepDivergence, match="FREE"):
        driver.runner.run(work)
    mirror.reserve([state])
    mirror.reserve([refs[0]])
    mirror.begin_fill([refs[1]])
    with pytest.raises(StepDivergence, match="FILLING"):
        driver.runner.run(work)
    mirror.commit([refs[1]])
    driver.runner.run(work)  # page 1 is closed, but only page 0 is written
    mirror.close([refs[0]])
    before = driver.world.pools[RecordKind.PAGE].buffer.copy()
    with pytest.raises(StepDivergence, match="closed"):
        driver.runner.run((RowWork(0, 10, (1, 2), True),))
    assert (driver.world.pools[RecordKind.PAGE].buffer == before).all()


@pytest.mark.parametrize("kind", [RecordKind.STATE, RecordKind.PAGE])
def test_without_the_gate_a_late_load_would_be_read(tiny: Any, kind: RecordKind) -> None:
    """A loader fills a record only when somebody waits for it: with the gate nothing differs, without it bits do."""
    tokens = prompts_of(3)[2] * 3
    world = tiny.world()
    filled = world.sequence()
    world.feed((filled, tokens[:32]))
    wanted = world.feed((world.resume(filled), tokens[32:40]))

    def late(gated: bool) -> torch.Tensor:
        sequence = world.resume(filled)
        sequence.pages = sequence.pages[:2]
        pool = world.pools[kind]
        late_records = [sequence.state] if kind is RecordKind.STATE else list(sequence.pages)
        kept = {record: pool.record(record).copy() for record in late_records}
        loaded: set[tuple[int, int]] = set()

        def gate(layer: int, asked: RecordKind, records: Records) -> None:
            for record in records.flatten().tolist():
                if asked is kind and record in kept and (layer, record) not in loaded:
                    loaded.add((layer, record))
                    for section in world.layouts[kind].of_layer(layer):
                        part = slice(section.offset, section.offset + section.nbytes)
                        pool.record(record)[part] = kept[record][part]

        for record in late_records:
            pool.zero(record)
        world.views._gate = gate if gated else lambda layer, asked, records: None
        found = world.feed((sequence, tokens[32:40]))
        for record in late_records:
            pool.record(record)[:] = kept[record]
        return found

    assert torch.equal(late(gated=True), wanted)
    assert not torch.equal(late(gated=False), wanted)


def test_records_that_do_not_exist_are_an_error(tiny: Any) -> None:
    """Negative numbers would count from the end, of memory and of the mirror."""
    for state, page in ((-1, 3), (3, -1), (40, 3), (3, 220)):
        driver = Driver(tiny)
        driver.runner.bind(RowBinding(0, state, (page,), 0, Sampling()))
        with pytest.raises(IndexError, match=" of "):
            driver.runner.run((RowWork(0, 0, (1,), True),))


NEVER_319 = ((319, -100.0),)  # so that no healthy row is fed it


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logit_bias=NEVER_319),
        Sampling(temperature=0.8, top_logprobs=3, presence_penalty=0.5, logit_bias=NEVER_319),
    ],
)
def test_a_row_whose_logits_are_no_numbers_fails_alone(make_checkpoint: Any, sampling: Sampling) -> None:
    """One token's embedding is poisoned: whoever is fed it fails, and stays so until it is bound again."""
    checkpoint = make_checkpoint()
    poisoned = copy.copy(checkpoint)
    poisoned.weights = replace(checkpoint.weights, embed=checkpoint.weights.embed.clone())
    poisoned.weights.embed[319] = float("nan")
    prompts = {row: prompt[:40] for row, prompt in prompts_of(3).items()}
    healthy, sick = Driver(checkpoint), Driver(poisoned)
    for row, prompt in prompts.items():
        told = [*prompt, 5] if row != 1 else [*prompt, 319]
        for driver in (healthy, sick):
            driver.bind(row, told, sampling)
            driver.room(row, len(told) + 4)
        prompts[row] = told

    def step(driver: Driver, n: int) -> dict[int, SampledRow]:
        works = [
            RowWork(row, len(prompt) + n - 1 if n else 0, () if n else tuple(prompt), True)
            for row, prompt in prompts.items()
        ]
        return {sampled.row: sampled for sampled in driver.runner.run(tuple(works))}

    for n in range(4):
        expected, found = step(healthy, n), step(sick, n)
        assert (found[0], found[2]) == (expected[0], expected[2])
        assert found[1] == SampledRow(1, (), failed=f"logits at position {len(prompts[1])} are not finite")
    sick.runner.free(1)
    sick.bind(1, [7, 8], sampling)
    assert 1 in sick.step(RowWork(1, 0, (7, 8), True))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_no_poisoned_weight_ends_the_rank(make_checkpoint: Any, share: float) -> None:
    """Selections and gathers over numbers that are none: the rows fail, whichever tensor it is."""
    checkpoint = make_checkpoint()
    for name, tensor in tensors_of(checkpoint.weights):
        kept = tensor.clone()
        tensor[torch.rand(tensor.shape, generator=torch.Generator().manual_seed(3)) < share] = float("nan")
        try:
            driver = Driver(checkpoint)
            driver.bind(0, list(range(2, 90)))
            driver.room(0, 100)
            for start, tokens in ((0, tuple(range(2, 90))), (88, ()), (89, ())):
                (sampled,) = driver.runner.run((RowWork(0, start, tokens, True),))
                assert bool(sampled.failed) != bool(sampled.tokens), name
        finally:
            tensor.copy_(kept)


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All floating tensors inside, whatever holds them."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif is_dataclass(value):
        for entry in fields(value):
            yield from tensors_of(getattr(value, entry.name), f"{name}.{entry.name}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from tensors_of(entry, f"{name}[{index}]")
