"""From a checked request to its prompts in tokens. A prompt that cannot fit is refused before it is tokenised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any

from sluice_gateway.openai import errors
from sluice_gateway.openai.requests import ChatRequest, CompletionRequest, Limits, parse_chat, parse_completion
from sluice_gateway.text.template import Segment, encode_prompt, encode_segments, render_chat
from sluice_gateway.text.tokenizer import Tokenizer

Request = ChatRequest | CompletionRequest
Prompts = tuple[tuple[int, ...], ...]


class Kind(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"


PARSERS: dict[Kind, Callable[[Any, Limits], Request]] = {Kind.CHAT: parse_chat, Kind.COMPLETION: parse_completion}
MESSAGE_CHARACTERS = 32
"""What a message counts for beside its text."""
PIECE_CHARACTERS = 32_768
SAMPLES = 16
NEAR = 0.9
"""A sampled count below this share of the limit is believed to fit; above it, the text is counted piece by piece."""


def characters_of(request: Request) -> int:
    if isinstance(request, ChatRequest):
        return sum(MESSAGE_CHARACTERS + message.characters for message in request.messages)
    return sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str))


def encode_request(request: Request, tokenizer: Tokenizer, limits: Limits, *, counts_first: bool = False) -> Prompts:
    """Raises ApiError. `counts_first`: a text of megabytes is counted in pieces first, for its tokens take up to 430
    bytes of memory each while the library makes them."""
    if isinstance(request, ChatRequest):
        return (_encode_chat(request, tokenizer, limits, counts_first),)
    prompts = tuple(
        _encode_text(prompt, request.add_special_tokens, tokenizer, limits, counts_first)
        if isinstance(prompt, str)
        else prompt
        for prompt in request.prompts
    )
    if not all(prompts):
        raise errors.invalid("prompt", "Invalid value for 'prompt': a prompt has at least one token.")
    return prompts


def _encode_chat(request: ChatRequest, tokenizer: Tokenizer, limits: Limits, counts_first: bool) -> tuple[int, ...]:
    segments = render_chat(request.messages, request.thinking, request.first)
    texts = [segment for segment in segments if isinstance(segment, str)]
    _check_fits(texts, tokenizer.longest_plain, limits.max_context_tokens, "messages")
    if counts_first:
        _check_count(texts, tokenizer.encode_plain, limits.max_context_tokens, "messages")
    return encode_segments(segments, tokenizer, limits.vocab_size)


def _encode_text(text: str, add_bos: bool, tokenizer: Tokenizer, limits: Limits, counts_first: bool) -> tuple[int, ...]:
    _check_fits([text], tokenizer.longest_raw, limits.max_context_tokens, "prompt")
    if counts_first:
        _check_count([text], tokenizer.encode_raw, limits.max_context_tokens, "prompt")
    return encode_prompt(text, tokenizer, add_bos, limits.vocab_size)


def _check_fits(texts: Sequence[Segment], longest: int, limit: int, field: str) -> None:
    """Exact: so many bytes need so many tokens, whatever the tokenizer makes of them."""
    if not longest:
        return
    num_bytes = sum(len(text.encode()) for text in texts if isinstance(text, str))
    least = -(-num_bytes // longest)
    if least >= limit:
        raise errors.context_surely_too_long(limit, least, num_bytes, longest, field)


def _check_count(texts: Sequence[str], encode: Callable[[str], list[int]], limit: int, field: str) -> None:
    """Raise once the tokens of the text's pieces are too many. A cut between two pieces adds some tokens, for which
    there is a margin; a text that is refused here has more tokens than the limit in any case."""
    if sum(len(text.encode()) for text in texts) < limit:  # a token stands for a byte at least
        return
    pieces = [piece for text in texts for piece in _pieces_of(text)]
    step = max(1, len(pieces) // SAMPLES)
    sampled = pieces[::step]
    if sum(len(encode(piece)) for piece in sampled) * len(pieces) / len(sampled) < NEAR * limit:
        return
    margin = limit // 64 + 64 * len(texts)
    count = 0
    for piece in pieces:
        count += len(encode(piece))
        if count > limit + margin:
            raise errors.context_too_long_counted(limit, count - margin, field)
        margin += 8


def _pieces_of(text: str) -> Iterator[str]:
    for at in range(0, len(text), PIECE_CHARACTERS):
        yield text[at : at + PIECE_CHARACTERS]
