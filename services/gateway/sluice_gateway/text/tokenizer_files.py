"""The files that say what a model's tokens are, read and checked without the tokenizers library: `sluice up` does it
too, before it starts anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COPY = "copy the tokenizer.json that came with the checkpoint"
_ADDED: Mapping[str, type] = {
    "id": int,
    "content": str,
    "single_word": bool,
    "lstrip": bool,
    "rstrip": bool,
    "normalized": bool,
    "special": bool,
}
_KINDS = {int: "an integer", str: "a string", bool: "true or false", list: "an array", dict: "an object"}
_DECODERS = frozenset({"ByteLevel", "Fuse"})
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


class TokenizerError(Exception):
    """The tokenizer files cannot be used; the message names file, field and remedy."""


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one. Raises TokenizerError."""
    return _read_object(path, "mend it, or remove the file") if path.exists() else {}


def _read_object(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}; {remedy}") from error
    except RecursionError as error:
        raise TokenizerError(f"{path}: nested too deeply to be read; {remedy}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object; {remedy}")
    return value


def read_document(path: Path) -> dict[str, Any]:
    """A `tokenizer.json` as it is to be used: byte-level BPE that encodes a text whole and the same way each time.

    Raises TokenizerError.
    """
    document = _read_object(path, COPY)
    for check in (_added_tokens, _decoder, _encoder, _model, _bytes, _merges):
        for problem in check(document):
            raise TokenizerError(f"{path}: {problem}")
    return for_serving(document)


def for_serving(document: dict[str, Any]) -> dict[str, Any]:
    """Without what a training leaves in the file: truncation would cut prompts, padding lengthen them, dropout draw
    lots for their tokens. The post-processor adds nothing to what we encode."""
    model = document["model"] | {"dropout": None}
    neutral = {"truncation": None, "padding": None, "post_processor": None, "model": model}
    return {"version": "1.0", "added_tokens": [], **document, **neutral}


def read_eos(directory: Path, document: dict[str, Any]) -> frozenset[int]:
    """What both configs say of `eos_token_id`: tokens of the model, whose vocabulary is told by config.json, else by
    the tokenizer's `document`. Raises TokenizerError."""
    generation, config = directory / "generation_config.json", directory / "config.json"
    told = {path: read_config(path) for path in (generation, config)}
    size = told[config].get("vocab_size")
    if type(size) is not int or size < 1:  # a bad one is the engine's to refuse
        size = 1 + max(*document["model"]["vocab"].values(), *(entry["id"] for entry in document["added_tokens"]))
    return frozenset().union(*(eos_ids(fields.get("eos_token_id"), size, str(path)) for path, fields in told.items()))


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


def check_files(directory: Path) -> None:
    """All that can be known of a model's tokenizer without loading it. Raises TokenizerError."""
    read_eos(directory, read_document(directory / "tokenizer.json"))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's map: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


# Each check yields what is wrong with its part of the document, in words that begin with the field.


def longest_tokens(document: dict[str, Any]) -> tuple[int, int]:
    """Bytes of text that one token of plain text stands for at most, and one of a text in which added tokens count.
    0: nothing is known, because a part of the tokenizer may leave bytes out or change them."""
    if not _keeps_bytes(document):
        return 0, 0
    plain = max(len(token) for token in document["model"]["vocab"])  # of the byte alphabet: a character is a byte
    added = document["added_tokens"]
    if any(entry["lstrip"] or entry["rstrip"] or entry["normalized"] for entry in added):
        return plain, 0  # such a token takes any number of spaces with it
    return plain, max([plain, *(len(entry["content"].encode()) for entry in added)])


def _keeps_bytes(document: dict[str, Any]) -> bool:
    """Whether all tokens of a text together stand for exactly its bytes, or more."""
    normalizer, pre = document.get("normalizer"), document.get("pre_tokenizer")
    if any(kind is not None for _, kind in _parts("normalizer", normalizer, "normalizers")):
        return False
    return all(_keeps(part) for part in _flat(pre))


def _flat(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        for part in pre_tokenizer["pretokenizers"]:
            yield from _flat(part)
    else:
        yield pre_tokenizer


def _keeps(part: dict[str, Any]) -> bool:
    match part.get("type"):
        case "ByteLevel" | "Digits":
            return True
        case "Split":
            return bool(part.get("behavior") != "Removed")
        case _:
            return False


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def _wrong(field: str, kind: type, value: object) -> str:
    return f"{field} is {_shown(value)}, not {_KINDS[kind]}; {COPY}"


def _shown(value: object) -> str:
    told = json.dumps(value)
    return told if len(told) <= 40 else f"{told[:40]}..."


def _added_tokens(document: dict[str, Any]) -> Iterator[str]:
    entries = document.get("added_tokens", [])
    if not isinstance(entries, list):
        yield _wrong("added_tokens", list, entries)
        return
    for index, entry in enumerate(entries):
        place = f"added_tokens[{index}]"
        if not isinstance(entry, dict):
            yield _wrong(place, dict, entry)
            continue
        for name, kind in _ADDED.items():
            if name not in entry:
                yield f"{place}.{name} is missing; {COPY}"
            elif not _is(entry[name], kind):
                yield _wrong(f"{place}.{name}", kind, entry[name])


def _parts(field: str, value: object, inner: str) -> Iterator[tuple[str, object]]:
    """(field, type) of what `value` is made of: sequences are opened, those in sequences too."""
    if not isinstance(value, dict):
        yield field, value
    elif value.get("type") == "Sequence" and isinstance(value.get(inner), list):
        for index, part in enumerate(value[inner]):
            yield from _parts(f"{field}.{inner}[{index}]", part, inner)
    else:
        yield field, value.get("type")


def _decoder(document: dict[str, Any]) -> Iterator[str]:
    decoder = document.get("decoder")
    if not isinstance(decoder, dict):
        yield _wrong("decoder", dict, decoder)
        return
    parts = list(_parts("decoder", decoder, "decoders"))
    for field, kind in parts:
        if not isinstance(kind, str) or kind not in _DECODERS:
            yield f'{field} of type {_shown(kind)} is not supported, only "ByteLevel" is; {COPY}'
    if all(kind != "ByteLevel" for _, kind in parts):
        yield f'decoder has no "ByteLevel" in it, and nothing else is supported; {COPY}'


def _encoder(document: dict[str, Any]) -> Iterator[str]:
    """Without it text would not become bytes, and most of it would be lost; twice, and it would be other bytes."""
    before = _parts("pre_tokenizer", document.get("pre_tokenizer"), "pretokenizers")
    first = _parts("normalizer", document.get("normalizer"), "normalizers")
    mapping = [field for field, kind in (*first, *before) if kind == "ByteLevel"]
    if not mapping:
        yield f'pre_tokenizer has no "ByteLevel" in it, and nothing else is supported; {COPY}'
    if len(mapping) > 1:
        yield f'{mapping[1]} is "ByteLevel" behind {mapping[0]}, which has made bytes already; {COPY}'


def _model(document: dict[str, Any]) -> Iterator[str]:
    model = document.get("model")
    if not isinstance(model, dict):
        yield _wrong("model", dict, model)
        return
    if model.get("type", "BPE") != "BPE":
        yield f'model.type is {_shown(model["type"])}, and only "BPE" is supported; {COPY}'
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            yield f"model.{name} is {_shown(model[name])}, which no byte-level tokenizer has; {COPY}"
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        yield _wrong("model.vocab", dict, vocab)
        return
    for text, token in vocab.items():
        if not _is(token, int) or not 0 <= token < 1 << 32:
            yield f"model.vocab[{_shown(text)}] is {_shown(token)}, not a token id; {COPY}"


def _bytes(document: dict[str, Any]) -> Iterator[str]:
    """A byte without a token would be left out of every text that has it, and no error would say so."""
    vocab = document["model"]["vocab"]
    for char, byte in byte_alphabet().items():
        if char not in vocab and byte not in _NEVER_IN_UTF8:
            yield f"model.vocab has no token for the byte 0x{byte:02x} ({_shown(char)}); {COPY}"


def _merges(document: dict[str, Any]) -> Iterator[str]:
    """Pairs, as "a b" or as ["a", "b"]."""
    merges = document["model"].get("merges")
    if not isinstance(merges, list):
        yield _wrong("model.merges", list, merges)
        return
    for index, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            yield f"model.merges[{index}] is {_shown(merge)}, not a pair of texts; {COPY}"
