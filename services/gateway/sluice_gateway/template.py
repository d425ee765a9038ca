"""DeepSeek-V4's chat encoding: a conversation becomes text and markers, these become tokens.

Markers are values, not substrings: what a client wrote is text, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluice_gateway.messages import Message, Speaker, ToolCall
from sluice_gateway.tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER, Tokenizer
from sluice_gateway.tool_arguments import parse_arguments, write_json


@dataclass(frozen=True, slots=True)
class Marker:
    name: str


Segment = Marker | str


def render_chat(messages: Sequence[Message], thinking: bool) -> list[Segment]:
    """The whole prompt, the marks that make the model speak included."""
    segments: list[Segment] = [Marker(BOS)]
    last_user = max((i for i, m in enumerate(messages) if m.role in (Speaker.USER, Speaker.DEVELOPER)), default=-1)
    position = 0
    while position < len(messages):
        message = messages[position]
        if message.role is Speaker.SYSTEM:
            segments.append(message.text)
        elif message.role is Speaker.ASSISTANT:
            segments.extend(_assistant(message, thinking and position > last_user))
        else:
            end = _turn_end(messages, position)
            order = _call_order(messages[:position])
            segments.extend(_user_turn(messages[position:end], order))
            position = end - 1
        position += 1
    segments += [Marker(ASSISTANT), Marker(THINK if thinking else END_THINK)]
    return segments


def _turn_end(messages: Sequence[Message], start: int) -> int:
    """Consecutive user, developer and tool messages are one turn."""
    end = start
    while end < len(messages) and messages[end].role not in (Speaker.SYSTEM, Speaker.ASSISTANT):
        end += 1
    return end


def _call_order(before: Sequence[Message]) -> dict[str, int]:
    """Place of each call id among the calls of the last assistant message."""
    for message in reversed(before):
        if message.role is Speaker.ASSISTANT:
            return {call.call_id: index for index, call in enumerate(message.tool_calls)}
    return {}


def _user_turn(turn: Sequence[Message], order: dict[str, int]) -> Iterator[Segment]:
    """Results stand in the order of the calls, in the places where results stood."""
    results = (m for m in turn if m.role is Speaker.TOOL)
    ordered = iter(sorted(results, key=lambda m: order.get(m.tool_call_id, len(order))))
    blocks = [f"<tool_result>{next(ordered).text}</tool_result>" if m.role is Speaker.TOOL else m.text for m in turn]
    yield Marker(USER)
    yield "\n\n".join(blocks)


def _assistant(message: Message, reasons: bool) -> Iterator[Segment]:
    """Reasoning is kept in turns after the last user message only."""
    yield Marker(ASSISTANT)
    if reasons:
        yield Marker(THINK)
        yield message.reasoning
    yield Marker(END_THINK)
    yield message.text
    if message.tool_calls:
        yield "\n\n"
        yield from _calls_block(message.tool_calls)
    yield Marker(EOS)


def _calls_block(calls: Sequence[ToolCall]) -> Iterator[Segment]:
    yield from _tag("<", "tool_calls>\n")
    for call in calls:
        yield from _tag("<", f'invoke name="{call.name}">\n')
        parameters = list(_parameters(call.arguments))
        for name, value, is_text in parameters:
            yield from _tag("<", f'parameter name="{name}" string="{"true" if is_text else "false"}">{value}')
            yield from _tag("</", "parameter>\n")
        if not parameters:
            yield "\n"
        yield from _tag("</", "invoke>\n")
    yield from _tag("</", "tool_calls>")


def _tag(opening: str, rest: str) -> Iterator[Segment]:
    yield opening
    yield Marker(DSML)
    yield rest


def _parameters(arguments: str) -> Iterator[tuple[str, str, bool]]:
    """(name, value, value is text). Arguments that are no JSON object are one parameter named `arguments`. Those that
    cannot be written were refused with the request."""
    parsed = parse_arguments(arguments)
    if parsed is None:
        yield "arguments", arguments, True
        return
    for name, value in parsed.items():
        is_text = isinstance(value, str)
        yield name, value if is_text else write_json(value), is_text


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Text between two markers is encoded in one piece, as if the whole prompt had been one string.

    A marker that the tokenizer lacks, or whose id the engines do not know, is spelled out.
    """
    ids: list[int] = []
    run: list[str] = []
    for segment in segments:
        token = tokenizer.markers.get(segment.name) if isinstance(segment, Marker) else None
        if token is None or token >= vocab_size:
            run.append(segment.name if isinstance(segment, Marker) else segment)
            continue
        ids.extend(_encode_run(run, tokenizer))
        run.clear()
        ids.append(token)
    ids.extend(_encode_run(run, tokenizer))
    return tuple(ids)


def _encode_run(run: list[str], tokenizer: Tokenizer) -> list[int]:
    text = "".join(run)
    return tokenizer.encode_plain(text) if text else []


def encode_chat(
    messages: Sequence[Message], thinking: bool, tokenizer: Tokenizer, vocab_size: int = 1 << 32
) -> tuple[int, ...]:
    return encode_segments(render_chat(messages, thinking), tokenizer, vocab_size)


def encode_prompt(text: str, tokenizer: Tokenizer, add_bos: bool, vocab_size: int = 1 << 32) -> tuple[int, ...]:
    """A text completion's prompt: markers in it count, and BOS is put in front unless it is there."""
    ids = tokenizer.encode_raw(text)
    bos = tokenizer.markers.get(BOS)
    if add_bos and bos is not None and bos < vocab_size and ids[:1] != [bos]:
        ids.insert(0, bos)
    return tuple(ids)
