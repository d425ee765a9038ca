"""JSON bodies of the two generating endpoints, checked, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice_gateway.openai import fields as f
from sluice_gateway.openai.conversation import parse_messages
from sluice_gateway.openai.errors import invalid
from sluice_gateway.openai.fields import Json, take
from sluice_gateway.openai.messages import Message
from sluice_gateway.openai.thinking import read_thinking
from sluice_gateway.openai.unsupported import CHAT, COMPLETION, IGNORED, refuse_unsupported
from sluice_gateway.text.encoders import SCRIPTED
from sluice_protocol.sampling import BOUNDS, MAX_INT, MAX_TOP_LOGPROBS, Sampling

Prompt = str | tuple[int, ...]
SAMPLING_DEFAULTS = Sampling(temperature=1.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for. `defaults` are the sampling values of a request that names none. `efforts`: what each
    effort of reasoning that the checkpoint knows puts first in the prompt."""

    vocab_size: int
    max_context_tokens: int
    max_choices: int = 128
    defaults: Sampling = SAMPLING_DEFAULTS
    efforts: dict[str, str] = field(default_factory=lambda: SCRIPTED.paragraphs)


@dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share. `sampling` lacks seed, choice, stop tokens and max_tokens, which are decided later."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    stop: tuple[str, ...]
    seed: int | None
    max_tokens: int | None
    max_tokens_field: str
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`first`: what the effort of reasoning puts first in the prompt."""

    options: Options
    messages: tuple[Message, ...]
    thinking: bool
    first: str = ""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    options: Options
    prompts: tuple[Prompt, ...]
    add_special_tokens: bool

    @property
    def thinking(self) -> bool:
        return False


_SHARED = (
    frozenset({"model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "logit_bias", "logprobs"})
    | {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | {"ignore_eos", "stop_token_ids"}
)
_CHAT = (
    _SHARED
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort"}
    | {"thinking"}
)
_COMPLETION = _SHARED | {"prompt", "add_special_tokens"}


def parse_chat(body: Json, limits: Limits) -> ChatRequest:
    checked = _checked_object(body)
    refuse_unsupported(checked, CHAT)
    f.only_keys("", checked, _CHAT | CHAT.keys() | IGNORED)
    if "messages" not in checked:
        raise invalid("messages", "Missing required parameter: 'messages'.", "missing_required_parameter")
    options = _options(checked, limits, _chat_logprobs(checked))
    thinking = read_thinking(checked, limits.efforts)
    return ChatRequest(options, parse_messages(checked["messages"]), thinking.is_on, thinking.first)


def parse_completion(body: Json, limits: Limits) -> CompletionRequest:
    checked = _checked_object(body)
    refuse_unsupported(checked, COMPLETION)
    f.only_keys("", checked, _COMPLETION | COMPLETION.keys() | IGNORED)
    if checked.get("prompt") is None:
        raise invalid("prompt", "Missing required parameter: 'prompt'.", "missing_required_parameter")
    options = _options(checked, limits, take(checked, "logprobs", _completion_logprobs, None))
    prompts = _prompts(checked["prompt"], limits)
    if len(prompts) * options.n > limits.max_choices:
        raise f.wrong_value("n", f"prompts times n is at most {limits.max_choices}.")
    return CompletionRequest(options, prompts, take(checked, "add_special_tokens", f.boolean, True))


def _checked_object(body: Json) -> dict[str, Json]:
    if not isinstance(body, dict):
        raise invalid(None, f"The request body must be a JSON object, but it is {f.type_name(body)}.", "invalid_type")
    if body.get("model") is None:
        raise invalid("model", "Missing required parameter: 'model'.", "missing_required_parameter")
    return body


def _options(body: Mapping[str, Json], limits: Limits, top_logprobs: int | None) -> Options:
    stream = take(body, "stream", f.boolean, False)
    field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    tokens = f.integer(1, MAX_INT)
    take(body, "max_tokens", tokens, 1)
    return Options(
        model=f.string("model", body["model"]),
        stream=stream,
        include_usage=_include_usage(body, stream),
        n=take(body, "n", f.integer(1, limits.max_choices), 1),
        stop=take(body, "stop", f.stop_strings, ()),
        seed=take(body, "seed", f.integer(-(2**63), 2**63 - 1), None),
        max_tokens=take(body, field, tokens, None),
        max_tokens_field=field,
        ignore_eos=take(body, "ignore_eos", f.boolean, False),
        stop_token_ids=take(body, "stop_token_ids", f.token_ids(limits.vocab_size, 128), ()),
        sampling=_sampling(body, limits, top_logprobs),
    )


def _include_usage(body: Mapping[str, Json], stream: bool) -> bool:
    options: dict[str, Json] = take(body, "stream_options", f.mapping, {})
    if body.get("stream_options") is not None and not stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.", "invalid_value")
    f.only_keys("stream_options", options, frozenset({"include_usage", "include_obfuscation"}))
    value = options.get("include_usage")
    return False if value is None else f.boolean("stream_options.include_usage", value)


def _top_k(field: str, value: Json) -> int:
    """-1 means off, as elsewhere."""
    return max(0, f.integer(-1, MAX_INT)(field, value))


def sampling_numbers(body: Mapping[str, Json], base: Sampling) -> Sampling:
    """`base` with what `body` says of the numbers that a model may have defaults for."""

    def number(name: str) -> float:
        default: float = getattr(base, name)
        return take(body, name, f.number(*BOUNDS[name]), default)

    return replace(
        base,
        temperature=number("temperature"),
        # 0 means the best token only; so does the least that goes over the wire, where 0 is "not set".
        top_p=max(BOUNDS["top_p"].low, take(body, "top_p", f.number(0.0, BOUNDS["top_p"].high), base.top_p)),
        top_k=take(body, "top_k", _top_k, base.top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        presence_penalty=number("presence_penalty"),
        frequency_penalty=number("frequency_penalty"),
    )


def _sampling(body: Mapping[str, Json], limits: Limits, top_logprobs: int | None) -> Sampling:
    return replace(
        sampling_numbers(body, limits.defaults),
        logit_bias=take(body, "logit_bias", f.logit_bias(limits.vocab_size), ()),
        top_logprobs=top_logprobs,
    )


def _chat_logprobs(body: Mapping[str, Json]) -> int | None:
    wanted = take(body, "logprobs", f.boolean, False)
    top: int | None = take(body, "top_logprobs", f.integer(0, MAX_TOP_LOGPROBS), None)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.", "invalid_value")
    return (top or 0) if wanted else None


def _completion_logprobs(field: str, value: Json) -> int | None:
    if value is False:
        return None
    return f.integer(0, MAX_TOP_LOGPROBS)(field, value)


def _prompts(value: Json, limits: Limits) -> tuple[Prompt, ...]:
    """A text, token ids, an array of texts or an array of arrays of token ids."""
    if isinstance(value, str):
        return (value,)
    entries = f.array("prompt", value, _most_tokens(limits))
    if not entries:
        raise f.wrong_value("prompt", "must not be empty.")
    if type(entries[0]) is int:
        return (_token_prompt("prompt", entries, limits),)
    if len(entries) > limits.max_choices:
        raise f.wrong_value("prompt", f"at most {limits.max_choices} prompts are allowed, but got {len(entries)}.")
    if isinstance(entries[0], str):
        return tuple(f.string(f"prompt[{i}]", entry) for i, entry in enumerate(entries))
    if isinstance(entries[0], list):
        return tuple(_token_prompt(f"prompt[{i}]", entry, limits) for i, entry in enumerate(entries))
    raise f.wrong_type("prompt[0]", "a string, an integer or an array of integers", entries[0])


def _most_tokens(limits: Limits) -> int:
    """Of a prompt that is looked at; what an engine takes of it is told later, and better."""
    return max(limits.max_context_tokens, 1 << 20)


def _token_prompt(field: str, value: Json, limits: Limits) -> tuple[int, ...]:
    ids = f.token_ids(limits.vocab_size, _most_tokens(limits))(field, value)
    if not ids:
        raise f.wrong_value(field, "must not be empty.")
    return ids
