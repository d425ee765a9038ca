import random
from pathlib import Path

import pytest
import torch
from batches import Batches, Recipe
from caches import fp4
from chat import Chat
from corpus import Message, Shape, conversation
from network import Network, Signals, Switches, configuration, initialise, round_fp4
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"
EXACT = Switches(dense=torch.tensor(False), coarse=torch.tensor(False))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@torch.no_grad()
def test_the_training_forward_agrees_with_transformers() -> None:
    config = configuration(vocab_size=320)
    model = initialise(config, seed=0).eval()
    noise = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("sinks", "position_bias", "base", "correction_bias", "norm.weight")):
            tensor += 0.2 * torch.randn(tensor.shape, generator=noise)
    ids = torch.randint(0, 320, (2, 160), generator=noise)
    reference = model(ids, use_cache=False).logits
    assert (Network(model).forward(ids, EXACT, Signals()) - reference).abs().max() < 1e-4


@torch.no_grad()
def test_right_padding_changes_nothing_before_it() -> None:
    model = initialise(configuration(vocab_size=320), seed=0).eval()
    ids = torch.randint(0, 320, (1, 96), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([ids, torch.full((1, 32), 2)], 1)
    short, long = (Network(model).forward(x, EXACT, Signals()) for x in (ids, padded))
    assert (long[:, :96] - short).abs().max() < 1e-5


def test_only_imitation_trains_the_indexer() -> None:
    model = initialise(configuration(vocab_size=320), seed=0)
    signals = Signals()
    ids = torch.randint(0, 320, (1, 96), generator=torch.Generator().manual_seed(1))
    logits = Network(model).forward(ids, EXACT, signals)
    logits.square().mean().backward()
    indexer = [p for n, p in model.named_parameters() if ".indexer." in n]
    assert all(p.grad is None for p in indexer)
    sum(s.masked_fill(s.isinf(), 0).sum() for s in signals.scores).backward()
    assert all(p.grad is not None for p in indexer)


def test_a_seed_gives_one_conversation() -> None:
    shape = Shape(sentences=(3, 9), turns=(1, 3))
    first, again = (conversation(random.Random(5), shape) for _ in range(2))
    assert first == again


def test_every_answer_quotes_the_notes() -> None:
    shape = Shape(sentences=(3, 12), turns=(1, 3), small_talk=0.0)
    for seed in range(200):
        messages = conversation(random.Random(seed), shape)
        told = " ".join(m.content for m in messages if m.role != "assistant")
        for message in messages:
            if message.role == "assistant" and message.content.endswith(tuple(f"{d}." for d in range(10))):
                assert all(word.strip(",.") in told for word in message.content.split() if word[0].isdigit())


@pytest.mark.parametrize(
    "text", ["", "plain", "caf\u00e9 \u4e16\u754c \U0001f642", "12 3.4\n\n\ttabs  ", "</think> <unk>"]
)
def test_the_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_turns_concatenate(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    first = [Message("system", "Notes."), Message("user", "Hi"), Message("assistant", "Hello!")]
    ids, written = chat.encode(first)
    assert ids == [*chat.prompt(first[:2]), *chat.text("Hello!"), chat.eos]
    assert written == [False] * len(chat.prompt(first[:2])) + [True] * (len(chat.text("Hello!")) + 1)
    assert chat.prompt([*first, Message("user", "Hi")])[: len(ids)] == ids


def test_a_step_has_one_batch_whoever_makes_it(tokenizer: Tokenizer) -> None:
    recipe = Recipe(tokenizer.to_str(), seed=3, steps=100, tokens=1920)
    for step in (0, 40, 99):
        (ids, weights), (again, same) = Batches(recipe)[step], Batches(recipe)[step]
        assert torch.equal(ids, again)
        assert torch.equal(weights, same)
        assert ids.shape[1] % 16 == 0


def test_training_and_evaluation_round_to_the_same_fp4() -> None:
    rows = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_fp4(rows), fp4(rows))
