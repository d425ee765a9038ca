"""The two endpoints over raw HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_chat_answer_has_the_text_the_usage_and_the_finish_reason(start: Any) -> None:
    stack = await start()
    response = await stack.chat()
    assert response.status_code == 200
    body = response.json()
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The quic", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "sluice" not in body


async def test_a_stream_has_one_chunk_per_token_and_ends_with_done(start: Any) -> None:
    stack = await start()
    response = await stack.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [d["content"] for d in deltas[1:-1]] == list("The quic")
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8


async def test_the_route_is_told_when_it_is_asked_for(start: Any) -> None:
    stack = await start()
    body = {"model": "m", "prompt": "hi", "max_tokens": 3}
    for stream in (False, True):
        response = await stack.http.post(
            "/v1/completions", json=body | {"stream": stream}, headers={"x-sluice-route": "1"}
        )
        last = events(response.text)[-2] if stream else response.json()
        assert last["sluice"] == {
            "prefill_pid": 7,
            "decode_pid": 21,
            "records": 3,
            "bytes": 3072,
            "transport": "memory",
            "chunks": 1,
            "tries": 1,
        }


async def test_a_missing_model_is_404(start: Any) -> None:
    stack = await start()
    response: httpx.Response = await stack.chat(model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_gateway_that_joins_others_can_wait_for_its_first_pair(start) -> None:
    alone = await start(engines={}, wait=False)
    assert not await alone.gateway.meet(0.05)
    later = await start(wait=False)
    assert await later.gateway.meet(20)
    assert (await later.chat()).status_code == 200
