"""Sizes of published rows are written down in `records/` only: whoever restates one has a second layout."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "kernels", "engine", "services", "tools/cli")
SIZES = {"132", "584", "68", "576"}
# 256 is a size of rows, and of a hundred other things: it may appear where a line says what else it is.
ROW_256 = re.compile(r"row|key|stride|slot", re.IGNORECASE)


def numbers(path: Path) -> list[tuple[int, str, str]]:
    """(line, number, text of the line) of every number in code; comments and strings do not compute sizes."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(t.start[0], t.string, t.line) for t in tokens if t.type == tokenize.NUMBER]


def offences(path: Path) -> list[str]:
    return [
        f"{path.name}:{line}: {text.strip()}"
        for line, number, text in numbers(path)
        if number in SIZES or (number == "256" and ROW_256.search(text.split("#")[0]))
    ]


def sources() -> list[Path]:
    files = [f for package in PACKAGES for f in (ROOT / package).rglob("*.py") if "v1" not in f.parts]
    assert len(files) > 30
    return sorted(files)


def test_row_sizes_are_written_down_in_records_only() -> None:
    assert [offence for path in sources() for offence in offences(path)] == []


@pytest.mark.parametrize("line", ["size = 132 * n", "x = 68", "row_bytes = 256", "y = [584]"])
def test_the_check_itself_finds_them(tmp_path: Path, line: str) -> None:
    path = tmp_path / "restated.py"
    path.write_text(line + "\n")
    assert offences(path)
    path.write_text("# 132\nx = 1320\nqueue = 256\n'68'\n")
    assert not offences(path)


def test_records_do_write_them_down() -> None:
    text = (ROOT / "records/sluice_records/formats.py").read_text()
    assert all(size in text for size in ("584", "256", "132", "68"))
