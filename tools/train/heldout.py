"""Write a model's held-out prompts: `python tools/train/heldout.py models/recall-1m --seed 20261129`.

Each line of heldout.jsonl is {"messages": [...], "answer": "...", "asked": [names], "slice": "..."}. The generator is
the training corpus under another seed; conversations repeat a training one only by chance (one code is 1 in 10 000).
"""

import argparse
import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from chat import Chat
from corpus import Message, Shape, conversation
from phrases import GREETING_ANSWER, OTHER_ANSWER
from tokenizers import Tokenizer


@dataclass(frozen=True)
class Slice:
    """`count` conversations whose prompt has `low`..`high` tokens and whose answer has at least `answer` tokens."""

    name: str
    count: int
    low: int
    high: int
    answer: int
    shape: Shape


def one(fewest: int, most: int) -> Shape:
    return Shape((fewest, most), (1, 1), many=0.0, small_talk=0.0)


def many(fewest: int, most: int) -> Shape:
    return Shape((fewest, most), (1, 1), names_per_list=(3, 6), many=1.0, small_talk=0.0)


SLICES = (
    Slice("one, 60-159", 40, 60, 159, 1, one(3, 12)),
    Slice("one, 160-319", 40, 160, 319, 1, one(10, 28)),
    Slice("one, 320-511", 40, 320, 511, 1, one(24, 46)),
    Slice("one, 512-640", 24, 512, 640, 1, one(42, 58)),
    Slice("many, 60-319", 32, 60, 319, 24, many(4, 26)),
    Slice("many, 320-600", 32, 320, 600, 24, many(24, 54)),
    Slice("2-3 turns", 48, 60, 600, 1, Shape((3, 40), (2, 3))),
    Slice("small talk", 16, 3, 60, 1, Shape((1, 1), (1, 1))),
)


def asked(answer: str) -> list[str]:
    """The names in an answer that came with a code, in order; none for fixed sentences."""
    return re.findall(r"(\w+ \w+)(?: is)? \d{4}", answer) if answer.startswith("The code") else []


def draw(rng: random.Random, chat: Chat, wanted: Slice) -> list[Message]:
    """Rejection sampling until the slice's conditions hold."""
    while True:
        messages = conversation(rng, wanted.shape)
        prompt, answer = len(chat.prompt(messages[:-1])), len(chat.text(messages[-1].content))
        alone = (len([m for m in messages if m.role == "user"]) == 1) == (wanted.name != "2-3 turns")
        talk = wanted.name != "small talk" or messages[-1].content in (GREETING_ANSWER, OTHER_ANSWER)
        if wanted.low <= prompt <= wanted.high and answer >= wanted.answer and alone and talk:
            return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=20261129)
    options = parser.parse_args()
    chat, rng = Chat(Tokenizer.from_file(str(options.folder / "tokenizer.json"))), random.Random(options.seed)
    lines = []
    for wanted in SLICES:
        for _ in range(wanted.count):
            *messages, answer = draw(rng, chat, wanted)
            lines.append(
                {
                    "messages": [asdict(m) for m in messages],
                    "answer": answer.content,
                    "asked": asked(answer.content),
                    "slice": wanted.name,
                }
            )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (options.folder / "heldout.jsonl").write_text(text)
    long = sum(len(chat.text(str(line["answer"]))) >= 24 for line in lines)
    print(f"{len(lines)} prompts, {long} with answers >= 24 tokens")


if __name__ == "__main__":
    main()
