"""A run directory is one supervisor's: recorder, sockets and stacks of two would be mixed, and a healthy engine was
killed for what the other one's process did."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_runtime.errors import SpecError
from sluice_runtime.process.supervision import sole_user

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """As by another process: a lock belongs to an opening of the directory."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    (tmp_path / "recorder").write_bytes(b"of the first one")
    yield tmp_path
    os.close(fd)


def refused(*argv: str) -> str:
    done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, timeout=50)
    assert done.returncode == 2, done.stderr
    (event,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert event["event"] == "died"
    return str(event["cause"])


def test_a_second_engine_is_refused_by_name_and_touches_nothing(taken: Path, tmp_path_factory) -> None:
    spec = {"role": "unified", "name": "u", "run_dir": str(taken), "key": "k", "scripted": {}}
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text(json.dumps(spec))
    assert f"run_dir: {taken}" in refused("sluice_engine.supervisor.supervise", "--spec", str(path))
    assert (taken / "recorder").read_bytes() == b"of the first one"
    assert not (taken / "termination-log").exists()


def test_a_second_gateway_too(taken: Path) -> None:
    assert f"run_dir: {taken}" in refused("sluice_gateway.supervised", "--run-dir", str(taken), "--", "--listen", "x")
    assert (taken / "recorder").read_bytes() == b"of the first one"


def test_the_next_life_has_the_directory_of_the_last(tmp_path: Path) -> None:
    with sole_user(tmp_path):
        with pytest.raises(SpecError, match="run_dir"):
            with sole_user(tmp_path):
                pass
    with sole_user(tmp_path):
        child = subprocess.Popen(["sleep", "60"])
    try:
        with sole_user(tmp_path):  # a child that was started meanwhile does not hold it
            pass
    finally:
        child.kill()
        child.wait()
