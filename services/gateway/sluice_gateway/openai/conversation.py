"""The `messages` field, checked, as values."""

from __future__ import annotations

from sluice_gateway.openai import fields as f
from sluice_gateway.openai.errors import invalid, quoted
from sluice_gateway.openai.fields import Json
from sluice_gateway.openai.messages import Message, Speaker, ToolCall
from sluice_gateway.openai.tool_arguments import BadArguments, parse_arguments
from sluice_gateway.openai.unsupported import MESSAGE, MESSAGE_IGNORED, refuse_unsupported

_ANY = frozenset({"role", "content", "name"}) | MESSAGE_IGNORED | MESSAGE.keys()
_KEYS: dict[Speaker, frozenset[str]] = {
    Speaker.SYSTEM: _ANY,
    Speaker.DEVELOPER: _ANY,
    Speaker.USER: _ANY,
    Speaker.TOOL: _ANY | {"tool_call_id"},
    Speaker.ASSISTANT: _ANY | {"reasoning_content", "reasoning", "tool_calls", "refusal"},
}


def parse_messages(value: Json) -> tuple[Message, ...]:
    """At least one; `name` is accepted and has no place in the encoding."""
    entries = f.array("messages", value)
    if not entries:
        raise f.wrong_value("messages", "must not be empty.")
    return tuple(_message(f"messages[{index}]", entry) for index, entry in enumerate(entries))


def _message(place: str, value: Json) -> Message:
    entry = f.mapping(place, value)
    if entry.get("role") is None:
        raise invalid(f"{place}.role", f"Missing required parameter: '{place}.role'.", "missing_required_parameter")
    role = Speaker(f.one_of(*Speaker)(f"{place}.role", entry["role"]))
    refuse_unsupported(entry, MESSAGE, place)
    f.only_keys(place, entry, _KEYS[role])
    if entry.get("name") is not None:
        f.string(f"{place}.name", entry["name"])
    if role is Speaker.ASSISTANT:
        return _assistant(place, entry)
    text = _content(f"{place}.content", entry.get("content"), role)
    if role is not Speaker.TOOL:
        return Message(role, text)
    if entry.get("tool_call_id") is None:
        field = f"{place}.tool_call_id"
        raise invalid(field, f"Missing required parameter: '{field}'.", "missing_required_parameter")
    return Message(role, text, tool_call_id=f.string(f"{place}.tool_call_id", entry["tool_call_id"]))


def _assistant(place: str, entry: dict[str, Json]) -> Message:
    calls = _tool_calls(f"{place}.tool_calls", entry.get("tool_calls"))
    reasoning = _reasoning(place, entry)
    refusal = f.take(entry, "refusal", lambda _name, value: f.string(f"{place}.refusal", value), "")
    content = entry.get("content")
    if content is None and (refusal or reasoning or calls):
        text = refusal
    else:
        text = _content(f"{place}.content", content, Speaker.ASSISTANT) or refusal
    return Message(Speaker.ASSISTANT, text, reasoning, calls)


def _reasoning(place: str, entry: dict[str, Json]) -> str:
    """`reasoning` is another name of `reasoning_content`: both go round, and it enters the prompt in tool loops."""
    names = [name for name in ("reasoning_content", "reasoning") if entry.get(name) is not None]
    told = [f.string(f"{place}.{name}", entry[name]) for name in names]
    if len(set(told)) > 1:
        raise f.wrong_value(
            f"{place}.reasoning", "it is another name of 'reasoning_content' and says something else: send one of them."
        )
    return told[0] if told else ""


def _content(place: str, value: Json, role: Speaker) -> str:
    """A string, or parts of type text, which are joined: those of a tool's result as paragraphs."""
    if value is None:
        raise invalid(place, f"Missing required parameter: '{place}'.", "missing_required_parameter")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise f.wrong_type(place, "a string or an array of parts", value)
    if not f.array(place, value):
        raise f.wrong_value(place, "must not be an empty array.")
    between = "\n\n" if role is Speaker.TOOL else ""
    return between.join(_part(f"{place}[{index}]", part, role) for index, part in enumerate(value))


def _part(place: str, value: Json, role: Speaker) -> str:
    part = f.mapping(place, value)
    kind = f.string(f"{place}.type", part.get("type"))
    kinds = ("text", "refusal") if role is Speaker.ASSISTANT else ("text",)
    if kind not in kinds:
        raise f.wrong_value(f"{place}.type", f"only parts of type 'text' are supported, but got {quoted(kind)}.")
    f.only_keys(place, part, MESSAGE_IGNORED | {"type", kind})
    return f.string(f"{place}.{kind}", part.get(kind))


def _tool_calls(place: str, value: Json) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    return tuple(_tool_call(f"{place}[{index}]", entry) for index, entry in enumerate(f.array(place, value)))


def _tool_call(place: str, value: Json) -> ToolCall:
    call = f.mapping(place, value)
    f.only_keys(place, call, MESSAGE_IGNORED | {"type", "function", "index"})
    if call.get("type") not in (None, "function"):
        raise f.wrong_value(f"{place}.type", "must be 'function'.")
    function = f.mapping(f"{place}.function", call.get("function"))
    name = f.string(f"{place}.function.name", function.get("name"))
    arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
    return ToolCall(f.string(f"{place}.id", call.get("id")), name, arguments)


def _arguments(place: str, value: Json) -> str:
    arguments = f.string(place, value)
    try:
        parse_arguments(arguments)
    except BadArguments as error:
        raise f.wrong_value(place, str(error)) from error
    return arguments
