"""DeepSeek-V4's chat encoding: a conversation becomes text and markers, these become tokens.

Markers are values, not substrings: what a client wrote is text, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sluice_gateway.openai.messages import Message, Speaker, ToolCall
from sluice_gateway.openai.tool_arguments import parse_arguments, write_json
from sluice_gateway.text.tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER, Tokenizer


@dataclass(frozen=True, slots=True)
class Marker:
    name: str


Segment = Marker | str
_MERGED = (Speaker.USER, Speaker.TOOL)


def render_chat(messages: Sequence[Message], thinking: bool, first: str = "") -> list[Segment]:
    """The whole prompt, the marks that make the model speak included. `first`: what an effort of reasoning puts there.

    In thinking mode reasoning is kept behind the last user or developer message only, and developer messages before
    that one are left out. Results of tools are no messages of a user, so a loop of calls keeps its reasoning.
    """
    segments: list[Segment] = [Marker(BOS)]
    if thinking and first:
        segments.append(first)
    last_user = max((i for i, m in enumerate(messages) if m.role in (Speaker.USER, Speaker.DEVELOPER)), default=-1)
    order: dict[str, int] = {}
    turns = [
        (position, turn)
        for position, turn in _turns(messages)
        if not (thinking and turn[0].role is Speaker.DEVELOPER and position < last_user)
    ]
    for (position, turn), (_, following) in pairwise([*turns, (len(messages), ())]):
        message = turn[0]
        if message.role is Speaker.SYSTEM:
            segments.append(message.text)
        elif message.role is Speaker.ASSISTANT:
            segments.extend(_assistant(message, thinking and position > last_user))
            order = _call_order(message) or order
        else:
            segments.extend(_user_turn(turn, order))
            if following and following[0].role is Speaker.ASSISTANT:
                segments.extend(_opening(thinking and position + len(turn) > last_user))
    segments.extend(_opening(thinking))
    return segments


def _opening(thinks: bool) -> Iterator[Segment]:
    """What an assistant's turn begins with; it is written where a user's turn ends."""
    yield Marker(ASSISTANT)
    yield Marker(THINK if thinks else END_THINK)


def _call_order(message: Message) -> dict[str, int]:
    """Place of each call id among the calls."""
    return {call.call_id: index for index, call in enumerate(message.tool_calls) if call.call_id}


def _turns(messages: Sequence[Message]) -> Iterator[tuple[int, Sequence[Message]]]:
    """Where each begins, and its messages: consecutive user and tool messages are one turn, any other is its own."""
    start = 0
    while start < len(messages):
        end = start + 1
        if messages[start].role in _MERGED:
            while end < len(messages) and messages[end].role in _MERGED:
                end += 1
        yield start, messages[start:end]
        start = end


def _user_turn(turn: Sequence[Message], order: dict[str, int]) -> Iterator[Segment]:
    """Results stand in the order of the calls, in the places where results stood; those of no call come first."""
    results = (m for m in turn if m.role is Speaker.TOOL)
    ordered = iter(sorted(results, key=lambda m: order.get(m.tool_call_id, 0)))
    blocks = [f"<tool_result>{next(ordered).text}</tool_result>" if m.role is Speaker.TOOL else m.text for m in turn]
    yield Marker(USER)
    yield "\n\n".join(blocks)


def _assistant(message: Message, reasons: bool) -> Iterator[Segment]:
    """Behind the opening that the turn before has written; where there is no user's turn before, there is none."""
    if reasons:
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
