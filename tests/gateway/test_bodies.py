"""What all request bodies may have together, and what a large one costs the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest

from sluice_gateway.http.bodies import LARGE_BYTES, MERGED_BYTES, SMALL_BYTES, STALLED_S, Body, BodyBudget
from sluice_gateway.openai.requests import Limits
from sluice_gateway.openai.sinks import CollectSink
from sluice_gateway.text.deltas import Delta, Part, Shown
from sluice_protocol.sampling import TokenLogprobs

MIB = 1 << 20


def test_bodies_are_bounded_together() -> None:
    budget = BodyBudget(4 * MIB)
    first, second = Body(budget), Body(budget)
    assert all(first.add(bytes(MIB)) for _ in range(4))
    assert budget.held == 4 * MIB
    assert not second.add(bytes(2 * MIB))
    assert (second.parts, second.size, budget.held) == ([], 0, 4 * MIB)
    first.release()
    assert budget.held == 0
    assert second.add(bytes(2 * MIB))


def test_large_ones_leave_small_ones_their_place() -> None:
    budget = BodyBudget(4 * MIB)
    large = Body(budget)
    assert large.add(bytes(4 * MIB + SMALL_BYTES))
    assert not Body(budget).add(bytes(MIB))
    small = [Body(budget) for _ in range(3)]
    assert all(body.add(bytes(SMALL_BYTES)) for body in small)
    assert not Body(budget).add(bytes(SMALL_BYTES)), "they have a bound too"
    for body in (large, *small):
        body.release()
    assert budget.held == 0


def test_a_body_of_many_small_things_is_large_too() -> None:
    budget = BodyBudget(4 * MIB)
    for data, is_large in ((b"x" * LARGE_BYTES, False), (b"x" * (LARGE_BYTES + 1), True), (b"[]," * 80_000, True)):
        body = Body(budget)
        assert body.add(data)
        assert body.is_large is is_large
        body.release()


async def half_sent(stack: Any, announced: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(stack.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % announced + b" " * sent)
    await writer.drain()
    return reader, writer


async def test_half_sent_bodies_take_no_more_than_the_bound_and_small_requests_are_served(start: Any) -> None:
    """30 half-sent ones of 31 MiB took 1 GiB."""
    stack = await start(max_body_bytes=2 * MIB, held_body_bytes=4 * MIB)
    halves = [await half_sent(stack, 2 * MIB, MIB + MIB // 2) for _ in range(10)]
    await stack.until(lambda: stack.gateway.counters.refused_bodies > 0)
    assert stack.gateway.bodies.held <= 4 * MIB + 4 * MIB // 4
    assert (await stack.chat()).status_code == 200
    too_much = await stack.chat(messages=[{"role": "user", "content": "x" * (2 * MIB - 1000)}])
    assert (too_much.status_code, too_much.json()["error"]["code"]) == (503, "too_many_body_bytes")
    assert too_much.headers["retry-after"] == "1"
    for _, writer in halves:
        writer.close()
    await stack.until(lambda: stack.gateway.bodies.held == 0)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        json.dumps({"model": "m", "messages": []}).encode(),
        json.dumps({"model": "other", "messages": [{"role": "user", "content": "hi"}]}).encode(),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}).encode(),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode(),
    ],
)
async def test_nothing_is_held_for_a_request_that_has_ended(start: Any, body: bytes) -> None:
    stack = await start()
    headers = {"content-type": "application/json"}
    await stack.http.post("/v1/chat/completions", content=body, headers=headers)
    await stack.http.post("/v1/chat/completions", content=body, headers=headers | {"x-sluice-deadline-ms": "soon"})
    await stack.idle()
    assert stack.gateway.bodies.held == 0


async def test_a_small_prompt_that_cannot_fit_is_refused_with_the_numbers(start: Any) -> None:
    stack = await start()
    assert stack.gateway.limits() == Limits(stack.gateway.limits().vocab_size, 4096)
    refused = await stack.chat(messages=[{"role": "user", "content": "x" * 5000}])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "4096 tokens" in error["message"]
    assert "at least 5000 tokens" in error["message"]


def test_log_probabilities_of_an_answer_are_described_as_they_come() -> None:
    """100,000 tokens with 20 alternatives each at the end of an answer were seconds of the event loop."""
    described: list[int] = []

    def describe(shown: Any) -> dict[str, Any]:
        described.append(len(shown))
        return {"content": [{"token": entry.token} for entry in shown], "refusal": None}

    sink = CollectSink(describe)
    for token in range(3):
        sink.delta(Delta(Part.CONTENT, "x", [Shown(token, TokenLogprobs(0.0, (), ()), token)]))
    assert described == [1, 1, 1]
    assert orjson.loads(orjson.dumps(sink.logprobs)) == {
        "content": [{"token": 0}, {"token": 1}, {"token": 2}],
        "refusal": None,
    }
    assert described == [1, 1, 1, 0]
    assert CollectSink().logprobs is None


# -- uploads that stall, and such as come in crumbs


def test_a_body_that_stalls_gives_its_place_to_one_that_comes() -> None:
    now = [0.0]
    budget = BodyBudget(4 * 4 * SMALL_BYTES, lambda: now[0])  # four small bodies together
    stalled = [Body(budget) for _ in range(4)]
    assert all(body.add(b"x" * SMALL_BYTES) for body in stalled)
    now[0] = STALLED_S - 0.1
    assert not Body(budget).add(b"x"), "all of them came just now"
    now[0] = STALLED_S
    fresh = Body(budget)
    assert fresh.add(b"x" * 100)
    assert [body.size for body in stalled].count(0) == 1
    lost = next(body for body in stalled if not body.size)
    assert not lost.add(b"more"), "what comes of it later is refused"
    for body in (*stalled, fresh):
        body.release()
    assert budget.held == 0


def test_a_body_that_trickles_gives_its_place_too() -> None:
    """A byte now and then is growth, and holds a place for as long as the whole body may take."""
    now = [0.0]
    budget = BodyBudget(4 * 4 * SMALL_BYTES, lambda: now[0])
    trickle, steady = Body(budget), [Body(budget) for _ in range(4)]
    assert trickle.add(b"x")
    for tenths in range(50):
        now[0] = tenths / 10
        assert tenths % 10 or trickle.add(b"x")
        assert all(body.add(b"y" * 5000) for body in steady)
    for body in steady:
        assert body.add(b"y" * (SMALL_BYTES - body.size - 1))
    fresh = Body(budget)
    assert fresh.add(b"z" * 4), "there is room but for the trickle"
    assert trickle.size == 0
    assert all(body.size for body in steady)


def test_a_body_that_has_come_keeps_its_place() -> None:
    now = [0.0]
    budget = BodyBudget(4 * 4 * SMALL_BYTES, lambda: now[0])
    there = [Body(budget) for _ in range(4)]
    for body in there:
        assert body.add(b"x" * SMALL_BYTES)
        budget.settle(body)
    now[0] = 100.0
    assert not Body(budget).add(b"x")
    assert all(body.size for body in there)


def test_a_body_that_comes_in_crumbs_is_kept_in_few_parts() -> None:
    budget = BodyBudget(1 << 26)
    body, data = Body(budget), bytes(range(256)) * 2048
    for at in range(0, len(data), 3):
        assert body.add(data[at : at + 3])
    assert body.joined() == data
    assert len(body.parts) <= 2 + len(data) // (MERGED_BYTES // 2)
