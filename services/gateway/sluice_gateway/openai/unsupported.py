"""Fields that would change the answer and are not supported: refused by name, with a remedy. A value of theirs that
asks for nothing special passes, as does every null. `docs/gateway.md` has this table too; a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice_gateway.openai.errors import invalid
from sluice_gateway.openai.fields import Json

Harmless = Callable[[Json, Mapping[str, Json]], bool]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`harmless(value, body)` says that the value asks for nothing special; `passes` says it to people."""

    remedy: str
    passes: str
    harmless: Harmless


def _never(remedy: str) -> Unsupported:
    return Unsupported(remedy, "", lambda _value, _body: False)


def _empty(remedy: str) -> Unsupported:
    return Unsupported(
        remedy,
        '`[]`, `{}`, `""`, `false`',
        lambda value, _body: type(value) is not int and value in ([], {}, "", False),
    )


def _is(remedy: str, passes: str, *values: Json) -> Unsupported:
    def harmless(value: Json, _body: Mapping[str, Json]) -> bool:
        told = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        return any(type(told) is type(known) and told == known for known in values)

    return Unsupported(remedy, passes, harmless)


def _number(remedy: str, number: int) -> Unsupported:
    """The number, written with a point or without."""
    return Unsupported(
        remedy, f"`{number}`", lambda value, _body: type(value) in (int, float) and bool(value == number)
    )


def _kind(passes: str, kind: type) -> Unsupported:
    """It has no effect here, but must be what it is everywhere."""
    return Unsupported(f"Send {passes}, or remove the field.", passes, lambda value, _body: isinstance(value, kind))


def _same_as_n(value: Json, body: Mapping[str, Json]) -> bool:
    return type(value) is int and value == (body.get("n") or 1)


_TOOLS = "Tool calling is not supported yet; remove the field."
_GRAMMAR = "Constrained output is not supported; ask for the format in the prompt, and remove the field."
_BEAMS = "There is no beam search; remove the field."
_WHOLE = "Remove the field."

# In both endpoints: of OpenAI, vLLM and SGLang.
_SHARED: dict[str, Unsupported] = {
    "store": _kind("a boolean", bool),
    "best_of": Unsupported("Send best_of equal to n, or use n and choose yourself.", "the value of `n`", _same_as_n),
    "response_format": _is(
        'Only {"type": "text"} is supported; ask for the format in the prompt.', '`{"type": "text"}`', {"type": "text"}
    ),
    "service_tier": _kind("a string", str),
    "min_tokens": _number("There is no least length; send ignore_eos, or remove the field.", 0),
    "skip_special_tokens": _is("Special tokens are never shown; remove the field.", "`true`", True),
    "spaces_between_special_tokens": _kind("a boolean", bool),
    "include_stop_str_in_output": _is("The stop string is cut off; append it yourself.", "`false`", False),
    "use_beam_search": _is(_BEAMS, "`false`", False),
    "length_penalty": _number(_BEAMS, 1),
    "early_stopping": _is(_BEAMS, "`false`", False),
    "typical_p": _number("Use top_p or min_p.", 1),
    "prompt_logprobs": _never("Log-probabilities are of the answer's tokens only; remove the field."),
    "truncate_prompt_tokens": _never("Shorten the prompt yourself."),
    "allowed_token_ids": _empty("Use logit_bias."),
    "bad_words": _empty("Use logit_bias."),
    "logits_processors": _empty(_WHOLE),
    "return_token_ids": _is(_WHOLE, "`false`", False),
    "return_tokens_as_token_ids": _is(_WHOLE, "`false`", False),
    "guided_json": _never(_GRAMMAR),
    "guided_regex": _never(_GRAMMAR),
    "guided_choice": _empty(_GRAMMAR),
    "guided_grammar": _never(_GRAMMAR),
    "guided_decoding_backend": _never(_GRAMMAR),
    "guided_whitespace_pattern": _never(_GRAMMAR),
    "structured_outputs": _empty(_GRAMMAR),
    "structural_tag": _never(_GRAMMAR),
    "json_schema": _never(_GRAMMAR),
    "regex": _never(_GRAMMAR),
    "ebnf": _never(_GRAMMAR),
    "priority": _number("All requests wait in one order; remove the field.", 0),
    "cache_salt": _never("The cache is shared by all users of this gateway; run one for each tenant."),
    "kv_transfer_params": _never("The gateway chooses the engines; remove the field."),
}

CHAT: dict[str, Unsupported] = {
    "tools": _empty(_TOOLS),
    "tool_choice": _is(_TOOLS, '`"none"`, `"auto"`', "none", "auto"),
    "functions": _empty(_TOOLS),
    "function_call": _is(_TOOLS, '`"none"`, `"auto"`', "none", "auto"),
    "audio": _never("Only text output is supported; remove the field."),
    "modalities": _is('Only ["text"] is supported.', '`["text"]`', ["text"]),
    "verbosity": _is("Ask for the length in the prompt, or set max_tokens.", '`"medium"`', "medium"),
    "web_search_options": _never("There is no web search; put the material in the prompt."),
    "echo": _is("Put the messages in front of the answer yourself.", "`false`", False),
    "add_generation_prompt": _is("An answer is always a new message; remove the field.", "`true`", True),
    "continue_final_message": _is("An answer is always a new message; use /v1/completions.", "`false`", False),
    "add_special_tokens": _is("The chat format has them already; remove the field.", "`false`", False),
    "chat_template": _never("The model's own chat format is used; remove the field."),
    "documents": _empty("Put the documents in the prompt."),
    "mm_processor_kwargs": _empty("Only text is supported; remove the field."),
    "include_reasoning": _is("Reasoning comes apart from the content; leave it out yourself.", "`true`", True),
    "separate_reasoning": _is("Reasoning always comes apart from the content.", "`true`", True),
    "stream_reasoning": _is("Reasoning is always streamed as it is made.", "`true`", True),
    **_SHARED,
}

COMPLETION: dict[str, Unsupported] = {
    "echo": _is("Put the prompt in front of the answer yourself.", "`false`", False),
    "suffix": _empty("Only continuation is supported; remove the field."),
    **_SHARED,
}

# Accepted and without effect on the answer, whatever they hold.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "parallel_tool_calls",
        "request_id",
        "rid",
    }
)

# Of a message.
_FUNCTION = "Send tool_calls instead."
_PREFIX = "An answer is always a new message; use /v1/completions."
MESSAGE: dict[str, Unsupported] = {
    "audio": _never("Only text is supported; remove the message, or send its transcript as content."),
    "function_call": _never(_FUNCTION),
    "prefix": _is(_PREFIX, "`false`", False),
    "partial": _is(_PREFIX, "`false`", False),
}
# Of a message, a part of its content or a tool call: what SDKs keep there for themselves or for others.
MESSAGE_IGNORED = frozenset(
    {
        "annotations",
        "cache_control",
        "extra_content",
        "id",
        "metadata",
        "parsed",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }
)


def refuse_unsupported(body: Mapping[str, Json], table: Mapping[str, Unsupported], place: str = "") -> None:
    """`place`: where in the request the object is."""
    for name, entry in table.items():
        value = body.get(name)
        if value is not None and not entry.harmless(value, body):
            field = f"{place}.{name}" if place else name
            raise invalid(field, f"'{field}' is not supported with this value. {entry.remedy}", "unsupported_parameter")
