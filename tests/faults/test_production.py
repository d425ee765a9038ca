"""A production build, one without sluice-faults: its hook points are inert, and it refuses to be armed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sluice_engine.points import ENGINE_POINTS
from sluice_gateway.points import GATEWAY_POINTS
from sluice_runtime import fault_points
from sluice_runtime.errors import SpecError
from sluice_runtime.fault_points import SUPERVISOR_POINTS

ROOT = Path(__file__).resolve().parents[2]

# Hides one distribution from importlib.metadata and from import, as if it had never been installed.
HIDDEN = """
import importlib.metadata as metadata, sys
real = metadata.entry_points
metadata.entry_points = lambda **asked: [] if asked.get("group") == "sluice.faults" else real(**asked)
sys.modules["sluice_faults"] = None
from sluice_engine.supervisor.supervise import main
sys.exit(main(sys.argv[1:]))
"""


def test_unarmed_points_are_inert():
    for point in (*ENGINE_POINTS, *GATEWAY_POINTS, *SUPERVISOR_POINTS):
        fault_points.reach(point)
        assert fault_points.change(point, b"abc") == b"abc"
        assert not fault_points.holds(point)
        asyncio.run(asyncio.wait_for(fault_points.stay(point), 5))


def test_without_the_package_arming_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(fault_points, "entry_points", lambda group: [])
    with pytest.raises(SpecError, match="install sluice-faults, or leave it empty"):
        fault_points.arm("/somewhere")
    fault_points.reach("leader.plan")


def test_a_spec_with_faults_is_refused_before_anything_starts(tmp_path):
    spec = {"role": "unified", "name": "u", "run_dir": str(tmp_path), "scripted": {}, "faults": str(tmp_path)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    told = subprocess.run(
        [sys.executable, "-c", HIDDEN, "--spec", str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 2
    assert "no fault injection" in json.loads(told.stdout)["cause"]


def test_the_product_does_not_depend_on_it():
    """Neither an extra nor the wheel names the package: it is a group of the checkout's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "sluice-faults" not in json.dumps(project["project"])
    assert "faults" not in json.dumps(project["tool"]["hatch"])
