"""The stock `openai` package, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from sluice_gateway.memory import MemoryEngine
from sluice_protocol.generate import Refused, Role

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def stack(start: Any) -> Any:
    data = b"Hello world"
    engine = MemoryEngine(Role.UNIFIED, lambda _p, i: data[i] if i < len(data) else 257, max_running=4)
    return await start({"u": engine}, api_keys=("secret",), max_queued=4, outage_s=0.0)


def sync_client(stack: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", **({"api_key": "secret", "max_retries": 0} | options))


@pytest.fixture
async def client(stack: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


async def test_sync_chat(stack: Any) -> None:
    def work() -> Any:
        with sync_client(stack) as client:
            whole = client.chat.completions.create(model="m", messages=MESSAGES)
            parts = list(
                client.chat.completions.create(
                    model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
                )
            )
            return whole, parts

    whole, parts = await asyncio.to_thread(work)
    assert whole.choices[0].message.content == "Hello world"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "Hello world"
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens == 2


async def test_sync_completions_and_models(stack: Any) -> None:
    def work() -> Any:
        with sync_client(stack) as client:
            whole = client.completions.create(model="m", prompt=["a", "b"], logprobs=1)
            parts = list(client.completions.create(model="m", prompt=[1, 2, 3], stream=True))
            return whole, parts, client.models.list().data, client.models.retrieve("m")

    whole, parts, models, one = await asyncio.to_thread(work)
    assert [choice.text for choice in whole.choices] == ["Hello world"] * 2
    assert whole.choices[0].logprobs.tokens[:2] == ["H", "e"]
    assert "".join(part.choices[0].text for part in parts) == "Hello world"
    assert [model.id for model in models] == [one.id] == ["m"]


async def test_async_chat_with_choices_and_logprobs(client: Any) -> None:
    whole = await client.chat.completions.create(model="m", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3)
    assert [choice.message.content for choice in whole.choices] == ["Hello world"] * 2
    assert len(whole.choices[1].logprobs.content[0].top_logprobs) == 3


async def test_async_streams_side_by_side(client: Any) -> None:
    async def one(index: int) -> str:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"{index}"}], stream=True, stop=["wor"]
        )
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    assert await asyncio.gather(*(one(i) for i in range(4))) == ["Hello "] * 4


async def test_the_streaming_helper_understands_the_events(client: Any) -> None:
    async with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"


async def test_a_stream_that_is_closed_early_ends_the_work(stack: Any, client: Any) -> None:
    stack["u"].step_s = 0.01
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await stack.idle()
    assert stack["u"].cancelled == 1


async def test_errors_become_the_packages_exceptions(stack: Any, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="m", prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    stack["u"].gate.clear()
    waiting = [asyncio.create_task(client.completions.create(model="m", prompt="x")) for _ in range(8)]
    await stack.until(lambda: stack.gateway.dispatcher.queued == 4)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="m", prompt="x")
    stack["u"].gate.set()
    await asyncio.gather(*waiting)
    stack["u"].draining = True
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    with pytest.raises(openai.InternalServerError) as nobody:
        await client.completions.create(model="m", prompt="x")
    assert nobody.value.status_code == 503


async def test_an_error_in_mid_stream_is_raised(stack: Any, client: Any) -> None:
    from sluice_gateway.memory import Fault

    stack["u"].faults.extend(Fault("fail", 2, "PullFailed") for _ in range(3))
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="PullFailed"):
        async for _ in stream:
            pass


async def test_the_packages_own_retries_get_through(stack: Any, client: Any) -> None:
    stack["u"].refusals.append(Refused("FingerprintMismatch", "", 0))
    whole = await client.with_options(max_retries=2).completions.create(model="m", prompt="x")
    assert whole.choices[0].text == "Hello world"
