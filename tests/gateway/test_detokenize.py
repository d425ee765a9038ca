"""Text comes out whole, whatever the tokens cut."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers

from sluice_gateway.openai.messages import Message, Speaker
from sluice_gateway.text.detokenize import Detokenizer, Pieces
from sluice_gateway.text.template import encode_chat
from sluice_gateway.text.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from sluice_gateway.text.tokenizer_files import TokenizerError


@pytest.fixture(scope="module")
def reference(v4_directory: Path) -> HuggingFace:
    return HuggingFace.from_file(str(v4_directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def pieces(v4: FileTokenizer) -> Pieces:
    return Pieces(v4)


def deltas(pieces: Pieces, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(pieces)
    return [detokenizer.push(token) for token in ids]


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_deltas_of_any_text_add_up_and_never_hold_half_a_character(pieces: Pieces, text: str) -> None:
    parts = deltas(pieces, pieces.tokenizer.encode_plain(text))
    assert "".join(parts) == text
    assert "�" in text or not any("�" in part for part in parts)


@given(st.lists(st.integers(0, 129_279), max_size=40))
def test_deltas_of_any_tokens_add_up_to_what_the_library_decodes(
    pieces: Pieces, reference: HuggingFace, ids: list[int]
) -> None:
    detokenizer = Detokenizer(pieces)
    text = "".join(detokenizer.push(token) for token in ids)
    whole = reference.decode(ids, skip_special_tokens=True)
    assert text + ("�" if detokenizer.pending else "") == whole


@given(st.text(st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF), min_size=1, max_size=5), st.data())
def test_an_unfinished_character_at_the_end_is_not_shown(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    shown = "".join(deltas(Pieces(ByteTokenizer()), ids[:cut]))
    assert shown == text[: cut // 4]


def test_invalid_bytes_become_one_replacement_character_at_once() -> None:
    assert deltas(Pieces(ByteTokenizer()), [0xFF, 65, 0xE2, 0x82, 65]) == ["�", "A", "", "", "�A"]


@given(st.lists(st.integers(0, 129_279), max_size=40))
def test_cached_pieces_are_the_inside_of_a_json_string(pieces: Pieces, ids: list[int]) -> None:
    deltas(pieces, ids)
    for token in ids:
        if token in pieces.json:
            assert orjson.loads(b'"' + pieces.json[token] + b'"') == pieces.text[token]


def test_control_tokens_are_silent_and_markers_are_not(v4: FileTokenizer) -> None:
    assert [v4.token_bytes(t) for t in (0, 1, 2)] == [b"", b"", b""]
    assert v4.token_bytes(128822) == b"</think>"
    assert v4.token_bytes(5_000_000) == b""


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_for_a_script_every_token_is_one_character(ids: list[int]) -> None:
    tokenizer = load_tokenizer("script")
    parts = deltas(Pieces(tokenizer), ids)
    assert all(len(part) == 1 and part.isprintable() for part in parts)
    assert not tokenizer.eos_ids


def tiny_tokenizer() -> HuggingFace:
    """Bytes only, and one marker."""
    tokenizer = HuggingFace(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<｜end▁of▁sentence｜>"])
    return tokenizer


def test_eos_comes_from_every_config(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert load_tokenizer(str(tmp_path)).eos_ids == {256, 7, 8, 9}


def test_a_small_vocabulary_without_the_chat_markers_still_carries_a_chat(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert dict(tokenizer.markers) == {"<｜end▁of▁sentence｜>": 256}
    ids = encode_chat([Message(Speaker.USER, "hé")], False, tokenizer)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == (
        "<｜begin▁of▁sentence｜><｜User｜>hé<｜Assistant｜></think>"
    )


def test_a_directory_without_a_usable_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    document = {"decoder": {"type": "Metaspace"}, "added_tokens": [], "model": {"type": "BPE"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="Metaspace"):
        load_tokenizer(str(tmp_path))
