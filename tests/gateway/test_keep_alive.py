"""What a stream's client sees while there is no data: a head, comments, and no comment that would be a lie."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from sluice_gateway.http.keep_alive import COMMENT, Life, Pace
from sluice_gateway.memory import Fault, MemoryEngine
from sluice_gateway.openai.errors import poison_suspected, queue_full
from sluice_protocol.generate import Refused, Role

pytestmark = pytest.mark.slow

TEXT = "The quick brown fox jumps over the lazy dog. "
PACE = Pace(head_s=0.1, comment_s=0.2, evidence_s=0.5)
PATIENT = Pace(head_s=60.0, comment_s=60.0)


def alone() -> dict[str, MemoryEngine]:
    return {"u": MemoryEngine(Role.UNIFIED, lambda _prompt, position: TEXT.encode()[position % len(TEXT)])}


class Stream:
    """A streamed chat as it is on the wire."""

    def __init__(self, stack: Any, **fields: Any) -> None:
        self._stack, self._fields = stack, fields
        self.head = b""

    async def __aenter__(self) -> Stream:
        port = int(self._stack.url.rsplit(":", 1)[1])
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        messages = [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 4} | self._fields).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def read_head(self) -> bytes:
        self.head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)
        return self.head

    async def piece(self) -> bytes:
        size = int(await asyncio.wait_for(self._reader.readline(), 20), 16)
        data = await self._reader.readexactly(size + 2)
        return data[:-2]

    async def pieces(self) -> list[bytes]:
        """All that follow, to the end of the body."""
        found = []
        while data := await self.piece():
            found.append(data)
        return found

    async def silence(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                assert await self._reader.read(65_536), "the stream ended"
        except TimeoutError:
            return True
        return False


def contents(pieces: list[bytes]) -> str:
    events = [e for e in b"".join(pieces).split(b"\n\n") if e.startswith(b"data: {")]
    chunks = [json.loads(e.removeprefix(b"data: ")) for e in events]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


async def test_while_it_waits_in_the_queue_there_are_a_head_and_comments(start: Any) -> None:
    stack = await start(alone(), pace=PACE)
    stack["u"].max_running = 1
    stack["u"].gate.clear()
    async with Stream(stack, max_tokens=1000), Stream(stack) as queued:
        await stack.until(lambda: stack.gateway.dispatcher.queued == 1)
        assert (await queued.read_head()).startswith(b"HTTP/1.1 200 ")
        assert b"text/event-stream" in queued.head
        assert [await queued.piece() for _ in range(4)] == [COMMENT] * 4
        stack["u"].max_running = 2
        stack["u"].gate.set()
        rest = await queued.pieces()
    assert contents(rest) == TEXT[:4]
    assert b"".join(rest).endswith(b"data: [DONE]\n\n")


async def test_before_the_first_token_and_in_the_midst_of_an_answer_too(start: Any) -> None:
    stack = await start(alone(), pace=PACE)
    stack["u"].gate.clear()
    async with Stream(stack, max_tokens=200) as stream:
        await stream.read_head()
        assert [await stream.piece() for _ in range(2)] == [COMMENT] * 2
        stack["u"].gate.set()
        while b'"content":"T"' not in await stream.piece():
            pass
        stack["u"].gate.clear()
        pieces = [await stream.piece()]
        while pieces[-1] != COMMENT:
            pieces.append(await stream.piece())
        assert await stream.piece() == COMMENT
        stack["u"].gate.set()
        rest = [piece for piece in pieces + await stream.pieces() if piece != COMMENT]
    assert ("T" + contents(rest))[:200] == (TEXT * 5)[:200]


async def test_while_it_is_tried_again_too(start: Any) -> None:
    stack = await start(alone(), pace=PACE)
    stack["u"].refusals.extend(Refused("ResourceExhausted", "full", retry_after_ms=500) for _ in range(3))
    async with Stream(stack) as stream:
        await stream.read_head()
        pieces = await stream.pieces()
    assert pieces.count(COMMENT) >= 3
    assert contents(pieces) == TEXT[:4]


async def test_a_refusal_that_comes_before_the_head_keeps_its_status(start: Any) -> None:
    stack = await start(alone(), pace=PATIENT, deadline_s=0.2)
    stack["u"].gate.clear()
    stack["u"].max_running = 1
    async with Stream(stack, max_tokens=1000):
        await stack.until(lambda: stack.gateway.dispatcher.running == 1)
        late = await stack.chat(stream=True)
    assert (late.status_code, late.json()["error"]["code"]) == (429, "deadline_exceeded")
    assert late.headers["retry-after"] == "1"


async def test_one_that_comes_behind_the_head_is_an_event_with_the_same_fields(start: Any) -> None:
    stack = await start(alone(), pace=PACE, deadline_s=0.5)
    stack["u"].gate.clear()
    stack["u"].max_running = 1
    async with Stream(stack, max_tokens=1000):
        await stack.until(lambda: stack.gateway.dispatcher.running == 1)
        async with Stream(stack) as late:
            assert (await late.read_head()).startswith(b"HTTP/1.1 200 ")
            *_, last = await late.pieces()
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert {name: error[name] for name in ("code", "status", "retry_after")} == {
        "code": "deadline_exceeded",
        "status": 429,
        "retry_after": 1,
    }


def test_an_error_event_says_what_status_and_headers_would_have_said() -> None:
    def told(event: bytes) -> Any:
        return json.loads(event.removeprefix(b"data: "))["error"]

    full, poison = told(queue_full(3).event()), told(poison_suspected(3, "x").event())
    assert (full["status"], full["retry_after"], "should_retry" in full) == (429, 1, False)
    assert (poison["status"], "retry_after" in poison, poison["should_retry"]) == (503, False, False)


async def test_comments_stop_when_no_engine_is_known_to_make_progress(start: Any) -> None:
    """Law 7: the engine's supervisor says that it is stuck, and there is no other one."""
    stack = await start(alone(), pace=PACE)
    stack["u"].faults.append(Fault("hang", 0))
    async with Stream(stack) as stream:
        await stream.read_head()
        for _ in range(6):  # longer than `evidence_s`: its supervisor says that it is well
            assert await stream.piece() == COMMENT
        stack["u"].not_ready = True
        await stack.until(lambda: bool(stack.gateway.not_ready()))
        for _ in range(10):
            if await stream.silence(1.5):
                break
        else:
            pytest.fail("comments went on")
        assert stack.gateway.dispatcher.running == 1


async def test_comments_stop_when_an_engine_holds_no_such_request(start: Any) -> None:
    stack = await start(alone(), pace=PACE)
    stack["u"].faults.append(Fault("hang", 0))
    async with Stream(stack) as stream:
        await stream.read_head()
        stack["u"].running.clear()
        await stack.until(lambda: stack.gateway.members.links["u"].view.load.empty)
        for _ in range(10):
            if await stream.silence(1.5):
                break
        else:
            pytest.fail("comments went on")


def test_a_request_goes_on_until_its_last_sign_of_progress_is_too_old() -> None:
    now, sign = 0.0, True
    life = Life(lambda: now, 30.0)
    life.signs = [lambda: False, lambda: sign]
    assert life.goes_on()
    sign, now = False, 30.0
    assert life.goes_on()
    now = 30.1
    assert not life.goes_on()
    sign = True
    assert life.goes_on()


async def test_openais_client_does_not_notice_comments(start: Any) -> None:
    stack = await start(alone(), pace=PACE)
    stack["u"].gate.clear()
    asyncio.get_running_loop().call_later(1.0, stack["u"].gate.set)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model="m", messages=messages, max_tokens=4, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == TEXT[:4]
