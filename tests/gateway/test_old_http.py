"""A client of HTTP/1.0 knows no chunks: a stream comes to it as it is, and ends with the connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_request import hang_up, unified

from sluice_gateway.http.framing import as_chunk, as_it_is, frame_of

ASKED = {"model": "m", "prompt": "x", "max_tokens": 50, "stream": True}


async def ask(
    stack: Any, *headers: str, version: str = "1.0", **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
    body = json.dumps(ASKED | fields).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "Content-Type: application/json", *headers]
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    return reader, writer


async def whole_answer(stack: Any, *headers: str, version: str = "1.0", **fields: Any) -> tuple[bytes, bytes]:
    """(head, body): all that comes until the connection ends."""
    reader, writer = await ask(stack, *headers, version=version, **fields)
    async with asyncio.timeout(30):
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    await hang_up(writer)
    return head.lower(), rest


def texts(body: bytes) -> list[str]:
    """Of the chunks of an event stream that has nothing else in it, and its end."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: ") for event in events)
    return [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]


@pytest.mark.parametrize("header", ["Accept: */*", "Connection: keep-alive", "Expect: 100-continue"])
async def test_a_stream_has_no_chunk_sizes_in_it(header: str, start: Any) -> None:
    stack = await start(unified())
    head, body = await whole_answer(stack, header)
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert head.count(b"connection: close") == 1
    assert "".join(texts(body)) == "".join(chr(97 + position % 26) for position in range(50))
    await stack.idle()


async def test_slowly_made_tokens_come_one_by_one(start: Any) -> None:
    """Each of its own: they go straight to the socket."""
    stack = await start(unified(step_s=0.01))
    _, body = await whole_answer(stack, max_tokens=5)
    assert [text for text in texts(body) if text] == list("abcde")


async def test_an_error_in_its_midst_ends_it_without_done(start: Any) -> None:
    stack = await start(unified(step_s=0.01))
    reader, writer = await ask(stack, max_tokens=4000)
    await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    stack.gateway.stop()
    body = await asyncio.wait_for(reader.read(), 20)
    await hang_up(writer)
    assert b"[DONE]" not in body
    assert json.loads(body.rstrip().rsplit(b"data: ", 1)[1])["error"]["code"] == "shutting_down"


async def test_a_whole_answer_and_an_error_tell_their_length(start: Any) -> None:
    stack = await start(unified())
    for fields, status in (({"stream": False}, b"200"), ({"n": "x"}, b"400"), ({"max_tokens": 5000}, b"400")):
        head, body = await whole_answer(stack, **fields)
        assert head.startswith(b"http/1.1 " + status)
        assert f"content-length: {len(body)}".encode() in head
        json.loads(body)


async def test_nobody_pays_for_a_client_that_leaves(start: Any) -> None:
    stack = await start(unified(step_s=0.01))
    reader, writer = await ask(stack, max_tokens=4000)
    await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    await hang_up(writer)
    await stack.idle()
    assert stack.gateway.counters.disconnected == 1


async def test_events_of_the_status_page_come_as_they_are(start: Any) -> None:
    stack = await start(unified())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
    writer.write(b"GET /status/events HTTP/1.0\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert b"chunked" not in head
    assert (await asyncio.wait_for(reader.readexactly(6), 20)) == b"data: "
    await hang_up(writer)


async def test_a_client_of_today_still_gets_chunks(start: Any) -> None:
    stack = await start(unified())
    head, body = await whole_answer(stack, "Host: x", "Connection: close", version="1.1", max_tokens=3)
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"\r\n0\r\n\r\n")


def test_a_piece_is_what_the_version_says() -> None:
    assert frame_of({"http_version": "1.0"}) is as_it_is
    assert frame_of({"http_version": "1.1"}) is frame_of({}) is as_chunk
    assert (as_it_is(b"x" * 17), as_chunk(b"x" * 17)) == (b"x" * 17, b"11\r\n" + b"x" * 17 + b"\r\n")
