"""Who watches the status page and does not read keeps nobody else out."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sluice_gateway.http import watcher
from sluice_gateway.http.watcher import Outgoing
from sluice_gateway.routing import board
from sluice_gateway.routing.board import MAX_WATCHERS

pytestmark = pytest.mark.slow

BIG = {"text": "x" * 20_000}
REQUEST = b"GET /status/events HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
async def stack(start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its view is as large as one of a few services, and comes 20 times as often."""
    monkeypatch.setattr(board, "PERIOD_S", 0.05)
    monkeypatch.setattr(watcher, "STALLED_S", 1.0)
    made = await start()

    async def now() -> dict[str, str]:
        return BIG

    monkeypatch.setattr(made.gateway.board, "now", now)
    return made


def connect(stack: Any) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", int(stack.url.rsplit(":", 1)[1])))
    sock.sendall(REQUEST)
    return sock


async def test_those_that_do_not_read_are_dropped_and_another_is_let_in(stack: Any) -> None:
    silent = [connect(stack) for _ in range(MAX_WATCHERS)]
    await stack.until(lambda: stack.gateway.board.watchers == MAX_WATCHERS)
    assert "event: full" in (await stack.http.get("/status/events")).text
    await stack.until(lambda: stack.gateway.board.watchers == 0)
    assert stack.gateway.counters.slow_clients == MAX_WATCHERS
    await stack.until(lambda: not stack.server.server_state.tasks)
    assert len(stack.server.server_state.connections) <= 1  # our own client's
    for sock in silent:
        sock.close()


async def test_one_that_reads_stays(stack: Any) -> None:
    silent = connect(stack)
    async with stack.http.stream("GET", "/status/events") as response:
        read = 0
        async for line in response.aiter_lines():
            read += line.startswith("data: ")
            if stack.gateway.board.watchers == 1 and read > 60:
                break
    assert stack.gateway.counters.slow_clients == 1
    silent.close()


def test_what_is_on_its_way_has_its_time_from_when_it_was_written() -> None:
    now, unsent = 0.0, 0
    outgoing = Outgoing(lambda: unsent, lambda: now)
    for _ in range(100):
        now += 1.0
        outgoing.wrote(10)
        unsent = 25  # always two and a half behind, and always moving
        outgoing.check()
    now += watcher.STALLED_S + 1
    with pytest.raises(watcher.Stalled):
        outgoing.check()
    unsent = 0
    outgoing.check()
