"""Java's HTTP client and `curl --http2` offer HTTP/2 with each request: the offer is passed over, not the request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_request import hang_up, unified

BODY = json.dumps({"model": "m", "prompt": "x", "max_tokens": 3}).encode()
LISTED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def asked(
    *headers: str, offer: str = "h2c", connection: str = "Upgrade, HTTP2-Settings", version: str = "1.1"
) -> bytes:
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Connection: {connection}",
        f"Upgrade: {offer}",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


WITH_LENGTH = asked(f"Content-Length: {len(BODY)}") + BODY
IN_CHUNKS = asked("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


async def answers_to(stack: Any, *parts: bytes) -> list[bytes]:
    """To `parts`, each of them a write of its own; the connection is closed by the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
    for part in parts:
        writer.write(part)
        await writer.drain()
    async with asyncio.timeout(20):
        answer = await reader.read()
    await hang_up(writer)
    return answer.split(b"HTTP/1.1 ")[1:]


def text_of(answer: bytes) -> str:
    assert answer.startswith(b"200")
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"])


@pytest.mark.parametrize("request_", [WITH_LENGTH, IN_CHUNKS])
@pytest.mark.parametrize("size", [1, 7, 100, 4096])
async def test_the_body_is_read_and_the_connection_kept(request_: bytes, size: int, start: Any) -> None:
    """It was dropped, and the client told that it had sent none."""
    stack = await start(unified())
    data = request_ + request_ + LISTED
    first, second, listed = await answers_to(stack, *(data[at : at + size] for at in range(0, len(data), size)))
    assert (text_of(first), text_of(second)) == ("abc", "abc")
    assert listed.startswith(b"200")


async def test_behind_a_request_that_is_in_work(start: Any) -> None:
    stack = await start(unified(step_s=0.01))
    plain = WITH_LENGTH.replace(b"Upgrade: h2c\r\n", b"")
    one, two, three, listed = await answers_to(stack, plain + WITH_LENGTH + plain + LISTED)
    assert [text_of(answer) for answer in (one, two, three)] == ["abc"] * 3
    assert listed.startswith(b"200")


@pytest.mark.parametrize("offer", ["websocket", "h2c, foo", "TLS/1.2"])
async def test_so_it_is_with_any_other_offer(offer: str, start: Any) -> None:
    stack = await start(unified())
    data = asked(f"Content-Length: {len(BODY)}", offer=offer, connection="close, upgrade") + BODY
    (answer,) = await answers_to(stack, data)
    assert text_of(answer) == "abc"
    (listed,) = await answers_to(stack, LISTED.replace(b"close", b"close, Upgrade\r\nUpgrade: websocket"))
    assert listed.startswith(b"200")


async def test_by_http_1_0_and_without_a_host(start: Any) -> None:
    stack = await start(unified())
    old = asked(f"Content-Length: {len(BODY)}", version="1.0", connection="upgrade").replace(b"Host: x\r\n", b"") + BODY
    assert text_of((await answers_to(stack, old))[0]) == "abc"
    (refused,) = await answers_to(stack, WITH_LENGTH.replace(b"Host: x\r\n", b""))
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_a_tunnel_is_no_offer(start: Any) -> None:
    stack = await start(unified())
    (refused,) = await answers_to(stack, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + LISTED)
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert (await stack.complete()).status_code == 200
