"""Training batches: step number to tensors, reproducible whatever the number of worker processes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from chat import Chat
from corpus import Message, fitting
from curriculum import plan
from phrases import ADJECTIVES, NOUNS
from tokenizer import PAD
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

COPIED_WEIGHT = 3.0  # of digits and of the words of names, against 1 for the fixed words around them


@dataclass(frozen=True)
class Recipe:
    """`tokens` is the size of a batch, whatever its length; `start` is the progress at which the curriculum begins."""

    tokenizer: str
    seed: int
    steps: int
    tokens: int
    start: float = 0.0

    def progress(self, step: int) -> float:
        return self.start + (1 - self.start) * step / self.steps


class Batches(Dataset[tuple[Tensor, Tensor]]):  # type: ignore[misc,unused-ignore]
    """Item `step` is (ids [B, S], weights [B, S]); a weight is above 0 where the assistant wrote that id."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._chat: Chat | None = None

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        chat = self._chat or Chat(Tokenizer.from_str(self.recipe.tokenizer))
        self._chat = chat
        rng = random.Random(f"{self.recipe.seed}/{step}")
        todo = plan(self.recipe.progress(step), rng)
        rows = self.recipe.tokens // todo.length
        ids = torch.full((rows, todo.length), chat.tokenizer.token_to_id(PAD))
        weights = torch.zeros(rows, todo.length)
        copied = {chat.tokenizer.token_to_id(f"Ġ{word}") for word in ADJECTIVES + NOUNS}
        copied |= {chat.tokenizer.token_to_id(f"{space}{digit}") for digit in range(10) for space in ("", "Ġ")}

        def length(messages: list[Message]) -> int:
            return len(chat.encode(messages)[0])

        for row in range(rows):
            messages, size = fitting(rng, todo.shape, length, todo.length)
            tokens, written = chat.encode(messages)
            ids[row, :size] = torch.tensor(tokens)
            weights[row, :size] = torch.tensor(
                [(COPIED_WEIGHT if token in copied else 1.0) * own for token, own in zip(tokens, written)]
            )
        return ids, weights


def stream(recipe: Recipe, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in step order, made ahead of time by `workers` processes (0: in this one)."""
    ahead = 8 if workers else None
    yield from DataLoader(Batches(recipe), batch_size=None, num_workers=workers, prefetch_factor=ahead)
