"""Whichever `sluice up` of several ends, those that still run are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice_cli import notes

WRITE = """
import sys
from sluice_cli import notes
for line in sys.stdin:
    word, url = line.strip(), f"http://127.0.0.1:{sys.argv[1]}"
    notes.remove_note() if word == "end" else notes.write_note(url, "m", is_ready=word == "ready")
    print("done", flush=True)
"""


class Writer:
    """Stands for a `sluice up` at port `port`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        argv = (sys.executable, "-c", WRITE, str(port))
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.says("starting")

    def says(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def is_killed(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture(params=["XDG_RUNTIME_DIR", "TMPDIR"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where notes lie, with a runtime directory and without."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return notes.note_path(1).parent


@pytest.fixture
def up(place: Path) -> Iterator[Callable[[int], Writer]]:
    writers: list[Writer] = []

    def begin(port: int) -> Writer:
        writers.append(Writer(port))
        return writers[-1]

    yield begin
    for writer in writers:
        writer.is_killed()


def test_the_latest_that_serves_is_found_and_the_others_beside_it(up):
    first = up(1)
    with pytest.raises(FileNotFoundError, match="still starting"):
        notes.read_note()
    first.says("ready")
    second = up(2)
    assert notes.read_note() == first.url  # the second has nothing to say yet
    second.says("ready")
    assert [note["url"] for note in notes.read_stacks()] == [second.url, first.url]


@pytest.mark.parametrize("end", [lambda writer: writer.says("end"), Writer.is_killed])
def test_when_one_ends_the_other_is_found(up, place, end):
    """The second took over the only note, and took it along."""
    first, second = up(1), up(2)
    for writer in (first, second):
        writer.says("ready")
    end(second)
    assert notes.read_note() == first.url
    end(first)
    with pytest.raises(FileNotFoundError, match="no `sluice up` of yours runs"):
        notes.read_note()


def test_nothing_is_left_of_those_that_ended_and_the_next_one_removes_what_killed_ones_left(up, place):
    first, second, third = up(1), up(2), up(3)
    second.is_killed()
    third.says("end")
    assert notes.note_path(second.process.pid).exists()
    first.says("ready")
    assert [path.name for path in place.iterdir()] == [f"sluice-up-{first.process.pid}.json"]
    assert place.stat().st_mode & 0o077 == 0 or "XDG_RUNTIME_DIR" in os.environ
    first.says("end")
    assert not place.exists() or list(place.iterdir()) == []


def test_a_number_that_another_process_has_now_is_not_believed(place):
    notes.write_note("http://127.0.0.1:1", "m")
    path = notes.note_path(os.getpid())
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"born": told["born"] - 1}))
    assert notes.read_stacks() == []
    notes.remove_note()


def test_the_notes_of_somebody_else_are_not_believed(place, monkeypatch):
    """He could have us send our prompts to him."""
    notes.write_note("http://127.0.0.1:1", "m")
    monkeypatch.setattr(notes.os, "getuid", lambda: os.geteuid() + 1)
    monkeypatch.setattr(notes, "note_path", lambda pid, path=place: path / f"sluice-up-{pid}.json")
    assert notes.read_stacks() == []
    notes.remove_note()


@pytest.mark.parametrize("written", ["", "{", "[]", "null", '{"pid": "x"}', '{"pid": 1}', '{"pid": null, "born": []}'])
def test_what_is_no_note_hides_none(up, place, written):
    one = up(1)
    one.says("ready")
    (place / "sluice-up-7.json").write_text(written)
    assert notes.read_note() == one.url
