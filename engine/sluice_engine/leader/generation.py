"""A `Generate` call inside an engine: what its client has been sent, and how it ended. No I/O."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sluice_engine.leader.scheduling.sequence import SequenceSpec
from sluice_protocol.generate import Ended, EndReason, Route
from sluice_protocol.outputs import OutputLimit
from sluice_runtime.tracing import NO_TRACER, Span


@dataclass(slots=True, eq=False)
class Generation:
    """`number` names the call in the token batches of its gateway; `sent` counts its tokens there.

    `end` is set with the last token, or when a token could not be chosen. `last_word` is the answer to the call: it is
    set once, by `finish`. A sequence of the engine's own has no gateway. `arrived`: seconds, by the leader's clock.
    """

    spec: SequenceSpec
    number: int = 0
    gateway_id: str = ""
    source_address: str = ""
    request_id: str = ""
    arrived: float = 0.0
    sent: int = 0
    end: EndReason | None = None
    cached_tokens: int = 0
    route: Route = field(default_factory=Route)
    span: Span = field(default_factory=lambda: NO_TRACER.begin(""))
    last_word: Ended | None = None
    sequence: int = field(init=False)
    limit: OutputLimit = field(init=False)
    _waiter: asyncio.Future[Ended] | None = None

    def __post_init__(self) -> None:
        self.sequence, self.limit = self.spec.id, self.spec.limit

    def take(self, token: int) -> bool:
        """Whether the client gets this token; moves `sent` and `end`."""
        if self.end is not None:
            return False
        self.sent += 1
        self.end = self.limit.end_after(token, self.sent)
        return True

    def finish(self, reason: EndReason, error: str = "", detail: str = "") -> bool:
        """Set the last word. False when it was set before: then nothing changes."""
        if self.last_word is not None:
            return False
        self.last_word = Ended(reason, self.sent, self.cached_tokens, error, detail, self.route)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self.last_word)
        return True

    async def wait(self) -> Ended:
        """The last word, once it is there. For one caller."""
        if self.last_word is not None:
            return self.last_word
        self._waiter = asyncio.get_running_loop().create_future()
        return await self._waiter
