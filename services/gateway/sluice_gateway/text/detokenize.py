"""Tokens to text, one at a time; what is emitted is never half a character."""

from __future__ import annotations

from codecs import utf_8_decode

import orjson

from sluice_gateway.text.tokenizer import Tokenizer


class Pieces:
    """Cache per tokenizer: tokens that are whole characters on their own, as text and as inside of a JSON string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text: dict[int, str] = {}
        self.json: dict[int, bytes] = {}

    def learn(self, token: int, text: str) -> None:
        """`text` must be what `token` says when no character is unfinished before it."""
        self.text[token] = text
        self.json[token] = json_inside(text)


def json_inside(text: str) -> bytes:
    """`text` as a JSON string, without the quotes."""
    return orjson.dumps(text)[1:-1]


class Detokenizer:
    """The concatenated results of `push` are the decoded tokens, less an unfinished character at the very end.

    Bytes that no continuation can make valid become U+FFFD, as a whole-text decoder has it.
    """

    __slots__ = ("_pieces", "_tokenizer", "pending")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._tokenizer = pieces.tokenizer
        self.pending = b""

    def flush(self) -> str:
        """What an unfinished character reads as when no more of it comes."""
        text, self.pending = self.pending.decode(errors="replace"), b""
        return text

    def push(self, token: int) -> str:
        if not self.pending:
            text = self._pieces.text.get(token)
            if text is not None:
                return text
        had = self.pending
        data = had + self._tokenizer.token_bytes(token)
        text, consumed = utf_8_decode(data, "replace", False)
        self.pending = data[consumed:]
        if not had and not self.pending:
            self._pieces.learn(token, text)
        return text
