"""What a stream says while there is no data: nothing, its head, or a comment; and when a comment would be a lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

COMMENT = b": keep-alive\n\n"
"""Of server-sent events: every client passes it over, and every proxy sees that the connection is in use."""
LOOKS = 4
"""The stream is looked at so often within the time after which a comment is due."""


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds. `head_s`: the head goes out by then, first event or not. `comment_s`: no longer gap without a byte.
    `evidence_s`: comments stop when the last sign of progress is older; the floor of an engine's wedge budget."""

    head_s: float = 5.0
    comment_s: float = 10.0
    evidence_s: float = 30.0


class Life:
    """Whether a request is known to make progress (law 7). `signs` are asked one by one: True is a sign of it now. The
    first one is of a request that is read and tokenised, which have bounds of their own."""

    def __init__(self, clock: Callable[[], float], evidence_s: float) -> None:
        self._clock = clock
        self._evidence_s = evidence_s
        self._seen_at = clock()
        self.signs: list[Callable[[], bool]] = [lambda: True]

    def goes_on(self) -> bool:
        now = self._clock()
        if any(sign() for sign in self.signs):
            self._seen_at = now
        return now - self._seen_at <= self._evidence_s


class Ticker:
    """Calls `open_head` once when it is due, and `comment` where no data came for so long and the request goes on.

    Its stream sets `has_data` with every write, which is all that a token costs.
    """

    def __init__(
        self, pace: Pace, open_head: Callable[[], None], comment: Callable[[], None], goes_on: Callable[[], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.has_data = False
        self._look_s = pace.comment_s / LOOKS
        self._comment, self._goes_on = comment, goes_on
        self._silent = 0
        self._head = loop.call_later(pace.head_s, open_head)
        self._look = loop.call_later(self._look_s, self._take_look)

    def _take_look(self) -> None:
        """A look earlier than is due, for the data may have come just behind the last look."""
        self._look = asyncio.get_running_loop().call_later(self._look_s, self._take_look)
        self._silent = 0 if self.has_data else self._silent + 1
        self.has_data = False
        if self._silent >= LOOKS - 1:
            self._silent = 0
            if self._goes_on():
                self._comment()
                self.has_data = False

    def stop(self) -> None:
        self._head.cancel()
        self._look.cancel()
