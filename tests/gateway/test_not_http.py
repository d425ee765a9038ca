"""What is no HTTP is refused in OpenAI's shape, behind the answers to what was asked before it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_request import hang_up, open_request, unified

GARBAGE = b"\x16\x03\x01\x02\x00\x01\r\n\r\n"
NO_HOST = b"GET /v1/models HTTP/1.1\r\n\r\n"
GOOD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


async def connect(stack: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))


async def rest_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """To the end of the connection, which is the server's."""
    async with asyncio.timeout(20):
        rest = await reader.read()
    await hang_up(writer)
    return rest


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (GARBAGE, "check its first line"),
        (NO_HOST, "it has 0 headers Host; send one"),
        (GOOD.replace(b"\r\n\r\n", b"\r\nHost: y\r\n\r\n"), "it has 2 headers Host"),
        (GOOD.replace(b"1.1", b"2.0"), "its version is 2.0; use 1.1"),
        (GOOD.replace(b"/v1", b"http://x:99999999/v1"), "check its first line"),
    ],
)
async def test_it_is_told_what_is_wrong(sent: bytes, words: str, start: Any) -> None:
    stack = await start(unified())
    for data in (sent, sent + GOOD + GARBAGE):
        reader, writer = await connect(stack)
        writer.write(data)
        error = error_of(await rest_of(reader, writer))
        assert words in error["message"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_http")
    assert stack.gateway.counters.refused == 2
    assert (await stack.complete()).status_code == 200


async def test_a_client_of_http_1_0_need_not_name_the_host(start: Any) -> None:
    stack = await start(unified())
    reader, writer = await connect(stack)
    writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert (await rest_of(reader, writer)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("bad", [GARBAGE, NO_HOST])
async def test_a_stream_that_was_asked_for_before_comes_whole(bad: bytes, start: Any) -> None:
    """The refusal stood in its midst."""
    stack = await start(unified(step_s=0.005))
    reader, writer = await open_request(stack, stream=True)
    await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    writer.write(bad)
    writer.write(GOOD)  # nobody's any more
    answer, _, refusal = (await rest_of(reader, writer)).partition(b"\r\n0\r\n\r\n")
    assert answer.endswith(b"data: [DONE]\n\n")
    assert error_of(refusal)["code"] == "invalid_http"


async def test_so_do_all_that_were_asked_for_at_once(start: Any) -> None:
    stack = await start(unified())
    reader, writer = await connect(stack)
    writer.write(GOOD + GOOD + GOOD + NO_HOST)
    *answers, refusal = (await rest_of(reader, writer)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 3
    assert error_of(b"HTTP/1.1 " + refusal)["code"] == "invalid_http"


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


async def test_a_body_that_breaks_off_is_its_own_refusal(start: Any) -> None:
    stack = await start(unified())
    reader, writer = await connect(stack)
    writer.write(GOOD + CHUNKED + b"1\r\n{\r\nzz\r\n")
    first, refusal = (await rest_of(reader, writer)).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert error_of(b"HTTP/1.1 " + refusal)["code"] == "invalid_http"


async def test_its_refusal_waits_for_an_answer_that_is_not_there_yet(start: Any) -> None:
    """It would be taken for that answer."""
    stack = await start(unified())
    stack["u"].gate.clear()
    reader, writer = await open_request(stack)
    await stack.until(lambda: stack.gateway.dispatcher.running == 1)
    writer.write(CHUNKED + b"zz\r\n")
    writer.write(GOOD)
    await writer.drain()
    stack["u"].gate.set()
    first, refusal = (await rest_of(reader, writer)).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert error_of(b"HTTP/1.1 " + refusal)["code"] == "invalid_http"
    await stack.idle()
