"""Text to tokens and tokens to bytes. A tokenizer knows which ids are markers, and never finds one in plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as HuggingFace

from sluice_gateway.text.tokenizer_files import (
    COPY,
    TokenizerError,
    byte_alphabet,
    longest_tokens,
    read_document,
    read_eos,
)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
MARKERS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)


class Tokenizer(Protocol):
    """`markers` maps those of `MARKERS` that the vocabulary has to their ids. `eos_ids` end a generation.

    `longest_plain` and `longest_raw`: no token of `encode_plain` and `encode_raw` stands for more bytes of the text;
    0: no such bound is known.
    """

    vocab_size: int
    markers: Mapping[str, int]
    eos_ids: frozenset[int]
    longest_plain: int
    longest_raw: int

    def encode_plain(self, text: str) -> list[int]:
        """Nothing in `text` is read as a marker."""

    def encode_raw(self, text: str) -> list[int]:
        """Marker strings in `text` become their ids."""

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that the token stands for, maybe half a character; empty for control tokens and unknown ids."""


class ByteTokenizer:
    """One token is one byte (ids 0..255); `MARKERS` follow from 256, in their order. For scripted models."""

    def __init__(self) -> None:
        self.markers: Mapping[str, int] = {name: 256 + index for index, name in enumerate(MARKERS)}
        self.vocab_size = 256 + len(MARKERS)
        self.eos_ids = frozenset({self.markers[EOS]})
        self.longest_plain, self.longest_raw = 1, max(len(name.encode()) for name in MARKERS)
        control = {self.markers[BOS], self.markers[EOS]}
        self._texts = {i: name.encode() for name, i in self.markers.items() if i not in control}

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_raw(self, text: str) -> list[int]:
        ids: list[int] = []
        rest = text
        while rest:
            found = [(at, name) for name in MARKERS if (at := rest.find(name)) >= 0]
            at, name = min(found, default=(len(rest), ""))
            ids.extend(rest[:at].encode())
            if name:
                ids.append(self.markers[name])
            rest = rest[at + len(name) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else self._texts.get(token, b"")


class ScriptTokenizer(ByteTokenizer):
    """For load over a scripted model, whose tokens mean nothing: every id, known or not, is one printable character.

    No token ends an answer, and each makes a chunk of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eos_ids = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return bytes((0x21 + token % 94,))


@dataclass(frozen=True, slots=True)
class _Added:
    content: str
    special: bool


class FileTokenizer:
    """A byte-level `tokenizer.json`. Plain text is encoded by a second instance that has no added tokens."""

    def __init__(self, document: dict[str, Any], source: str = "tokenizer.json") -> None:
        """`document` as `read_document` has it, `source` for the words. Raises TokenizerError."""
        self._raw = _made_of(document, source)
        self._plain = _made_of(document | {"added_tokens": []}, source)
        entries = document["added_tokens"]
        _check_ids(entries, self._raw, source)
        self._added = {entry["id"]: _Added(entry["content"], entry["special"]) for entry in entries}
        by_text = {added.content: token for token, added in self._added.items()}
        self.markers: Mapping[str, int] = {name: by_text[name] for name in MARKERS if name in by_text}
        self.vocab_size = max(self._raw.get_vocab().values()) + 1
        self.eos_ids = frozenset({self.markers[EOS]} if EOS in self.markers else ())
        self.longest_plain, self.longest_raw = longest_tokens(document)

    def encode_plain(self, text: str) -> list[int]:
        return _encode(self._plain, text)

    def encode_raw(self, text: str) -> list[int]:
        return _encode(self._raw, text)

    def token_bytes(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None and added.special:
            return b""
        text: str | None = added.content if added else self._raw.id_to_token(token)
        return b"" if text is None else _unmap(text)


def _encode(tokenizer: HuggingFace, text: str) -> list[int]:
    """`encode` would hold the GIL all the time, and so stop every other thread; this call releases it."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _made_of(document: dict[str, Any], source: str) -> HuggingFace:
    try:
        return HuggingFace.from_str(json.dumps(document))
    except Exception as error:  # the library has no type of its own for it
        raise TokenizerError(f"{source}: {_culprit(document)} cannot be used: {error}; {COPY}") from error


def _culprit(document: dict[str, Any]) -> str:
    """The part that the library does not take alone either; its own words do not name it."""
    whole = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    for name in ("normalizer", "pre_tokenizer", "decoder", "model", "added_tokens"):
        try:
            HuggingFace.from_str(json.dumps({"version": "1.0", **whole, name: document.get(name)}))
        except Exception:
            return name
    return "the whole"


def _check_ids(entries: list[dict[str, Any]], made: HuggingFace, source: str) -> None:
    """The library numbers added tokens itself when the file's ids leave a gap: a marker would be another token."""
    for index, entry in enumerate(entries):
        got = made.token_to_id(entry["content"])
        if got != entry["id"]:
            raise TokenizerError(
                f"{source}: added_tokens[{index}].id is {entry['id']}, but {entry['content']!r} becomes {got}: ids"
                f" go on from the vocabulary's without a gap, and no two texts share one; {COPY}"
            )


_ALPHABET = byte_alphabet()


def _unmap(text: str) -> bytes:
    """A text with a character outside the alphabet stands for itself (as the ByteLevel decoder has it)."""
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def tokenizer_digest(source: str) -> str:
    """Of the file that `load_tokenizer` reads: two processes with one digest make the same ids."""
    if source in ("bytes", "script"):
        return source
    return blake2b((Path(source) / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()


def load_tokenizer(source: str) -> Tokenizer:
    """`bytes`, `script`, or a directory with `tokenizer.json`. EOS ids come from its configs and from the tokenizer.

    Raises TokenizerError.
    """
    if source == "bytes":
        return ByteTokenizer()
    if source == "script":
        return ScriptTokenizer()
    path = Path(source) / "tokenizer.json"
    document = read_document(path)
    tokenizer = FileTokenizer(document, str(path))
    tokenizer.eos_ids |= read_eos(Path(source), document)
    return tokenizer
