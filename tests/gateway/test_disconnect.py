"""A client that goes away takes its work with it, at once, in every phase."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from typing import Any

import pytest
from raw_request import hang_up, open_request, unified

from sluice_gateway.memory import Fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stream", [False, True])
async def test_while_queued(start: Any, stream: bool) -> None:
    stack = await start(unified(max_running=1))
    stack["u"].gate.clear()
    first = asyncio.create_task(stack.complete())
    await stack.until(lambda: bool(stack["u"].running))
    _, writer = await open_request(stack, stream=stream)
    await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
    await hang_up(writer)
    await stack.until(lambda: stack.gateway.dispatcher.queued == 0)
    stack["u"].gate.set()
    assert (await first).status_code == 200
    assert len(stack["u"].requests) == 1
    await stack.until(lambda: stack.gateway.counters.disconnected == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(start: Any, stream: bool) -> None:
    stack = await start(unified(max_running=1))
    stack["u"].gate.clear()
    _, writer = await open_request(stack, stream=stream)
    await stack.until(lambda: bool(stack["u"].running))
    await hang_up(writer)
    await stack.until(lambda: stack["u"].cancelled == 1)
    stack["u"].gate.set()
    assert (await stack.complete()).status_code == 200
    await stack.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle_of_the_answer(start: Any, stream: bool) -> None:
    stack = await start(unified(max_running=1))
    stack["u"].faults.append(Fault("hang", 5))
    reader, writer = await open_request(stack, stream=stream)
    if stream:
        await reader.readuntil(b'"text":"e"')
    else:
        await stack.until(lambda: any(s.quiet for s in stack["u"].running.values()))
    await hang_up(writer)
    await stack.until(lambda: stack["u"].cancelled == 1)
    assert (await stack.complete()).status_code == 200
    await stack.idle()


async def test_while_a_retry_waits_for_an_engine(start: Any) -> None:
    stack = await start(unified())
    stack["u"].faults.append(Fault("die", 3))
    _, writer = await open_request(stack, stream=True)
    await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
    await hang_up(writer)
    await stack.until(lambda: stack.gateway.dispatcher.queued == 0)
    stack["u"].revive()
    await stack.ready()
    assert (await stack.complete()).status_code == 200
    assert len(stack["u"].requests) == 2


async def test_with_several_choices_all_of_them_end(start: Any) -> None:
    stack = await start(unified(max_running=3))
    stack["u"].gate.clear()
    _, writer = await open_request(stack, n=5)
    await stack.until(lambda: len(stack["u"].running) == 3 and stack.gateway.dispatcher.queued == 2)
    await hang_up(writer)
    await stack.until(lambda: stack["u"].cancelled == 3)
    stack["u"].gate.set()
    await stack.idle()
    assert stack.gateway.dispatcher.queued == 0


async def test_while_the_body_is_on_its_way(start: Any) -> None:
    stack = await start(unified())
    port = int(stack.url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    await writer.drain()
    await stack.until(lambda: stack.gateway.counters.requests == 1)
    await hang_up(writer)
    assert (await stack.complete()).status_code == 200


async def test_a_client_that_does_not_read_is_dropped_and_counted(start: Any) -> None:
    stack = await start(unified(max_context_tokens=1 << 20), slow_client_bytes=64 * 1024)
    _, writer = await open_request(stack, stream=True, max_tokens=500_000)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await stack.until(lambda: stack.gateway.counters.slow_clients == 1)
    await stack.until(lambda: stack["u"].cancelled == 1)
    await stack.idle()
    assert (await stack.complete()).status_code == 200
    writer.transport.abort()


async def test_a_client_that_stalls_and_reads_on_misses_nothing(start: Any) -> None:
    """Its first events go straight to the socket, then they wait, then they go straight again."""
    tokens = 40_000
    stack = await start(unified(max_context_tokens=1 << 20), slow_client_bytes=1 << 30)
    reader, writer = await open_request(stack, stream=True, max_tokens=tokens)
    await reader.readuntil(b'"text":"e"')
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await stack.until(lambda: not stack["u"].running)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    letters = re.findall(rb'"text":"([a-z])"', rest)
    assert b"".join(letters) == bytes(97 + position % 26 for position in range(5, tokens))
    await hang_up(writer)


async def test_a_server_that_stops_tells_its_clients(start: Any) -> None:
    stack = await start(unified(), shutdown_s=1.0)
    stack["u"].faults.append(Fault("hang", 5))
    reader, writer = await open_request(stack, stream=True)
    await reader.readuntil(b'"text":"e"')
    stack.server.ask_to_exit()
    rest = await reader.read()
    assert b'"code":"shutting_down"' in rest
    assert b"[DONE]" not in rest
    assert rest.endswith(b"0\r\n\r\n")
    await hang_up(writer)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_missed_though_it_has_asked_for_more(how: str, stream: bool, start: Any) -> None:
    """What it asked for next stopped the reading of its connection, and with it the news of its end."""
    stack = await start(unified())
    stack["u"].gate.clear()
    _, writer = await open_request(stack, n=8, stream=stream)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    await stack.until(lambda: len(stack["u"].running) == 8)
    await stack.until(lambda: any(connection.pipeline for connection in stack.server.server_state.connections))
    if how == "RST":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await hang_up(writer)
    await stack.idle()
    assert stack["u"].cancelled == 8
    assert stack.gateway.counters.disconnected == 1


async def test_one_that_stays_gets_all_that_it_asked_for(start: Any) -> None:
    stack = await start(unified(step_s=0.02))
    reader, writer = await open_request(stack)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answers = (await asyncio.wait_for(reader.read(), 20)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 4
    await hang_up(writer)
