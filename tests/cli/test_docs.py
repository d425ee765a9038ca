"""What the documents point at is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sluice_cli.advice import ADVICE, render_table
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.watched_rows import EngineReason
from sluice_gateway.status.watched_rows import GatewayReason
from sluice_protocol.generate import Role
from sluice_runtime.health.guard import Guard, Policy
from sluice_runtime.health.service import Service
from sluice_runtime.health.status import debug_routes, probe_routes
from sluice_runtime.health.watched import Reason

ROOT = Path(__file__).resolve().parents[2]
MINE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/gateway.md", "docs/health.md",
        "docs/kubernetes.md", "charts/sluice/README.md")  # fmt: skip
DOCUMENTS = [ROOT / name for name in MINE]
DOCUMENTS += [path for folder in ("adr", "kubernetes") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        place = (document.parent / path) if path else document
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_are_spoken_of_exist(name):
    """Lists in braces apart."""
    there = {path.name for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts and ".tools" not in path.parts}
    told = {Path(path).name for path in re.findall(r"`([\w/]+\.py)`", (ROOT / name).read_text())}
    assert told <= there


def test_every_reason_is_explained_and_the_table_in_the_docs_is_that_of_the_doctor():
    """`python -c "from sluice_cli.advice import *; print(render_table())"` makes it."""
    reasons = {*Reason, *EngineReason, *GatewayReason}
    assert set(ADVICE) == reasons
    text = (ROOT / "docs" / "health.md").read_text()
    assert render_table() in text
    rows = text.partition("## What to do for each reason")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == {reason.value for reason in reasons}


def test_the_docs_have_every_path_that_a_supervisor_answers(tmp_path):
    guard = Guard(Service("s", "gateway", tmp_path, engine_kind(Role.DECODE, "nixl"), dict, dict), Policy())
    text = (ROOT / "docs" / "health.md").read_text()
    told = set(re.findall(r"(/(?:livez|readyz|startupz|health|status|metrics|debug/maintenance))\b", text))
    told |= {f"/debug/{name}" for name in re.search(r"`/debug/\{([a-z,]+)\}`", text)[1].split(",")}  # type: ignore[index]
    assert told == {route.split()[1] for route in (*probe_routes(guard), *debug_routes(guard))}


def test_adrs_have_numbers_of_their_own():
    numbers = [path.name[:4] for path in (ROOT / "docs" / "adr").glob("*.md")]
    assert all(number.isdigit() for number in numbers)
    assert len(numbers) == len(set(numbers))


def make_help(env: dict[str, str]) -> str:
    """Also when this test itself runs under make, which tells its children so."""
    argv = ["make", "--no-print-directory", "help"]
    env = {
        name: value for name, value in env.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
    }
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=30).stdout


def test_make_help_lists_every_target_and_the_documents_no_others():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    told = make_help(dict(os.environ))
    assert told == make_help(os.environ | {"MAKELEVEL": "1", "MAKEFLAGS": "w -j2 --jobserver-auth=3,4"})
    assert [line.split()[0] for line in told.splitlines()] == phony[1].split()
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:^|`|&& )make ([a-z][a-z0-9-]*)", document.read_text(), re.MULTILINE))
        assert named <= set(phony[1].split()), document
