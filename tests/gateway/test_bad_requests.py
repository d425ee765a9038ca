"""Bad requests over raw HTTP: each is refused with the field's name, and the next good one is served."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from sluice_gateway.memory import MemoryEngine
from sluice_protocol.generate import Role

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
LIMIT = 1 << 20


def engines() -> dict[str, MemoryEngine]:
    return {"u": MemoryEngine(Role.UNIFIED, lambda _prompt, _position: 97)}


def messages(*entries: Any) -> dict[str, Any]:
    return {"messages": list(entries)}


def part(**fields: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": [fields]})


def assistant(**fields: Any) -> dict[str, Any]:
    return messages(USER, {"role": "assistant", "content": "x"} | fields)


def tool_call(**fields: Any) -> dict[str, Any]:
    base = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return assistant(tool_calls=[base | fields])


def called_with(arguments: str) -> dict[str, Any]:
    return tool_call(function={"name": "f", "arguments": arguments})


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
# Models write them, clients send them back; each was a 500 of a conversation that could never go on.
UNWRITABLE = [
    '{"a": "\\ud800"}',
    '{"a": "x\\udfff y"}',
    '{"\\ud800": 1}',
    '{"a": [{"b": ["\\ude00\\ud83d"]}]}',
    '{"a":' * 101 + "1" + "}" * 101,
    '{"a":' + "[" * 101 + "]" * 101 + "}",
    '{"a":' + "[" * 990 + "]" * 990 + "}",
    "[" * 100_000,
]
# Neither is any of these a reason to refuse.
WRITABLE = [
    '{"a": "\\ud83d\\ude00"}',
    '{"a":' + "[" * 99 + "]" * 99 + "}",
    '{"a": ' + "1" * 5000 + "}",
    '{"a": NaN, "b": 1e999, "c": -0}',
    '{"a": "\\ud800',
    "",
    "[1]",
]


# (fields that are changed, the field that the answer must name)
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"),
    (messages(), "messages"),
    (messages("hi"), "messages[0]"),
    (messages({}), "messages[0].role"),
    (messages({"role": "user"}), "messages[0].content"),
    (messages({"role": "king", "content": "x"}), "messages[0].role"),
    (messages({"role": 3, "content": "x"}), "messages[0].role"),
    (messages(USER, {"role": "function", "content": "x", "name": "f"}), "messages[1].role"),
    (messages({"role": "user", "content": None}), "messages[0].content"),
    (messages({"role": "user", "content": 5}), "messages[0].content"),
    (messages({"role": "user", "content": {}}), "messages[0].content"),
    (messages({"role": "user", "content": []}), "messages[0].content"),
    (messages({"role": "user", "content": ["x"]}), "messages[0].content[0]"),
    (messages(USER | {"colour": "red"}), "messages[0].colour"),
    (messages(USER | {"name": 5}), "messages[0].name"),
    (messages(USER | {"tool_calls": []}), "messages[0].tool_calls"),
    (part(type="image_url", image_url={"url": "data:"}), "messages[0].content[0].type"),
    (part(type="input_audio"), "messages[0].content[0].type"),
    (part(type="text"), "messages[0].content[0].text"),
    (part(text="x"), "messages[0].content[0].type"),
    (part(type="text", text=5), "messages[0].content[0].text"),
    (messages(USER, {"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
    (messages(USER, {"role": "tool", "content": "x", "tool_call_id": 1}), "messages[1].tool_call_id"),
    (messages(USER, {"role": "assistant"}), "messages[1].content"),
    (assistant(reasoning_content=[]), "messages[1].reasoning_content"),
    (assistant(function_call={"name": "f"}), "messages[1].function_call"),
    (assistant(tool_calls="f"), "messages[1].tool_calls"),
    (assistant(tool_calls=["f"]), "messages[1].tool_calls[0]"),
    (tool_call(id=None), "messages[1].tool_calls[0].id"),
    (tool_call(type="custom"), "messages[1].tool_calls[0].type"),
    (tool_call(function=None), "messages[1].tool_calls[0].function"),
    (tool_call(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments"),
    *((called_with(bad), ARGUMENTS) for bad in UNWRITABLE),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"max_tokens": 1_000_000}, "messages"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"top_p": -1e-310}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-310}, "repetition_penalty"),
    ({"repetition_penalty": 0.009}, "repetition_penalty"),
    ({"repetition_penalty": 100.5}, "repetition_penalty"),
    ({"repetition_penalty": 1e308}, "repetition_penalty"),
    ({"repetition_penalty": 10**30}, "repetition_penalty"),
    ({"repetition_penalty": []}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"512": 1}}, "logit_bias.512"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": {"²": 1}}, "logit_bias.²"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": 5}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": "yes"}, "store"),
    ({"service_tier": 5}, "service_tier"),
    ({"guided_json": {}}, "guided_json"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"min_tokens": False}, "min_tokens"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    (assistant(audio={"id": "a"}), "messages[1].audio"),
    (assistant(prefix=True), "messages[1].prefix"),
    (assistant(reasoning="a", reasoning_content="b"), "messages[1].reasoning"),
    (assistant(refusal=5), "messages[1].refusal"),
    (messages(USER | {"refusal": "no"}), "messages[0].refusal"),
    (part(type="refusal", refusal="no"), "messages[0].content[0].type"),
    (part(type="text", text="x", colour="red"), "messages[0].content[0].colour"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "max"}, "reasoning_effort"),
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"reasoning_effort": "xhigh"}}, "chat_template_kwargs.reasoning_effort"),
    ({"thinking": "enabled"}, "thinking"),
    ({"thinking": {}}, "thinking.type"),
    ({"thinking": {"type": "adaptive"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, "thinking.type"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    ({"best_off": 1}, "best_off"),
    ({"prompt": "x"}, "prompt"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [[5], "a"]}, "prompt[1]"),
    ({"prompt": [[5], [5.5]]}, "prompt[1][0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [512]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [0, 10**30]}, "prompt[1]"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": "1"}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"messages": [USER]}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"user": "me", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}),
    (CHAT, {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}),
    (CHAT, {"temperature": 0, "top_p": 1, "top_k": -1, "seed": -5, "stop": None, "logit_bias": {}, "n": None}),
    (CHAT, {"top_p": 0}),
    (CHAT, {"top_p": 1e-310, "temperature": 2}),
    (CHAT, messages({"role": "user", "content": "nul \u0000 and \u2028"})),
    (CHAT, messages({"role": "user", "content": ""})),
    (CHAT, messages({"role": "system", "content": "only"})),
    (CHAT, part(type="text", text="x")),
    (CHAT, assistant(content=None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "no json"}}])),
    (TEXT, {"best_of": 1, "echo": False, "suffix": None, "logprobs": 0}),
    (TEXT, {"prompt": ""}),
]


PYTHON = re.compile(
    r"<\w[\w.]*[: ]|\b(None|True|False|NoneType|dict|str|int|float|bool)\b|\w+(Error|Exception)\b|\\\\x|b'"
)
"""How Python writes values, classes and errors: nothing of it is a client's business."""


def body_for(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    return {"model": "m", "max_tokens": 2} | base | fields


async def test_every_bad_field_is_named_and_nothing_breaks(start: Any) -> None:
    stack = await start(engines())
    for path, table in ((CHAT, BAD_CHAT), (TEXT, BAD_TEXT)):
        for fields, param in table:
            response = await stack.http.post(path, json=body_for(path, fields))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (fields, error)
            assert error["type"] == "invalid_request_error"
            assert not PYTHON.search(error["message"]), error
            assert param.split("[")[0].split(".")[0] in error["message"] or "maximum context length" in error["message"]
    assert len(stack["u"].requests) == 0
    assert (await stack.chat()).status_code == 200
    await stack.idle()


async def test_what_has_no_effect_or_is_legal_is_served(start: Any) -> None:
    stack = await start(engines())
    for path, fields in GOOD:
        response = await stack.http.post(path, json=body_for(path, fields))
        assert response.status_code == 200, (fields, response.text)


# -- below the level of fields


def request(body: bytes, *headers: str, path: str = CHAT, method: str = "POST", length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


JSON = "Content-Type: application/json"
GOOD_BODY = json.dumps(body_for(CHAT, {})).encode()
RAW: dict[str, tuple[bytes, int]] = {
    "no JSON": (request(b"hello", JSON), 400),
    "empty": (request(b"", JSON), 400),
    "cut off": (request(GOOD_BODY[:-1], JSON), 400),
    "two values": (request(GOOD_BODY + GOOD_BODY, JSON), 400),
    "an array": (request(b"[]", JSON), 400),
    "a string": (request(b'"x"', JSON), 400),
    "null": (request(b"null", JSON), 400),
    "NaN": (request(GOOD_BODY.replace(b"2", b"NaN"), JSON), 400),
    "Infinity": (request(GOOD_BODY.replace(b"2", b"Infinity"), JSON), 400),
    "1e400": (request(GOOD_BODY.replace(b"2", b"1e400"), JSON), 400),
    "invalid UTF-8": (request(GOOD_BODY.replace(b"hi", b"\xff\xfe"), JSON), 400),
    "overlong UTF-8": (request(GOOD_BODY.replace(b"hi", b"\xc0\x80"), JSON), 400),
    "a lone surrogate": (request(GOOD_BODY.replace(b"hi", b"\\ud800"), JSON), 400),
    "a raw control character": (request(GOOD_BODY.replace(b"hi", b"\x01"), JSON), 400),
    "UTF-16": (request(GOOD_BODY.decode().encode("utf-16"), JSON), 400),
    "deep arrays": (request(b"[" * 100_000, JSON), 400),
    "deep objects": (request(b'{"a":' * 100_000, JSON), 400),
    "deep content": (request(GOOD_BODY.replace(b'"hi"', b"[" * 500 + b"]" * 500), JSON), 400),
    "a form": (request(b"model=m", "Content-Type: application/x-www-form-urlencoded"), 415),
    "text": (request(GOOD_BODY, "Content-Type: text/plain"), 415),
    "no content type": (request(GOOD_BODY), 415),
    "gzip": (request(GOOD_BODY, JSON, "Content-Encoding: gzip"), 415),
    "too large": (request(b" " * (LIMIT + 1), JSON), 413),
    "far too large": (request(b"", JSON, length=1 << 50), 413),
    "too large in chunks": (
        request(chunked(*[b" " * 65536] * 20), JSON, "Transfer-Encoding: chunked", length=-1),
        413,
    ),
    "unknown route": (request(b"", path="/v1/nothing"), 404),
    "trailing slash": (request(GOOD_BODY, JSON, path=CHAT + "/"), 404),
    "GET": (request(b"", method="GET"), 405),
    "DELETE": (request(b"", method="DELETE", path="/v1/models"), 405),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "bad chunk": (request(b"zz\r\n", JSON, "Transfer-Encoding: chunked", length=-1), 400),
    "bad deadline": (request(GOOD_BODY, JSON, "X-Sluice-Deadline-Ms: soon"), 400),
    "no deadline at all": (request(GOOD_BODY, JSON, "X-Sluice-Deadline-Ms: 0"), 400),
    "two lengths": (request(GOOD_BODY, JSON, "Content-Length: 5"), 400),
    "a length and chunks": (request(chunked(GOOD_BODY), JSON, "Transfer-Encoding: chunked"), 400),
    "a path that is no text": (request(b"", method="GET").replace(CHAT.encode(), b"/v1/\xff"), 400),
    "no host": (request(GOOD_BODY, JSON).replace(b"Host: x\r\n", b""), 400),
    "two hosts": (request(GOOD_BODY, JSON, "Host: y"), 400),
    "another version": (request(GOOD_BODY, JSON).replace(b"HTTP/1.1", b"HTTP/2.0"), 400),
    "an odd host, nowhere": (request(b"", path="/v1/nothing").replace(b"Host: x", b"Host: [x"), 404),
    "an odd host, wrongly": (request(b"", method="PUT").replace(b"Host: x", b"Host: x:y:z"), 405),
    "negative length": (request(b"{}", JSON, length=-5), 400),
    "another model": (request(GOOD_BODY.replace(b'"m"', b'"x"'), JSON), 404),
}


async def exchange(stack: Any, data: bytes) -> tuple[int, bytes, bytes]:
    """(status, head, body) of what comes back; writes while it reads, as a client that is told off early must."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))

    async def send() -> None:
        try:
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            pass

    sending = asyncio.create_task(send())
    answer = await asyncio.wait_for(reader.read(), 30)
    await sending
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


async def test_a_bad_body_gets_its_status_and_the_next_one_is_served(start: Any) -> None:
    stack = await start(engines(), max_body_bytes=LIMIT)
    for name, (data, status) in RAW.items():
        got, head, body = await exchange(stack, data)
        assert got == status, (name, head, body)
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, name
        assert error["message"]
        assert not PYTHON.search(error["message"]), error
        assert b"content-type: application/json" in head
        assert (await exchange(stack, request(GOOD_BODY, JSON)))[0] == 200, name
    assert (await stack.chat()).status_code == 200
    await stack.idle()


@pytest.mark.parametrize("arguments", WRITABLE)
async def test_arguments_of_a_call_may_be_any_other_text(arguments: str, start: Any) -> None:
    stack = await start({"u": MemoryEngine(Role.UNIFIED, lambda _prompt, _position: 97, max_context_tokens=8192)})
    assert (await stack.chat(**called_with(arguments))).status_code == 200


async def test_long_arguments_keep_no_other_request_waiting(start: Any) -> None:
    """They are a prompt as any other text: long ones are encoded off the event loop."""
    stack = await start(engines(), max_body_bytes=LIMIT)
    sizes: list[int] = []
    tokenize = stack.gateway.marks.tokenize
    stack.gateway.marks.tokenize = lambda size, work: (sizes.append(size), tokenize(size, work))[1]
    response = await stack.chat(**called_with("x" * 20_000))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert [size > 20_000 for size in sizes] == [True, True]  # the body, and the prompt


async def test_duplicate_keys_are_tolerated_and_the_last_one_counts(start: Any) -> None:
    stack = await start(engines())
    body = GOOD_BODY[:-1] + b', "max_tokens": 5}'
    status, _, answer = await exchange(stack, request(body, JSON))
    assert status == 200
    assert json.loads(answer)["usage"]["completion_tokens"] == 5


async def test_a_body_that_does_not_come_is_408(start: Any) -> None:
    stack = await start(engines(), body_timeout_s=0.2)
    status, head, _ = await exchange(stack, request(b"{", JSON, length=100))
    assert status == 408
    assert b"connection: close" in head


async def test_a_body_in_chunks_is_served(start: Any) -> None:
    stack = await start(engines())
    body = chunked(*(bytes([byte]) for byte in GOOD_BODY))
    status, _, _ = await exchange(stack, request(body, JSON, "Transfer-Encoding: chunked", length=-1))
    assert status == 200
