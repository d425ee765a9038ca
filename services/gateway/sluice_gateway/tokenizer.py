"""Text to tokens and tokens to bytes. A tokenizer knows which ids are markers, and never finds one in plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as HuggingFace

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
MARKERS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)


class TokenizerError(Exception):
    """The tokenizer files cannot be used; the message names the file and what is wrong."""


class Tokenizer(Protocol):
    """`markers` maps those of `MARKERS` that the vocabulary has to their ids. `eos_ids` end a generation."""

    vocab_size: int
    markers: Mapping[str, int]
    eos_ids: frozenset[int]

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

    def __init__(self, document: dict[str, Any]) -> None:
        if not _has_byte_level_decoder(document.get("decoder")):
            kind = (document.get("decoder") or {}).get("type")
            raise TokenizerError(f"tokenizer.json: decoder {kind!r} is not supported, only ByteLevel is")
        self._raw = HuggingFace.from_str(json.dumps(document))
        self._plain = HuggingFace.from_str(json.dumps(document | {"added_tokens": [], "post_processor": None}))
        self._added = {entry["id"]: _Added(entry["content"], entry["special"]) for entry in document["added_tokens"]}
        by_text = {added.content: token for token, added in self._added.items()}
        self.markers: Mapping[str, int] = {name: by_text[name] for name in MARKERS if name in by_text}
        self.vocab_size = max(self._raw.get_vocab().values()) + 1
        self.eos_ids = frozenset({self.markers[EOS]} if EOS in self.markers else ())

    def encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_raw(self, text: str) -> list[int]:
        ids: list[int] = self._raw.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None and added.special:
            return b""
        text: str | None = added.content if added else self._raw.id_to_token(token)
        return b"" if text is None else _unmap(text)


def _has_byte_level_decoder(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return any(_has_byte_level_decoder(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _unmap(text: str) -> bytes:
    """A text with a character outside the alphabet stands for itself (as the ByteLevel decoder has it)."""
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def load_tokenizer(source: str) -> Tokenizer:
    """`bytes`, `script`, or a directory with `tokenizer.json`. EOS ids come from its configs and from the tokenizer."""
    if source == "bytes":
        return ByteTokenizer()
    if source == "script":
        return ScriptTokenizer()
    path = Path(source) / "tokenizer.json"
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    tokenizer = FileTokenizer(document)
    told = {path: read_config(path) for path in (Path(source) / "generation_config.json", Path(source) / "config.json")}
    vocab_size = told[Path(source) / "config.json"].get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        vocab_size = tokenizer.vocab_size  # a bad one is the engine's to refuse
    for path, config in told.items():
        tokenizer.eos_ids |= eos_ids(config.get("eos_token_id"), vocab_size, str(path))
    return tokenizer


def eos_ids(value: object, vocab_size: int, source: str) -> frozenset[int]:
    """What a config's `eos_token_id` says: a token, a list of tokens, or nothing. Raises TokenizerError."""
    entries = [] if value is None else value if isinstance(value, list) else [value]
    for entry in entries:
        if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < vocab_size:
            raise TokenizerError(
                f"{source}: 'eos_token_id' has {entry!r}, which is no token of this model:"
                f" give token ids from 0 to {vocab_size - 1}, or leave the field out"
            )
    return frozenset(entries)


def read_config(path: Path) -> dict[str, Any]:
    """An absent file is an empty one."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value
