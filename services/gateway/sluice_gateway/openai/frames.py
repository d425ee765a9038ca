"""OpenAI's JSON for chat and completions: whole answers and stream chunks. Chunks are cut from prebuilt bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from sluice_gateway.text.deltas import Delta, Part, Shown
from sluice_gateway.text.detokenize import json_inside
from sluice_gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Identity:
    """What all JSON of one answer shares. `usage_field`: chunks carry `"usage": null`, as include_usage has it."""

    answer_id: str
    created: int
    model: str
    fingerprint: str
    usage_field: bool = False

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Frames(Protocol):
    """Chunks of one choice, each a whole SSE event. `prefix + inside + suffix` is a chunk of content."""

    prefix: bytes
    suffix: bytes

    def opening(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def finish(self, reason: str) -> bytes: ...


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


_HOLE = "\ue000hole\ue000"


def _cut(value: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Split an event at the hole, which is the value of one string in it."""
    before, after = event(value).split(json_inside(_HOLE))
    return before, after


class ChatFrames:
    def __init__(self, identity: Identity, index: int, tokenizer: Tokenizer) -> None:
        self._identity = identity
        self._index = index
        self._tokenizer = tokenizer
        self.prefix, self.suffix = _cut(self._chunk({"content": _HOLE}))

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._identity.usage_field else {}
        return self._identity.head("chat.completion.chunk") | {"choices": [choice]} | usage

    def opening(self) -> bytes:
        return event(self._chunk({"role": "assistant", "content": ""}))

    def delta(self, delta: Delta) -> bytes:
        field = "reasoning_content" if delta.part is Part.REASONING else "content"
        logprobs = chat_logprobs(delta.shown, self._tokenizer) if delta.shown else None
        return event(self._chunk({field: delta.text}, logprobs=logprobs))

    def finish(self, reason: str) -> bytes:
        return event(self._chunk({}, reason))


class CompletionFrames:
    def __init__(self, identity: Identity, index: int, tokenizer: Tokenizer) -> None:
        self._identity = identity
        self._index = index
        self._tokenizer = tokenizer
        self.prefix, self.suffix = _cut(self._chunk(_HOLE))

    def _chunk(self, text: str, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._identity.usage_field else {}
        return self._identity.head("text_completion") | {"choices": [choice]} | usage

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        logprobs = completion_logprobs(delta.shown, self._tokenizer) if delta.shown else None
        return event(self._chunk(delta.text, logprobs=logprobs))

    def finish(self, reason: str) -> bytes:
        return event(self._chunk("", reason))


def chat_choice(
    index: int, content: str, reasoning: str | None, reason: str, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """`logprobs` is None when none were asked for, `reasoning` when the model was not to think."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def completion_choice(index: int, content: str, reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": content, "logprobs": logprobs, "finish_reason": reason}


def chat_logprobs(shown: Sequence[Shown], tokenizer: Tokenizer) -> dict[str, Any]:
    entries = []
    for entry in shown:
        top = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs)
        alternatives = [_token(token, logprob, tokenizer) for token, logprob in top]
        entries.append(_token(entry.token, entry.logprobs.logprob, tokenizer) | {"top_logprobs": alternatives})
    return {"content": entries, "refusal": None}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def completion_logprobs(shown: Sequence[Shown], tokenizer: Tokenizer) -> dict[str, Any]:
    """Parallel arrays, one entry per token. The sampled token is always among the best ones, as OpenAI has it."""
    return {
        "tokens": [_name(entry.token, tokenizer) for entry in shown],
        "token_logprobs": [_finite(entry.logprobs.logprob) for entry in shown],
        "top_logprobs": [
            {_name(t, tokenizer): _finite(p) for t, p in zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs)}
            | {_name(entry.token, tokenizer): _finite(entry.logprobs.logprob)}
            for entry in shown
        ],
        "text_offset": [entry.start for entry in shown],
    }


def _name(token: int, tokenizer: Tokenizer) -> str:
    """The token's text; OpenAI's `bytes:\\x..` form where it is not one, so that names stay distinct."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999.0 is what OpenAI sends for a token out of reach."""
    return max(logprob, -9999.0)
