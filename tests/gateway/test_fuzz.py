"""Whatever comes in, the answer is an HTTP answer and the next request is served."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.requests import _CHAT, _COMPLETION, Limits, parse_chat, parse_completion
from sluice_gateway.openai.unsupported import CHAT, COMPLETION

pytestmark = pytest.mark.slow

LIMITS = Limits(vocab_size=512, max_context_tokens=4096)
NAMES = sorted(_CHAT | _COMPLETION | CHAT.keys() | COMPLETION.keys() | {"role", "content", "type", "text"})
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "system", "tool", "text", "m", "function", "none", "high"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
bodies = values | st.fixed_dictionaries(
    {"model": st.just("m")},
    optional=dict.fromkeys([name for name in NAMES if name != "model"], values)
    | {"messages": st.lists(st.fixed_dictionaries({"role": values, "content": values}) | values, max_size=3)},
)


@given(bodies)
@settings(max_examples=100)
def test_any_json_is_a_request_or_a_4xx(body: Any) -> None:
    for parse in (parse_chat, parse_completion):
        error = refusal(parse, body)
        assert error is None or (error.status == 400 and json.loads(error.body())["error"]["message"])


def refusal(parse: Any, body: Any) -> ApiError | None:
    try:
        parse(body, LIMITS)
    except ApiError as error:
        return error
    return None


lines = st.binary(max_size=40) | st.sampled_from(
    [b"POST /v1/completions HTTP/1.1", b"Content-Type: application/json", b"Content-Length: 7", b"Host: x", b'{"a":1}']
)


@pytest.mark.slow
async def test_any_bytes_leave_the_server_serving(start: Any) -> None:
    stack = await start()
    port = int(stack.url.rsplit(":", 1)[1])

    async def throw(data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(20):
                await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    loop = asyncio.get_running_loop()

    @given(st.lists(lines, max_size=8), st.booleans())
    @settings(max_examples=200, deadline=None)
    def attack(parts: list[bytes], end: bool) -> None:
        data = b"\r\n".join(parts) + (b"\r\n\r\n" if end else b"")
        asyncio.run_coroutine_threadsafe(throw(data), loop).result(30)

    await asyncio.to_thread(attack)
    assert (await stack.chat()).status_code == 200
    await stack.idle()
