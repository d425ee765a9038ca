"""Clients that connect and ask nothing, or never come to the end of asking, keep nobody out and fill nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice_gateway import serve
from sluice_gateway.lobby import HEAD_S, NEXT_S, Bounds, Lobby, bounds_of
from sluice_gateway.serve import MAX_HEAD_BYTES

READY = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
BOUNDS = Bounds(most=30, idle=20)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "own_bounds", lambda: BOUNDS)


class Guests:
    def __init__(self, stack: Any) -> None:
        self.port = int(stack.url.rsplit(":", 1)[1])
        self.all: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def come(self, words: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.all.append((reader, writer))
        writer.write(words)
        return reader, writer

    async def ask(self) -> bytes:
        reader, writer = await self.come(READY)
        try:
            return await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        finally:
            writer.close()


@pytest.fixture
async def guests(start: Any) -> AsyncIterator[Guests]:
    made = Guests(await start())
    yield made
    for _, writer in made.all:
        writer.transport.abort()


async def is_hung_up_on(reader: asyncio.StreamReader, within_s: float = 10.0) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), within_s) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("words", [b"", b"GET /readyz HTTP/1.1\r\nHost: "], ids=["nothing", "half a head"])
async def test_a_client_gets_through_any_number_that_ask_nothing(guests: Guests, words: bytes) -> None:
    idle = [await guests.come(words) for _ in range(3 * BOUNDS.most)]
    assert b"200" in await guests.ask()
    assert await is_hung_up_on(idle[0][0])
    assert not await is_hung_up_on(idle[-1][0], 0.2)


async def test_between_two_requests_a_connection_is_idle_too(guests: Guests) -> None:
    kept = [await guests.come(READY) for _ in range(BOUNDS.idle + 1)]
    answers = [await asyncio.wait_for(reader.readuntil(b"\r\n"), 10) for reader, _ in kept]
    assert all(b"200" in answer for answer in answers)
    rest = [await asyncio.wait_for(reader.readuntil(b"}"), 10) for reader, _ in kept[:1]]
    assert rest
    await guests.come()
    assert await is_hung_up_on(kept[0][0])


async def test_who_is_being_served_is_none_of_them(start: Any) -> None:
    stack = await start()
    for address in ("p1", "d1"):
        stack[address].gate.clear()
    asking = [asyncio.create_task(stack.complete()) for _ in range(3)]
    await stack.until(lambda: stack.gateway.dispatcher.running + stack.gateway.dispatcher.queued == 3)
    guests = Guests(stack)
    for _ in range(2 * BOUNDS.most):
        await guests.come()
    for address in ("p1", "d1"):
        stack[address].gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3
    for _, writer in guests.all:
        writer.transport.abort()


async def test_when_all_connections_are_served_the_next_is_told_so(start: Any) -> None:
    stack = await start()
    for address in ("p1", "d1"):
        stack[address].gate.clear()
    guests = Guests(stack)
    body = b'{"model":"m","prompt":"x","max_tokens":1}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    for _ in range(BOUNDS.most):
        await guests.come(request % len(body) + body)
    await stack.until(lambda: stack.gateway.counters.requests == BOUNDS.most)
    reader, _ = await guests.come()
    told = await asyncio.wait_for(reader.read(), 10)
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in told
    assert stack.gateway.counters.turned_away == 1
    for address in ("p1", "d1"):
        stack[address].gate.set()
    assert b" 200 " in await asyncio.wait_for(guests.all[0][0].readuntil(b"\r\n"), 10)
    for _, writer in guests.all:
        writer.transport.abort()


async def test_a_head_without_end_is_refused_before_it_fills_anything(guests: Guests) -> None:
    reader, writer = await guests.come(b"GET /readyz HTTP/1.1\r\n")
    sent = 0
    while sent < 64 * MAX_HEAD_BYTES and not writer.is_closing():
        writer.write(b"X-Filler: " + b"x" * 4000 + b"\r\n")
        sent += 4012
        try:
            await asyncio.wait_for(writer.drain(), 10)
        except ConnectionError:
            break
        await asyncio.sleep(0)
        if reader.at_eof():
            break
    assert sent < 32 * MAX_HEAD_BYTES
    assert b"200" in await guests.ask()


async def test_a_long_head_that_ends_is_served(guests: Guests) -> None:
    filler = b"X-Filler: " + b"x" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    reader, _ = await guests.come(b"GET /readyz HTTP/1.1\r\nHost: x\r\n" + filler + b"\r\n")
    assert re.match(rb"HTTP/1.1 200 ", await asyncio.wait_for(reader.readuntil(b"\r\n"), 10))


class Named:
    def __init__(self) -> None:
        self.is_out = False

    def hang_up(self) -> None:
        self.is_out = True


def test_each_has_his_time_and_no_more() -> None:
    now = 0.0
    lobby = Lobby(BOUNDS, lambda: now)
    fresh, kept, served = Named(), Named(), Named()
    lobby.enter(fresh, HEAD_S)
    lobby.enter(kept, NEXT_S)
    lobby.enter(served, HEAD_S)
    lobby.leave(served)
    lobby.leave(served)
    now = HEAD_S
    lobby.sweep()
    assert (fresh.is_out, kept.is_out) == (True, False)
    now = NEXT_S
    lobby.sweep()
    assert (kept.is_out, served.is_out, len(lobby)) == (True, False, 0)


def test_the_bounds_leave_descriptors_for_everything_else() -> None:
    assert bounds_of(1024) == Bounds(896, 448)
    assert bounds_of(1 << 20).idle == 1024
    assert bounds_of(64) == Bounds(32, 16)
