"""Fields that would change the answer and are not supported: refused by name, with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice_gateway.errors import invalid
from sluice_gateway.fields import Json


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`harmless(value, body)` says that the value asks for nothing special."""

    remedy: str
    harmless: Callable[[Json, Mapping[str, Json]], bool]


def _never(_value: Json, _body: Mapping[str, Json]) -> bool:
    return False


def _empty(value: Json, _body: Mapping[str, Json]) -> bool:
    return value in ([], {}, "", False)


def _is(*values: Json) -> Callable[[Json, Mapping[str, Json]], bool]:
    return lambda value, _body: any(type(value) is type(known) and value == known for known in values)


def _text_format(value: Json, _body: Mapping[str, Json]) -> bool:
    return bool(value == {"type": "text"})


def _same_as_n(value: Json, body: Mapping[str, Json]) -> bool:
    return type(value) is int and value == (body.get("n") or 1)


_TOOLS = "Tool calling is not supported yet; remove the field."

CHAT: dict[str, Unsupported] = {
    "tools": Unsupported(_TOOLS, _empty),
    "tool_choice": Unsupported(_TOOLS, _is("none", "auto")),
    "functions": Unsupported(_TOOLS, _empty),
    "function_call": Unsupported(_TOOLS, _is("none", "auto")),
    "response_format": Unsupported(
        'Only {"type": "text"} is supported; ask for the format in the prompt.', _text_format
    ),
    "audio": Unsupported("Only text output is supported; remove the field.", _never),
    "modalities": Unsupported('Only ["text"] is supported.', _is(["text"])),
    "verbosity": Unsupported("Ask for the length in the prompt, or set max_tokens.", _is("medium")),
    "web_search_options": Unsupported("There is no web search; put the material in the prompt.", _never),
    "store": Unsupported("Nothing is stored; send false or remove the field.", _is(False)),
    "service_tier": Unsupported('There is one tier; send "auto" or remove the field.', _is("auto", "default")),
}

COMPLETION: dict[str, Unsupported] = {
    "echo": Unsupported("Put the prompt in front of the answer yourself.", _is(False)),
    "suffix": Unsupported("Only continuation is supported; remove the field.", _empty),
    "best_of": Unsupported("Send best_of equal to n, or use n and choose yourself.", _same_as_n),
}

# Accepted and without effect on the answer.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "parallel_tool_calls",
    }
)


def refuse_unsupported(body: Mapping[str, Json], table: Mapping[str, Unsupported]) -> None:
    for name, entry in table.items():
        value = body.get(name)
        if value is not None and not entry.harmless(value, body):
            raise invalid(name, f"'{name}' is not supported with this value. {entry.remedy}", "unsupported_parameter")
