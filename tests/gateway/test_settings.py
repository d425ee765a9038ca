"""A model's own sampling defaults: taken if a request might say the same, else refused by file and field."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sluice_gateway import __main__ as gateway
from sluice_gateway.settings import SettingsError, sampling_defaults
from sluice_protocol.sampling import BOUNDS, Sampling

BAD: list[tuple[str, Any]] = [
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-310),
    ("repetition_penalty", "1.1"),
    ("repetition_penalty", 10**400),
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", True),
    ("temperature", float("nan")),
    ("top_p", -0.1),
    ("top_p", [0.9]),
    ("top_k", 5.5),
    ("top_k", -2),
    ("min_p", float("inf")),
    ("presence_penalty", 3),
    ("do_sample", "no"),
]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_default_is_refused_by_file_and_field(field: str, value: Any, greedy: bool) -> None:
    config = ({"do_sample": False} if greedy else {}) | {field: value}
    with pytest.raises(SettingsError, match=rf"^/m/generation_config.json: .*'{field}'"):
        sampling_defaults(config, "/m/generation_config.json")


def test_the_bounds_themselves_and_null_are_fine() -> None:
    for name, bound in BOUNDS.items():
        for value in bound:
            assert getattr(sampling_defaults({name: value}), name) == value
        assert sampling_defaults({name: None}) == Sampling(temperature=1.0)


def test_do_sample_false_is_greedy_and_keeps_the_penalty() -> None:
    told = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    assert sampling_defaults(told) == Sampling(repetition_penalty=1.2)
    assert sampling_defaults({**told, "do_sample": True}) == Sampling(0.6, 0.9, 5, 0.1, 1.2)


@pytest.mark.parametrize("text", ['{"repetition_penalty": 0}', '{"temperature": "hot"}', '{"top_p": NaN}'])
def test_the_gateway_does_not_start_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    assert gateway.main(["--model-name", "m", "--tokenizer", str(tmp_path), "--unified", "127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "'" + text.split('"')[1] + "'" in said


@pytest.mark.parametrize(("text", "mib"), [("536870912\n", 512), ("max\n", sys.maxsize), ("", sys.maxsize)])
def test_the_containers_limit_of_memory_is_known(tmp_path: Path, text: str, mib: int) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(text)
    assert gateway.container_memory_mib(limit) == mib
    assert gateway.container_memory_mib(tmp_path / "nowhere") == sys.maxsize
