"""From a request's body to its prompts in tokens: small ones here, large ones in a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from sluice_gateway.http.bodies import Body, parse_json
from sluice_gateway.openai.requests import Limits, Options
from sluice_gateway.status.counters import Counters
from sluice_gateway.status.marks import GatewayMarks
from sluice_gateway.text.encoding import PARSERS, Kind, Prompts, Request, characters_of, encode_request
from sluice_gateway.text.large_requests import LargeRequests
from sluice_gateway.text.tokenizer import Tokenizer

THREAD_CHARACTERS = 16_384
"""Longer bodies are parsed off the event loop."""
ENCODE_CHARACTERS = 1024
"""Longer prompts are tokenised off it: a character takes 1 us, and up to 2."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request. `encode` is called once, or `drop` is. `is_checked`: its tokens are known to be in the
    vocabulary."""

    kind: Kind
    options: Options
    thinking: bool
    encode: Callable[[], Coroutine[Any, Any, Prompts]]
    drop: Callable[[], None]
    began_at: float
    is_checked: bool = False


class Preparation:
    """`large` None: there is no worker, and everything is done in this process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: GatewayMarks,
        large: LargeRequests | None,
        limits: Callable[[], Limits],
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._tokenizer = tokenizer
        self._marks = marks
        self._large = large
        self._limits = limits
        self._counters = counters

    async def prepare(self, body: Body, kind: Kind, within_s: float) -> Prepared:
        """Raises ApiError. The body is released once it is not needed; with an error, by the caller."""
        began_at = self._clock()
        if self._large is not None and body.is_large:
            return await self._prepare_large(self._large, body, kind, within_s, began_at)
        request: Request = await self.checked(body.joined(), PARSERS[kind])
        body.release()

        async def encode() -> Prompts:
            size, limits = characters_of(request), self._limits()
            off_loop = self._off_loop(size > ENCODE_CHARACTERS, size)
            prompts: Prompts = await off_loop(lambda: encode_request(request, self._tokenizer, limits))
            return prompts

        return Prepared(kind, request.options, request.thinking, encode, lambda: None, began_at)

    async def _prepare_large(
        self, large: LargeRequests, body: Body, kind: Kind, within_s: float, began_at: float
    ) -> Prepared:
        self._counters.large_requests += 1
        job, parsed = await large.parse(kind, body.parts, self._limits(), within_s)

        async def encode() -> Prompts:
            try:
                return await large.encode(job, within_s - (self._clock() - began_at))
            finally:
                body.release()

        def drop() -> None:
            large.drop(job)
            body.release()

        return Prepared(kind, parsed.options, parsed.thinking, encode, drop, began_at, is_checked=True)

    async def checked(self, body: bytes, parse: Callable[[Any, Limits], T]) -> T:
        """Raises ApiError."""
        limits, size = self._limits(), len(body)
        checked: T = await self._off_loop(size > THREAD_CHARACTERS, size)(lambda: parse(parse_json(body), limits))
        return checked

    def _off_loop(self, is_long: bool, size: int) -> Any:
        async def inline(work: Callable[[], Any]) -> Any:
            return work()

        def in_pool(work: Callable[[], Any]) -> Any:
            return self._marks.tokenize(size, work)

        return in_pool if is_long else inline
