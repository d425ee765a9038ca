"""What SDKs send back is accepted where it cannot change the answer, and refused by name where it would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice_gateway.memory import MemoryEngine
from sluice_gateway.openai.conversation import parse_messages
from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.messages import Message, Speaker
from sluice_gateway.openai.requests import Limits, parse_chat, parse_completion
from sluice_gateway.openai.unsupported import CHAT, COMPLETION, IGNORED, MESSAGE, MESSAGE_IGNORED, Unsupported
from sluice_gateway.text.tokenizer import ByteTokenizer
from sluice_protocol.generate import Role

USER = {"role": "user", "content": "hi"}
LIMITS = Limits(512, 4096)
DOCS = Path(__file__).parents[2] / "docs" / "gateway.md"


def parsed(**fields: Any) -> Message:
    return parse_messages([USER, {"role": "assistant"} | fields])[1]


def said(text: str, reasoning: str = "") -> Message:
    return Message(Speaker.ASSISTANT, text, reasoning)


# What LiteLLM, LangChain, the AI SDK, OpenRouter and OpenAI's own package leave in a message.
INERT: list[dict[str, Any]] = [
    {"refusal": None, "annotations": [], "audio": None, "parsed": None, "function_call": None, "tool_calls": None},
    {"parsed": {"a": 1}},
    {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    {"provider_specific_fields": {"a": 1}, "cache_control": {"type": "ephemeral"}, "id": "m1"},
    {"thinking_blocks": [], "extra_content": {}, "metadata": {}, "name": "me", "prefix": False},
    {"nobody_knows_this": None},
    {"refusal": "it was refused, and said so"},
]


@pytest.mark.parametrize("fields", INERT)
def test_what_cannot_change_the_answer_passes(fields: dict[str, Any]) -> None:
    assert parsed(content="x", **fields) == said("x")


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_so_it_does_in_the_other_roles(role: str) -> None:
    """... and in the parts of a content."""
    place = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": None, "unknown": None}
    message = {"role": role, "content": [place], "tool_calls": None, "refusal": None, "cache_control": {}}
    if role == "tool":
        message["tool_call_id"] = "c"
    assert parse_messages([message])[0].text == "x"


def test_reasoning_is_another_name_of_reasoning_content() -> None:
    assert parsed(content="x", reasoning="hm") == said("x", "hm")
    assert parsed(content="x", reasoning="hm", reasoning_content="hm") == said("x", "hm")
    assert parsed(content="x", reasoning=None, reasoning_content="hm") == said("x", "hm")
    with pytest.raises(ApiError, match="send one of them") as conflict:
        parsed(content="x", reasoning="a", reasoning_content="b")
    assert (conflict.value.status, conflict.value.param) == (400, "messages[1].reasoning")


def test_a_refusal_without_content_is_the_content() -> None:
    assert parsed(content=None, refusal="I cannot") == said("I cannot")
    assert parsed(refusal="I cannot") == said("I cannot")
    assert parsed(content="", refusal="I cannot") == said("I cannot")
    assert parsed(content=[{"type": "refusal", "refusal": "I cannot"}]) == said("I cannot")


def test_an_answer_that_was_cut_off_while_it_was_reasoning_may_come_back() -> None:
    assert parsed(content=None, reasoning_content="hm") == said("", "hm")


def test_a_call_may_carry_what_the_package_parsed_of_it() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": None, "index": 0, "function": function, "provider_specific_fields": None}
    assert parsed(content=None, tool_calls=[call]).tool_calls[0].name == "f"


@pytest.mark.parametrize("thinking", [False, True])
async def test_the_final_message_of_openais_stream_helper_is_history(start: Any, thinking: bool) -> None:
    """All that `model_dump()` makes of it, nulls and all."""
    data = ByteTokenizer().encode_raw("hm</think>Hello" if thinking else "Hello")
    engine = MemoryEngine(Role.UNIFIED, lambda _p, i: data[i] if i < len(data) else 257)
    stack = await start({"u": engine})
    extra = {"chat_template_kwargs": {"thinking": thinking}}
    messages: Any = [USER]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client:
        async with client.chat.completions.stream(model="m", messages=messages, extra_body=extra) as stream:
            final = (await stream.get_final_completion()).choices[0].message.model_dump()
        assert final["content"] == "Hello"
        assert "parsed" in final
        whole = await client.chat.completions.create(model="m", messages=[*messages, final, USER], extra_body=extra)
        again = whole.choices[0].message.model_dump()
        await client.chat.completions.create(model="m", messages=[*messages, final, USER, again, USER])


# -- fields of a request

# (a value that passes, one that does not)
TRIED: dict[str, tuple[Any, Any]] = {
    "guided_json": (None, {"type": "object"}),
    "skip_special_tokens": (True, False),
    "min_tokens": (0, 4),
    "store": (True, "yes"),
    "service_tier": ("flex", 4),
    "length_penalty": (1.0, 0.5),
    "best_of": (1, 2),
    "bad_words": ([], ["x"]),
    "response_format": ({"type": "text", "json_schema": None}, {"type": "json_object"}),
}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER]} | fields


@pytest.mark.parametrize("name", TRIED)
def test_a_field_passes_where_it_asks_for_nothing_special(name: str) -> None:
    good, bad = TRIED[name]
    assert parse_chat(request(**{name: good}), LIMITS) == parse_chat(request(), LIMITS)
    with pytest.raises(ApiError) as refused:
        parse_chat(request(**{name: bad}), LIMITS)
    assert (refused.value.status, refused.value.param) == (400, name)
    assert name in refused.value.message


@pytest.mark.parametrize("name", sorted({*CHAT, *COMPLETION, *IGNORED, "nobody_knows_this"}))
def test_a_null_is_absent(name: str) -> None:
    assert parse_chat(request(**{name: None}), LIMITS) == parse_chat(request(), LIMITS)
    text = {"model": "m", "prompt": "x"}
    assert parse_completion(text | {name: None}, LIMITS) == parse_completion(text, LIMITS)


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_never_changes_the_answer_passes_whatever_it_holds(name: str) -> None:
    for value in ("x", 1, [1], {"a": "b"}, True):
        assert parse_chat(request(**{name: value}), LIMITS) == parse_chat(request(), LIMITS)


def rows(place: str, table: Mapping[str, Unsupported], ignored: frozenset[str]) -> set[str]:
    passing = {f"| {place} | `{name}` | any | |" for name in ignored}
    return passing | {
        f"| {place} | `{name}` | {entry.passes or 'null'} | {entry.remedy} |" for name, entry in table.items()
    }


def test_the_docs_have_the_table_of_the_code() -> None:
    both = {name: entry for name, entry in CHAT.items() if COMPLETION.get(name) == entry}
    only = [("chat", CHAT), ("completions", COMPLETION)]
    told = rows("both", both, IGNORED) | rows("message", MESSAGE, MESSAGE_IGNORED)
    for place, table in only:
        told |= rows(place, {name: entry for name, entry in table.items() if name not in both}, frozenset())
    written = re.findall(r"^\| (?:both|chat|completions|message) \| `.*$", DOCS.read_text(), re.MULTILINE)
    assert sorted(told - set(written)) == []
    assert sorted(set(written) - told) == []
