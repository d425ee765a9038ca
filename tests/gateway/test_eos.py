"""The tokens that end an answer come from a model's files: what cannot be one is refused by file and field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sluice_gateway import __main__ as gateway
from sluice_gateway.text.tokenizer import load_tokenizer
from sluice_gateway.text.tokenizer_files import TokenizerError

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"
VOCAB = 640
FILES = ("generation_config.json", "config.json")
BAD: list[Any] = [-1, VOCAB, 2**40, True, 1.0, "1", {"id": 1}, [1, -1], [1, VOCAB], [[1]], [None], ["</s>"]]


def model(folder: Path, **files: dict[str, Any] | None) -> Path:
    """The tokenizer of the default model, with these JSON files beside it (name without its suffix)."""
    folder.mkdir()
    shutil.copy(MODEL / "tokenizer.json", folder)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("value", BAD)
def test_what_is_no_token_is_refused_by_file_and_field(tmp_path: Path, name: str, value: Any) -> None:
    folder = model(tmp_path / "m", **{name.removesuffix(".json"): {"eos_token_id": value}})
    with pytest.raises(TokenizerError, match=rf"^{folder / name}: 'eos_token_id' .* 0 to {VOCAB - 1}"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("value", "extra"), [(None, set()), ([], set()), (7, {7}), ([0, VOCAB - 1, 7], {0, VOCAB - 1, 7})]
)
def test_tokens_of_both_files_and_of_the_tokenizer_end_an_answer(tmp_path: Path, value: Any, extra: set[int]) -> None:
    own = load_tokenizer(str(model(tmp_path / "bare"))).eos_ids
    folder = model(tmp_path / "m", generation_config={"eos_token_id": value}, config={"eos_token_id": 9})
    assert load_tokenizer(str(folder)).eos_ids == own | extra | {9}


def test_the_models_vocabulary_counts_where_its_config_tells_it(tmp_path: Path) -> None:
    """It may be padded beyond the tokenizer's, or end before it."""
    wide = model(tmp_path / "wide", generation_config={"eos_token_id": VOCAB}, config={"vocab_size": VOCAB + 1})
    assert VOCAB in load_tokenizer(str(wide)).eos_ids
    narrow = model(tmp_path / "narrow", generation_config={"eos_token_id": 600}, config={"vocab_size": 600})
    with pytest.raises(TokenizerError, match=r"'eos_token_id' .* 0 to 599"):
        load_tokenizer(str(narrow))


def test_the_gateway_does_not_start_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model(tmp_path / "m", generation_config={"eos_token_id": "</s>"})
    assert gateway.main(["--model-name", "m", "--tokenizer", str(folder), "--unified", "127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert str(folder / "generation_config.json") in said
    assert "'eos_token_id'" in said
    assert "'</s>'" in said
