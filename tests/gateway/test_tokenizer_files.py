"""A `tokenizer.json` encodes a text whole and the same way each time, or is refused by file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sluice_gateway.text.tokenizer import load_tokenizer
from sluice_gateway.text.tokenizer_files import TokenizerError, check_files

LONG = "The code of amber falcon is 4719. " * 40
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """The default model's tokenizer: it has merges, so dropout would show."""
    path = Path(__file__).parents[2] / "models" / "recall-1m" / "tokenizer.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def save(directory: Path, document: object) -> str:
    (directory / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return str(directory)


TRUNCATION = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 2048},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 2,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
LEFT_BY_TRAINING: dict[str, Change] = {
    "truncation": lambda d: d.update(truncation=TRUNCATION),
    "truncation of another shape": lambda d: d.update(truncation={"max": 1}),
    "padding": lambda d: d.update(padding=PADDING),
    "padding of another shape": lambda d: d.update(padding=7),
    "dropout": lambda d: d["model"].update(dropout=0.5),
    "dropout that is none": lambda d: d["model"].update(dropout="much"),
    "a post-processor": lambda d: d.update(post_processor={"type": "BertProcessing"}),
}


@pytest.mark.parametrize("name", LEFT_BY_TRAINING)
def test_what_a_training_left_in_the_file_changes_no_prompt(name: str, trained: dict[str, Any], tmp_path: Path) -> None:
    """Truncation cut every text to 20 tokens, and the answer came with status 200."""
    plain = load_tokenizer(save(tmp_path, trained))
    document = deepcopy(trained)
    LEFT_BY_TRAINING[name](document)
    left = load_tokenizer(save(tmp_path, document))
    marked = LONG + "<｜User｜>" + LONG
    assert left.encode_plain(LONG) == plain.encode_plain(LONG)
    assert left.encode_raw(marked) == plain.encode_raw(marked)
    assert b"".join(map(left.token_bytes, left.encode_plain(LONG))).decode() == LONG


def added(index: int, **fields: Any) -> Change:
    return lambda d: d["added_tokens"][index].update(fields)


def within(part: str, **fields: Any) -> Change:
    return lambda d: d[part].update(fields)


def put(**fields: Any) -> Change:
    return lambda d: d.update(fields)


def strip(*fields: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        for field in fields[:-1]:
            document = document[int(field) if field.isdigit() else field]  # type: ignore[call-overload]
        document.pop(fields[-1])

    return change


GAP = {"id": 5000, "content": "<big>"} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# what is done to the file, and what the error must say of it
ODD: dict[str, tuple[Change, str]] = {
    "added tokens are null": (put(added_tokens=None), "added_tokens is null, not an array"),
    "added tokens are texts": (put(added_tokens=["<x>"]), 'added_tokens[0] is "<x>", not an object'),
    "an id that is text": (added(2, id="2"), 'added_tokens[2].id is "2", not an integer'),
    "an id that is true": (added(2, id=True), "added_tokens[2].id is true, not an integer"),
    "content that is none": (added(1, content=None), "added_tokens[1].content is null, not a string"),
    "special is missing": (strip("added_tokens", "3", "special"), "added_tokens[3].special is missing"),
    "an id is missing": (strip("added_tokens", "3", "id"), "added_tokens[3].id is missing"),
    "normalized is missing": (strip("added_tokens", "0", "normalized"), "added_tokens[0].normalized is missing"),
    "a gap before an id": (lambda d: d["added_tokens"].append(GAP | {"special": True}), "].id is 5000, but '<big>'"),
    "a marker with the id of another": (added(0, id=3), "added_tokens[0].id is 3, but"),
    "no decoder": (put(decoder=None), "decoder is null, not an object"),
    "a decoder that is a list": (put(decoder=[]), "decoder is [], not an object"),
    "a decoder that is text": (put(decoder="ByteLevel"), 'decoder is "ByteLevel", not an object'),
    "a decoder without a type": (put(decoder={}), "decoder of type null is not supported"),
    "a decoder in a list": (put(decoder={"type": ["ByteLevel"]}), 'decoder of type ["ByteLevel"] is not supported'),
    "another decoder": (put(decoder={"type": "Metaspace"}), 'decoder of type "Metaspace" is not supported'),
    "another decoder beside it": (
        put(decoder={"type": "Sequence", "decoders": [BYTE_LEVEL, {"type": "Strip"}]}),
        'decoder.decoders[1] of type "Strip" is not supported',
    ),
    "a sequence of no decoders": (put(decoder={"type": "Sequence", "decoders": []}), 'decoder has no "ByteLevel"'),
    "nothing makes bytes": (put(pre_tokenizer=None), 'pre_tokenizer has no "ByteLevel" in it'),
    "bytes of bytes": (
        put(normalizer=BYTE_LEVEL),
        'pre_tokenizer.pretokenizers[1] is "ByteLevel" behind normalizer, which has made bytes already',
    ),
    "no model": (put(model=None), "model is null, not an object"),
    "a model of no known type": (within("model", type="Foo"), 'model.type is "Foo"'),
    "a model of another type": (within("model", type="Unigram"), 'model.type is "Unigram", and only "BPE"'),
    "suffixes": (within("model", end_of_word_suffix="</w>"), 'model.end_of_word_suffix is "</w>"'),
    "no vocabulary": (strip("model", "vocab"), "model.vocab is null, not an object"),
    "an empty vocabulary": (within("model", vocab={}, merges=[]), "model.vocab has no token for the byte 0x21"),
    "a byte without a token": (strip("model", "vocab", "Ġ"), "model.vocab has no token for the byte 0x20"),
    "a token that is no id": (lambda d: d["model"]["vocab"].update(a=-1), 'model.vocab["a"] is -1'),
    "no merges": (strip("model", "merges"), "model.merges is null, not an array"),
    "a merge of three": (within("model", merges=[["a", "b", "c"]]), 'model.merges[0] is ["a", "b", "c"]'),
    "a merge out of the vocabulary": (within("model", merges=[["ü", "ä"]]), "model cannot be used: "),
    "a normalizer of no known type": (put(normalizer={"type": "Foo"}), "normalizer cannot be used: "),
    "a broken pattern": (
        put(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "Split", "pattern": 1}]}),
        "pre_tokenizer cannot be used: ",
    ),
    "another version": (put(version="9.0"), "version"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_tokenizer_of_an_odd_shape_is_refused_by_file_field_and_remedy(
    name: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    change, words = ODD[name]
    document = deepcopy(trained)
    change(document)
    source = save(tmp_path, document)
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(source)
    told = str(refused.value)
    assert told.startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert words in told
    assert told.endswith("copy the tokenizer.json that came with the checkpoint")
    assert "\n" not in told


@pytest.mark.parametrize(
    "written",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000],
)
def test_a_file_that_is_no_object_is_refused_by_name(written: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(written)
    for read in (load_tokenizer, check_files):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
            read(tmp_path if read is check_files else str(tmp_path))


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_so_are_the_configs_beside_it(name: str, trained: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, trained)
    for written in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"eos_token_id": 650}'):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(TokenizerError, match=name):
            check_files(tmp_path)


def test_without_added_tokens_there_are_no_markers(trained: dict[str, Any], tmp_path: Path) -> None:
    document = {name: value for name, value in trained.items() if name not in ("added_tokens", "version")}
    tokenizer = load_tokenizer(save(tmp_path, document))
    assert not tokenizer.markers
    check_files(tmp_path)


def test_the_published_files_pass(v4_directory: Path) -> None:
    check_files(v4_directory)
