"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sluice_gateway.routing.reasons import POLICIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "records",
    "protocol",
    "kernels",
    "runtime",
    "engine",
    "services",
    "operator",
    "tools/cli",
    "tools/launch",
    "tools/harness",
    "tools/faults",
)


def python_files() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts]


def test_operator_folder_never_shadows_the_standard_library():
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_module_is_named_after_nothing():
    assert [p for p in python_files() if p.stem in ("utils", "common", "helpers", "util", "misc")] == []


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        (
            "grpc",
            ("server.py", "client.py", "leader/lease/", "codec.py", "leader/main.py", "sluice_runtime/rpc/"),
        ),
        ("nixl_cu13", ("nixl.py",)),
        ("fastapi", ("services/gateway",)),
        ("pydantic", ("services/gateway",)),
        ("kopf", tuple(f"sluice_operator/live/{room}.py" for room in ("handlers",))),
    ],
)
def test_a_library_is_met_in_its_own_rooms_only(library, allowed):
    found = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if any(
            line.lstrip().startswith((f"import {library}", f"from {library}")) for line in path.read_text().splitlines()
        )
    ]
    assert [path for path in found if not any(path.endswith(a) or a in path for a in allowed)] == []


@pytest.mark.parametrize(
    "module",
    ["sluice_records", "sluice_protocol.codec", "sluice_engine.supervisor.supervise", "sluice_engine.leader.main",
     "sluice_engine.leader.transport", "sluice_engine.transfer.sidecar", "sluice_gateway.__main__",
     "sluice_gateway.supervised", "sluice_operator.decide.plan", "sluice_cli.__main__"],
)  # fmt: skip
def test_torch_is_imported_on_the_ranks_side_only(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "module",
    [
        "sluice_engine.supervisor.supervise",
        "sluice_engine.transfer.sidecar",
        "sluice_engine.rank.rank",
        "sluice_gateway.supervised",
    ],
)
def test_grpc_stays_out_of_supervisor_sidecar_and_ranks(module):
    code = f"import sys, {module}; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


FOLDERS = sorted({path.parent for path in python_files()} - {ROOT / "tools/house"})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_has_no_more_modules_than_a_person_can_look_through(folder):
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 25


def test_what_all_services_share_names_no_process_of_an_engine():
    """Rows, reasons, mirrors and fault points are values that each service gives: a name of one would be a second
    place that has to know it."""
    named = re.compile(r"\b(leader|rank\d*|sidecar|zygote)\b")
    found = [
        f"{path.relative_to(ROOT)}: {node.value!r}"
        for path in (ROOT / "runtime").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and named.search(node.value)
    ]
    assert found == []


def test_every_target_is_documented():
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = [line for line in lines if line[:1].islower() and ":" in line and ":=" not in line.split("#")[0]]
    undocumented = [line for line in targets if "## " not in line and not line.startswith(("export", "unexport"))]
    assert undocumented == []


def test_every_reason_that_an_engine_gives_is_classified_by_the_gateway():
    """Literals of refusals and of failed rooms; an unknown one would be retried as if it were a fault."""
    given = set()
    for path in (ROOT / "engine" / "sluice_engine").rglob("*.py"):
        text = path.read_text()
        given |= set(re.findall(r'Refused\(\s*"([A-Z][A-Za-z]+)"', text))
        given |= set(re.findall(r'on_failed\([^)]*?"([A-Z][A-Za-z]+)"', text))
        given |= set(re.findall(r'_why(?:, last)? = \(+"([A-Z][A-Za-z]+)"', text))
        given |= set(re.findall(r'EndReason\.\w+, "([A-Z][A-Za-z]+)"', text))
    assert len(given) > 12
    assert given - POLICIES.keys() == set()


# Processes, bytes and requests are "it", by their name (CONTRIBUTING.md). Where a folder is not rewritten yet, the
# number of such words may only fall.
PERSONS = re.compile(r"\b(who|whoever|whom|nobody|somebody|his)\b", re.IGNORECASE)
MOST_PERSONS = {
    "operator": 110,
    "tools/cli": 29,
    "tools/faults": 9,
    "tools/harness": 26,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_processes_and_bytes_are_no_persons(package):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in python_files()
        if path.is_relative_to(ROOT / package)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for _ in PERSONS.finditer(line)
    ]
    assert len(found) <= MOST_PERSONS.get(package, 0), "\n".join(found)
    assert len(found) == MOST_PERSONS.get(package, 0), f"there are fewer now: lower MOST_PERSONS of {package}"
