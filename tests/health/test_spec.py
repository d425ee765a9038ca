"""Settings of the watch that cannot be are refused by name before anything starts, and a supervisor says so by its exit
status: 2 is nobody's death."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice_engine.spec import load_spec
from sluice_protocol.service_spec import HealthSpec
from sluice_runtime.errors import SpecError

BAD: list[tuple[str, Any]] = [
    ("floor_s", 0),
    ("floor_s", -1.0),
    ("floor_s", float("nan")),
    ("floor_s", float("inf")),
    ("factor", 0),
    ("factor", 0.5),
    ("start_s", 0),
    ("max_bundles", 0),
    ("max_bundle_mib", 0),
    ("quarantine_after", 0),
    ("quarantine_window_s", 0),
    ("quarantine_s", -1),
    ("quarantine_s", float("inf")),
    ("debug_port", -1),
    ("debug_port", 65536),
]


def spec_file(folder: Path, **fields: object) -> Path:
    told = {"role": "unified", "name": "u", "run_dir": str(folder), "scripted": {}, **fields}
    (folder / "in.json").write_text(json.dumps(told))
    return folder / "in.json"


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_setting_that_cannot_be_is_refused_by_name_and_with_what_would_do(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; give "):
        HealthSpec(**{name: value})


def test_what_turns_something_off_is_no_mistake() -> None:
    assert HealthSpec(quarantine_s=0, debug_port=0, floor_s=0.1, factor=1, max_bundles=1).quarantine_s == 0


def test_a_spec_with_such_a_setting_names_the_file_and_the_field(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"in\.json: floor_s is 0.*; give .*\$\.health"):
        load_spec(spec_file(tmp_path, health={"floor_s": 0, "factor": 0}))


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"health": {"floor_s": 0}}, "floor_s is 0"),
        ({"scripted": None}, "name a model directory"),
        ({"scripted": None, "model": "/nowhere"}, "/nowhere"),
        ({"role": 3}, "role"),
    ],
)
def test_a_supervisor_that_was_asked_for_what_cannot_be_ends_with_2(tmp_path: Path, fields, said: str) -> None:
    argv = [sys.executable, "-m", "sluice_engine.supervisor.supervise", "--spec", str(spec_file(tmp_path, **fields))]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2, told
    assert said in json.loads(told.stdout)["cause"]


def test_a_gateway_says_which_setting_of_its_watch_cannot_be(tmp_path: Path, capsys) -> None:
    from sluice_gateway.supervised import parse_arguments

    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--run-dir", str(tmp_path), "--health", '{"factor": 0}'])
    assert ended.value.code == 2
    assert "--health: factor is 0" in capsys.readouterr().err


def test_a_spec_survives_its_own_way_through_json() -> None:
    told = msgspec.json.decode(msgspec.json.encode(HealthSpec()), type=HealthSpec)
    assert told == HealthSpec()
