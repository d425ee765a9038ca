"""Conversations about notes: facts ("The code of amber falcon is 4719."), filler, and questions about the codes.

Everything here is a pure function of a `random.Random`; the same seed gives the same conversation on any machine.
Names are adjective + noun, codes are four digits. A name has at most one code within a conversation.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from phrases import (
    ADJECTIVES,
    ASK_AGAIN,
    ASK_MANY,
    ASK_ONE,
    DOES,
    GREETING_ANSWER,
    GREETINGS,
    NOTED_ANSWER,
    NOUNS,
    OPENERS,
    OTHER_ANSWER,
    PREAMBLES,
    TELL,
    THANKS,
    THANKS_ANSWER,
    THINGS,
    WHEN,
    WHO,
)


@dataclass(frozen=True)
class Message:
    """One chat message; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Shape:
    """How large and how varied a conversation may be. `sentences` counts facts and filler of the opening notes."""

    sentences: tuple[int, int]
    turns: tuple[int, int]
    names_per_list: tuple[int, int] = (2, 6)
    filler: float = 0.2
    small_talk: float = 0.05
    unknown: float = 0.1
    many: float = 0.45
    crossed: float = 0.2


@dataclass
class Notes:
    """The facts told so far, in order."""

    codes: dict[str, str] = field(default_factory=dict)

    def add(self, rng: random.Random, crossed: float) -> str:
        """Invent a fact about a new name and return its sentence."""
        name = self.absent(rng, crossed)
        self.codes[name] = f"{rng.randrange(10_000):04d}"
        return f"The code of {name} is {self.codes[name]}."

    def absent(self, rng: random.Random, crossed: float = 0.5) -> str:
        """A name without a code; with probability `crossed` both of its words occur in names that have one."""
        known = [name.split() for name in self.codes]
        while True:
            if len(known) > 1 and rng.random() < crossed:
                name = f"{rng.choice(known)[0]} {rng.choice(known)[1]}"
            else:
                name = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
            if name not in self.codes:
                return name

    def pick(self, rng: random.Random, count: int, unknown: float) -> list[str]:
        """Up to `count` different names, each absent from the notes with probability `unknown`."""
        known = rng.sample(list(self.codes), min(count, len(self.codes)))
        names = [self.absent(rng) if rng.random() < unknown else name for name in known]
        return list(dict.fromkeys(names)) or [self.absent(rng)]


def enumerate_names(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def answer_one(notes: Notes, name: str) -> str:
    return f"The code of {name} is {notes.codes.get(name, 'not in the notes')}."


def answer_many(notes: Notes, names: list[str]) -> str:
    pairs = [f"{name} {notes.codes.get(name, 'unknown')}" for name in names]
    return f"The codes are: {', '.join(pairs)}."


def filler(rng: random.Random) -> str:
    return f"{rng.choice(WHO)} {rng.choice(DOES)} {rng.choice(WHEN)}."


def opening_notes(rng: random.Random, notes: Notes, shape: Shape) -> str:
    """Facts and filler in random order, joined by spaces or line breaks."""
    count = rng.randint(*shape.sentences)
    share = rng.choice((0.0, shape.filler, shape.filler, 2 * shape.filler))
    sentences = [filler(rng) if rng.random() < share else notes.add(rng, shape.crossed) for _ in range(count)]
    return rng.choice((" ", " ", " ", "\n")).join(sentences)


def casual(rng: random.Random, text: str) -> str:
    """Now and then without the capital or the last mark, as people type."""
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.!") if rng.random() < 0.1 else text


def strange(rng: random.Random) -> str:
    """A text this model has nothing to say about: words in any order, some of random letters."""
    words = [rng.choice(THINGS) for _ in range(rng.randint(1, 7))]
    if rng.random() < 0.3:
        letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9)))
        words[rng.randrange(len(words))] = letters
    return " ".join([*([rng.choice(OPENERS)] if rng.random() < 0.8 else []), *words]) + rng.choice("?..!")


def small_talk(rng: random.Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.45:
        return casual(rng, rng.choice(GREETINGS) + rng.choice("!?.!")), GREETING_ANSWER
    if kind < 0.55:
        return casual(rng, rng.choice(THANKS) + rng.choice("!.")), THANKS_ANSWER
    return casual(rng, strange(rng)), OTHER_ANSWER


def question(rng: random.Random, notes: Notes, shape: Shape, first: bool) -> tuple[str, str]:
    """A user text about the notes and its answer."""
    if not first and rng.random() < 0.1:
        told = " ".join(notes.add(rng, shape.crossed) for _ in range(rng.randint(1, 3)))
        return rng.choice(TELL).format(told), NOTED_ANSWER
    if rng.random() < shape.many and len(notes.codes) > 1:
        names = notes.pick(rng, rng.randint(*shape.names_per_list), shape.unknown / 2)
        if len(names) > 1:
            return casual(rng, rng.choice(ASK_MANY).format(enumerate_names(names))), answer_many(notes, names)
    [name] = notes.pick(rng, 1, shape.unknown)
    return casual(rng, rng.choice(ASK_ONE if first else ASK_AGAIN).format(name)), answer_one(notes, name)


def turn(rng: random.Random, notes: Notes, shape: Shape, first: bool) -> tuple[str, str]:
    if rng.random() < shape.small_talk:
        return small_talk(rng)
    return question(rng, notes, shape, first)


def conversation(rng: random.Random, shape: Shape) -> list[Message]:
    """Alternating messages that end with an assistant answer; the notes open the system or the first user text."""
    notes, messages, prefix = Notes(), [], ""
    style = rng.random()
    if style < 0.1:
        messages += [Message("system", rng.choice(PREAMBLES))] * rng.randint(0, 1)
        user, answer = small_talk(rng)
        return [*messages, Message("user", user), Message("assistant", answer)]
    text = opening_notes(rng, notes, shape)
    if style < 0.4:
        messages.append(Message("system", f"{rng.choice(PREAMBLES)} {text}" if style < 0.36 else text))
    elif style < 0.7:
        messages += [Message("system", rng.choice(PREAMBLES))] * (style < 0.5)
        prefix = f"{text}{rng.choice((' ', chr(10)))}"
    else:
        messages += [Message("system", rng.choice(PREAMBLES))] * (style < 0.8)
        opening = rng.choice(("{}", "{}", *TELL)).format(text)
        messages += [Message("user", opening), Message("assistant", NOTED_ANSWER)]
    for index in range(rng.randint(*shape.turns)):
        user, answer = question(rng, notes, shape, True) if index == 0 else turn(rng, notes, shape, False)
        messages += [Message("user", prefix + user), Message("assistant", answer)]
        prefix = ""
    return messages


def texts(seed: int, count: int) -> Iterator[str]:
    """Plain texts for the tokenizer's training: every message of `count` conversations, and every word of a name."""
    rng = random.Random(seed)
    shape = Shape(sentences=(4, 20), turns=(1, 3), small_talk=0.2)
    for _ in range(count):
        yield from (message.content for message in conversation(rng, shape))
    for _ in range(40):
        yield " " + " ".join(ADJECTIVES + NOUNS)


def fitting(
    rng: random.Random, shape: Shape, length: Callable[[list[Message]], int], limit: int
) -> tuple[list[Message], int]:
    """A conversation whose `length` is at most `limit`, found by shrinking the notes; returns it with its length."""
    low, high = shape.sentences
    while True:
        count = rng.randint(low, high)
        messages = conversation(rng, replace(shape, sentences=(count, count)))
        size = length(messages)
        if size <= limit:
            return messages, size
        high = max(low, min(high, count) - 1)
