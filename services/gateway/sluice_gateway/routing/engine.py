"""The seam between the gateway and one engine: what the gateway needs of it, whatever carries it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from sluice_gateway.routing.fleet import Member
from sluice_protocol.generate import EngineHello, GenerateReply, GenerateRequest, Load, TokenBatch


class EngineLost(Exception):
    """The engine cannot be reached, went away, or broke the protocol. Nothing more will come from this call."""


class GenerateCall(Protocol):
    """One try in flight."""

    async def reply(self) -> GenerateReply | None:
        """At its end, once. None after a `cancel`; raises `EngineLost` when the engine goes away."""
        ...

    def cancel(self) -> None:
        """End the work on the engine. May be called at any time, any number of times."""


class EngineClient(Protocol):
    """Every method raises `EngineLost`, and nothing else, when the engine does not answer."""

    async def hello(self) -> EngineHello: ...

    async def load(self, sources: tuple[str, ...] = ()) -> Load:
        """`sources`: addresses that a reader may be sent to, which it looks after from then on; empty: nothing new."""
        ...

    def attach(self, gateway_id: str) -> AsyncIterator[TokenBatch]: ...

    def generate(self, request: GenerateRequest) -> GenerateCall: ...

    async def close(self) -> None: ...


ClientFactory = Callable[[Member], EngineClient]
"""Member to client. Making one does no I/O."""
