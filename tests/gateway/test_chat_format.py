"""Generated conversations against the published rules of V4's format, written down here a second time, from
`../shared/facts/deepseek.md` 7.1 and not from our code."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from sluice_gateway.openai.conversation import parse_messages
from sluice_gateway.text.template import Marker, render_chat

CONVERSATIONS = 200
TEXTS = ["a", "Hello.", "zwei\nZeilen", "é 漢", "", "  spaces  ", "x" * 40]
ARGUMENTS = ["{}", '{"city": "Bonn"}', '{"n": 1, "deep": [{"a": null}], "yes": true}', '{"ü": "<b>"}', "no json", "[1]"]


def published(messages: list[dict[str, Any]], thinking: bool, effort: str) -> str:
    """The prompt of an API request, in strings."""
    # Consecutive tool and user messages merge into one user turn; every other message stands alone.
    turns: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        entry = {"role": message["role"], "at": place, "message": message, "blocks": [message]}
        if entry["role"] in ("user", "tool") and turns and turns[-1]["role"] == "user":
            turns[-1]["blocks"].append(message)
            turns[-1]["until"] = place
            continue
        if entry["role"] == "tool":
            entry["role"] = "user"
        turns.append(entry | {"until": place})
    spoken = [place for place, message in enumerate(messages) if message["role"] in ("user", "developer")]
    last = spoken[-1] if spoken else -1
    if thinking:  # developer messages before the last user message go
        turns = [turn for turn in turns if turn["role"] != "developer" or turn["at"] >= last]
    out = "<｜begin▁of▁sentence｜>" + (effort if thinking else "")
    calls: list[str] = []
    for number, turn in enumerate(turns):
        message, after = turn["message"], turns[number + 1]["role"] if number + 1 < len(turns) else None
        if turn["role"] == "system":
            out += flat(message["content"], "")
        elif turn["role"] == "assistant":
            if thinking and turn["at"] > last:
                out += message.get("reasoning_content", "") + "</think>"
            out += flat(message["content"], "") if message["content"] else ""
            if message.get("tool_calls"):
                calls = [call["id"] for call in message["tool_calls"]]
                invokes = "\n".join(invoke(call["function"]) for call in message["tool_calls"])
                out += f"\n\n<｜DSML｜tool_calls>\n{invokes}\n</｜DSML｜tool_calls>"
            out += "<｜end▁of▁sentence｜>"
        else:
            out += "<｜User｜>" + "\n\n".join(in_order(turn["blocks"], calls))
            if after in ("assistant", None):
                out += "<｜Assistant｜>" + ("<think>" if thinking and turn["until"] >= last else "</think>")
    if turns[-1]["role"] in ("system", "assistant"):  # an API request always asks for a new message
        out += "<｜Assistant｜>" + ("<think>" if thinking else "</think>")
    return out


def in_order(blocks: list[dict[str, Any]], calls: list[str]) -> list[str]:
    def place_of(result: dict[str, Any]) -> int:
        return calls.index(result["tool_call_id"]) if result["tool_call_id"] in calls else 0

    results = sorted((block for block in blocks if block["role"] == "tool"), key=place_of)
    texts = []
    for block in blocks:
        if block["role"] == "tool":
            texts.append(f"<tool_result>{flat(results.pop(0)['content'], chr(10) * 2)}</tool_result>")
        else:
            texts.append(flat(block["content"], ""))
    return texts


def flat(content: Any, between: str) -> str:
    return content if isinstance(content, str) else between.join(part["text"] for part in content)


def invoke(function: dict[str, str]) -> str:
    try:
        told = json.loads(function["arguments"])
    except ValueError:
        told = None
    if not isinstance(told, dict):
        told = {"arguments": function["arguments"]}
    lines = []
    for key, value in told.items():
        text, kind = (value, "true") if isinstance(value, str) else (json.dumps(value, ensure_ascii=False), "false")
        lines.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>')
    inside = "\n".join(lines)
    return f'<｜DSML｜invoke name="{function["name"]}">\n{inside}\n</｜DSML｜invoke>'


def generated(random: Random) -> list[dict[str, Any]]:
    """Any order of roles, tool loops with results in any order, contents as text or parts."""

    def content() -> Any:
        if random.random() < 0.3:
            return [{"type": "text", "text": random.choice(TEXTS)} for _ in range(random.randint(1, 3))]
        return random.choice(TEXTS)

    messages: list[dict[str, Any]] = []
    ids: list[str] = []
    for number in range(random.randint(1, 9)):
        likely = ["user", "user", "assistant", "assistant", "developer", "system", "tool"]
        role = "tool" if ids and random.random() < 0.6 else random.choice(likely)
        message: dict[str, Any] = {"role": role, "content": content()}
        if role == "assistant":
            if random.random() < 0.6:
                message["reasoning_content"] = random.choice(TEXTS)
            if random.random() < 0.5:
                ids = [f"c{number}-{i}" for i in range(random.randint(1, 3))]
                functions = [{"name": random.choice("fg"), "arguments": random.choice(ARGUMENTS)} for _ in ids]
                message["tool_calls"] = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions)]
                if random.random() < 0.5:
                    message["content"] = None
                random.shuffle(ids)
        if role == "tool":
            message["tool_call_id"] = ids.pop() if ids else "nobody's"
        messages.append(message)
    return messages


@pytest.mark.parametrize("thinking", [False, True])
def test_generated_conversations_read_as_the_published_rules_say(thinking: bool) -> None:
    random = Random(7)
    roles: set[tuple[str, ...]] = set()
    for number in range(CONVERSATIONS):
        messages = generated(random)
        effort = random.choice(["", "Think hard.\n\n"])
        segments = render_chat(parse_messages(messages), thinking, effort)
        ours = "".join(s.name if isinstance(s, Marker) else s for s in segments)
        assert ours == published(messages, thinking, effort), (number, messages)
        roles.add(tuple(message["role"] for message in messages))
    assert len(roles) >= 60  # it is as many kinds of conversation as that


def test_parts_of_a_tools_result_are_paragraphs() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert parse_messages([{"role": "tool", "tool_call_id": "c", "content": parts}])[0].text == "A\n\nB"
    assert parse_messages([{"role": "user", "content": parts}])[0].text == "AB"
