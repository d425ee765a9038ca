"""What is in the wheel, and that `sluice` works from an installed one, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = ROOT / ".tools" / "uv" / "bin" / "uv"
PACKAGES = ("records", "protocol", "kernels", "engine", "prefill", "decode", "gateway", "launch", "cli")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]


def uv(*argv: str, cwd: Path) -> None:
    command = str(UV) if UV.exists() else shutil.which("uv")
    if command is None:
        pytest.skip("no uv here")
    told = subprocess.run([command, *argv], cwd=cwd, capture_output=True, text=True, timeout=100)
    if told.returncode and any(word in told.stderr for word in ("dns error", "Failed to fetch", "error sending")):
        pytest.skip(f"the package index is out of reach: {told.stderr[-300:]}")
    assert told.returncode == 0, told.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    uv("build", "--wheel", "--out-dir", str(out), cwd=ROOT)
    return next(out.glob("sluice_serve-*.whl"))


def test_it_has_all_packages_their_types_and_the_default_model(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert {f"sluice_{package}/__init__.py", f"sluice_{package}/py.typed"} <= names
    model = {Path(name).name for name in names if name.startswith("sluice_cli/models/recall-1m/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "sample.json"} <= model
    assert "heldout.jsonl" not in model
    assert not [name for name in names if name.startswith(("tests/", "tools/")) or name.endswith(".pyc")]


def test_an_installed_one_sizes_and_finds_its_model(wheel, tmp_path):
    """Without extras: `size` needs nothing else, and `up` says what it needs."""
    uv("venv", "--python", sys.executable, "env", cwd=tmp_path)
    uv("pip", "install", "--python", "env/bin/python", str(wheel), cwd=tmp_path)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)

    code = "from sluice_cli.default_model import default_model; print(default_model())"
    found = run("env/bin/python", "-c", code).stdout.strip()
    assert found.startswith(str(tmp_path)), found
    sized = run("env/bin/sluice", "size", "--config", found)
    assert sized.returncode == 0, sized.stderr
    assert "bytes per token" in sized.stdout
    refused = run("env/bin/sluice", "up")
    assert refused.returncode == 2
    assert "pip install 'sluice-serve[gateway,engine]'" in refused.stderr
