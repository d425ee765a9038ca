"""The supervisor's own port under connections that want nothing: a prober always gets through, in few descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice_runtime.probes import MAX_CONNECTIONS, ProbeServer, Query, json_answer

pytestmark = pytest.mark.slow


def broken(_: Query) -> None:
    raise KeyError("a mirror that is no book")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    big = {"text": "x" * 4_000_000}
    server = ProbeServer(
        {"GET /livez": lambda _: json_answer(200, {}), "GET /big": lambda _: json_answer(200, big), "GET /bad": broken}
    )
    yield await server.start("127.0.0.1")
    await server.stop()


async def ask(port: int, path: str) -> tuple[int, bytes]:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("words", [b"", b"GET /livez HTTP/1.1\r\nHost: "], ids=["silent", "half a request"])
async def test_a_prober_gets_through_a_flood_and_the_longest_idle_go(port: int, words: bytes) -> None:
    before = descriptors()
    with contextlib.ExitStack() as held:
        flood = []
        for _ in range(4 * MAX_CONNECTIONS):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            sock.send(words)
            flood.append(sock)
        assert (await ask(port, "/livez"))[0] == 200
        ours = descriptors() - before - len(flood)
        assert ours <= MAX_CONNECTIONS + 2
        assert flood[0].recv(1) == b""  # who has been idle longest was hung up on
        with pytest.raises(BlockingIOError):
            flood[-1].recv(1)


async def test_who_says_nothing_goes_before_who_is_being_answered(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
    writer.write(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert b" 200 " in head
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_CONNECTIONS)]
    assert len(await asyncio.wait_for(reader.read(), 10)) > 4_000_000
    for _, other in [*silent, (reader, writer)]:
        other.transport.abort()


async def test_a_crowd_that_asks_and_does_not_read_keeps_nobody_out(port: int) -> None:
    crowd = []
    for _ in range(2 * MAX_CONNECTIONS):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        crowd.append(writer)
    assert (await ask(port, "/livez"))[0] == 200
    for writer in crowd:
        writer.transport.abort()


async def test_a_route_that_fails_is_said_and_ends_nothing(port: int) -> None:
    status, body = await ask(port, "/bad")
    assert (status, json.loads(body)) == (500, {"error": "KeyError: 'a mirror that is no book'"})
    assert (await ask(port, "/livez"))[0] == 200


@pytest.mark.process
@pytest.mark.timeout(30)
def test_a_process_may_open_as_many_files_as_it_is_allowed_to() -> None:
    code = """
import resource
from sluice_runtime.descriptors import raise_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
raise_limit()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
