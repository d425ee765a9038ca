"""Parts of an answer on their way to a client, and which part a token belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice_protocol.sampling import TokenLogprobs


class Part(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Shown:
    """A token whose text is shown; `start` is the offset of that text, in characters of the choice's whole output."""

    token: int
    logprobs: TokenLogprobs
    start: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of one part that follows what was sent before. `shown`: the tokens whose text ends with it."""

    part: Part
    text: str
    shown: Sequence[Shown] = ()


class PartParser:
    """Tells the parts of an answer apart by the ids of marker tokens. The same characters written as ordinary tokens
    are text. `end_think`: the token that ends the reasoning; None: the answer has none."""

    def __init__(self, end_think: int | None = None) -> None:
        self._end_think = end_think

    @property
    def part(self) -> Part:
        """Of the tokens that come next."""
        return Part.CONTENT if self._end_think is None else Part.REASONING

    def ends_part(self, token: int) -> bool:
        """Whether this token is a marker: it belongs to no part's text, and another part follows."""
        if token != self._end_think:
            return False
        self._end_think = None
        return True
