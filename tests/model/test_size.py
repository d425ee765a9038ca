"""`sluice size` prints the published figures, and refuses by name."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from flash_config import FLASH

from sluice_cli.size import add_arguments, parse_size, run


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH))
    return path


def size(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(a) for a in argv]))


@pytest.mark.parametrize(
    ("precision", "per_token"), [("bf16", "6,880.00"), ("fp8", "3,850.25"), ("fp8/fp4", "3,514.25")]
)
def test_flash_takes_the_published_bytes_per_token(
    flash: Path, capsys: pytest.CaptureFixture[str], precision: str, per_token: str
) -> None:
    assert size("--config", flash, "--precision", precision, "--memory", "80GiB") == 0
    out = capsys.readouterr().out
    assert f" {per_token} " in out
    assert "284,334,567,511 parameters" in out
    assert "sequences of 1,048,576 tokens:" in out


def test_a_sequence_is_pages_state_and_snapshot(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert size("--config", flash.parent, "--context", 1000, "--page-tokens", 128, "--memory", "1 GiB") == 0
    out = capsys.readouterr().out
    assert "a sequence of 1,000 tokens: 8 pages" in out
    assert "in 1,073,741,824  1.00 GiB:" in out
    assert "the model's own limit is 1,048,576 tokens" in out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--precision", "int8"], "--precision"),
        (["--page-tokens", "100"], "multiple of 128"),
        (["--page-tokens", "0"], "page_tokens is 0"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--context", "0"], "--context is 0"),
        (["--context", "9999999"], "max_position_embeddings"),
    ],
)
def test_options_that_make_no_sense_are_named(
    flash: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str
) -> None:
    assert size("--config", flash, *argv) == 2
    assert named in capsys.readouterr().err


def test_a_config_that_cannot_be_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    assert size("--config", path) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_text(json.dumps({**FLASH, "attention_bias": True}))
    assert size("--config", path) == 2
    assert "attention_bias" in capsys.readouterr().err


def test_sizes_parse_in_both_systems() -> None:
    assert [parse_size(s) for s in ("80GiB", "1kB", "2 MB", "1.5KiB", "7")] == [80 << 30, 1000, 2_000_000, 1536, 7]


def test_size_needs_no_torch() -> None:
    code = "import sys, sluice_cli.size; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
