"""Clients that connect and ask nothing take nobody's place, and no descriptor that somebody needs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest
from raw_request import hang_up, open_request, unified

from sluice_gateway.http.connections import LEAST, most_connections

pytestmark = pytest.mark.slow

MOST = 20


async def connect(stack: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))


async def answered(reader: asyncio.StreamReader) -> bytes:
    """The status line; empty for one who was dropped."""
    try:
        async with asyncio.timeout(20):
            return await reader.readline()
    except ConnectionError:
        return b""


async def test_those_who_ask_nothing_give_way_to_those_who_do(start: Any) -> None:
    """A thousand of them had every descriptor, and whoever came was taken and hung up on, for ever."""
    stack = await start(unified(), max_connections=MOST)
    await stack.http.get("/v1/models")  # the test's own client stays idle, and is the first to give way
    silent = [await connect(stack) for _ in range(3 * MOST)]
    for _ in range(3):
        reader, writer = await open_request(stack)
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        await hang_up(writer)
    gone = [await answered(reader) for reader, _ in silent[:MOST]]
    assert gone == [b""] * MOST
    assert stack.gateway.counters.dropped_connections >= 2 * MOST
    assert len(stack.server.server_state.connections) <= MOST
    for _, writer in silent:
        await hang_up_quietly(writer)


async def hang_up_quietly(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


async def test_where_all_are_at_work_the_next_one_is_told_to_come_again(start: Any) -> None:
    stack = await start(unified(max_running=64), max_connections=4)
    stack["u"].gate.clear()
    working = [await open_request(stack) for _ in range(4)]
    await stack.until(lambda: stack.gateway.dispatcher.running == 4)
    reader, writer = await connect(stack)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head
    assert json.loads(await reader.read())["error"]["code"] == "too_many_connections"
    await hang_up_quietly(writer)
    stack["u"].gate.set()
    for reader, writer in working:
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        await hang_up(writer)


async def test_half_a_head_is_not_waited_for(start: Any) -> None:
    stack = await start(unified(), head_timeout_s=0.3)
    for said in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
        reader, writer = await connect(stack)
        writer.write(said)
        assert await answered(reader) == b""
        await hang_up_quietly(writer)


async def test_nor_is_half_of_the_next_one(start: Any) -> None:
    """A connection that has asked before has no other right; one that waits for its answer loses nothing."""
    stack = await start(unified(), head_timeout_s=0.3)
    stack["u"].gate.clear()
    reader, writer = await open_request(stack)
    await asyncio.sleep(0.6)
    stack["u"].gate.set()
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert head.startswith(b"HTTP/1.1 200")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    await reader.readexactly(length)
    writer.write(b"GET /v1/models HTTP/1.1\r\n")
    assert await answered(reader) == b""
    await hang_up_quietly(writer)


async def test_an_answer_that_runs_outlives_half_of_the_next_request(start: Any) -> None:
    stack = await start(unified(), head_timeout_s=0.2)
    stack["u"].gate.clear()
    reader, writer = await open_request(stack, stream=True)
    writer.write(b"GET /v1/models HTTP/1.1\r\n")
    await asyncio.sleep(0.6)
    stack["u"].gate.set()
    told = await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 20)
    assert told.startswith(b"HTTP/1.1 200")
    rest = await asyncio.wait_for(reader.read(), 20)  # then its time is over
    assert rest.strip(b"\r\n0") == b""
    await hang_up_quietly(writer)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept alive", "to be closed"])
async def test_one_that_does_not_read_its_answer_is_not_kept_for_it(start: Any, keeps: bool) -> None:
    """Its connection stayed after its answer's end, as long as the client did."""
    engine = unified(max_context_tokens=1 << 20)
    stack = await start(engine, read_timeout_s=0.5, slow_client_bytes=1 << 30)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    port = int(stack.url.rsplit(":", 1)[1])
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    body = json.dumps({"model": "m", "prompt": "x" * 200, "max_tokens": 60_000, "stream": True}).encode()
    told = ["Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    told += [] if keeps else ["Connection: close"]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *told, "", ""]).encode()
    await asyncio.get_running_loop().sock_sendall(sock, head + body)
    await stack.until(lambda: stack.gateway.counters.slow_clients == 1)
    await stack.idle()
    sock.close()


@pytest.mark.parametrize("where", ["at once", "in pieces"])
async def test_a_head_without_end_is_refused(start: Any, where: str) -> None:
    """One client without a key filled the memory of the gateway with headers."""
    stack = await start(unified())
    reader, writer = await connect(stack)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
    size = 100 if where == "in pieces" else 50_000
    head = b""
    with contextlib.suppress(ConnectionError):
        for number in range(100_000_000 // size):
            writer.write(b"x-%d: %b\r\n" % (number, b"y" * size))
            await writer.drain()
            if reader._buffer:  # type: ignore[attr-defined]
                break
    with contextlib.suppress(ConnectionError):
        head = await answered(reader)
    assert head in (b"", b"HTTP/1.1 431 Request Header Fields Too Large\r\n")  # what is unread may reset it
    assert number * size < 20_000_000
    await stack.until(lambda: stack.gateway.counters.dropped_connections == 1)
    await hang_up_quietly(writer)


async def test_a_head_as_long_as_may_be_is_read(start: Any) -> None:
    stack = await start(unified())
    told = await stack.http.get("/v1/models", headers={"x-long": "y" * 60_000})
    assert told.status_code == 200


async def test_headers_behind_a_body_are_nobodys(start: Any) -> None:
    stack = await start(unified())
    reader, writer = await connect(stack)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 3}).encode()
    headers = (b"Host: x", b"Content-Type: application/json", b"Transfer-Encoding: chunked")
    head = b"\r\n".join((b"POST /v1/completions HTTP/1.1", *headers, b"", b""))
    writer.write(head + b"%x\r\n%b\r\n0\r\nx-behind: 1\r\n\r\n" % (len(body), body))
    assert (await answered(reader)).startswith(b"HTTP/1.1 200")
    await hang_up_quietly(writer)


def test_there_is_always_room_for_some(monkeypatch: Any) -> None:
    limits = {100: LEAST, 1024: 768, 1 << 30: 65_536, -1: 65_536}
    for soft, most in limits.items():
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most
