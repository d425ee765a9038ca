"""The Dockerfiles, read: what must be so before anybody builds them."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from sluice_operator.render.engine import USER

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("control", "engine")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())


def instructions(name: str) -> list[str]:
    """One per line, continuations joined, comments left out."""
    text = (ROOT / "images" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [line for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines() if line.strip()]


def final_stage(name: str) -> list[str]:
    told = instructions(name)
    last = max(index for index, line in enumerate(told) if line.startswith("FROM "))
    return told[last:]


def extras(name: str) -> set[str]:
    return set(re.findall(r"--extra (\w+)", "\n".join(instructions(name))))


def installed(name: str) -> set[str]:
    """Names of all packages that the lock has for the image's extras."""
    packages: dict[str, list[dict[str, object]]] = {}
    for package in LOCK["package"]:
        packages.setdefault(package["name"], []).append(package)
    (own,) = packages["sluice-serve"]
    todo = [*own["dependencies"], *(d for extra in extras(name) for d in own["optional-dependencies"][extra])]
    found: set[str] = set()
    while todo:
        wanted = todo.pop()
        if wanted["name"] in found:
            continue
        found.add(wanted["name"])
        for package in packages[wanted["name"]]:
            todo += package.get("dependencies", [])
            for extra in wanted.get("extra", []):
                todo += package.get("optional-dependencies", {}).get(extra, [])
    return found


def test_they_differ_in_what_is_in_them_and_in_nothing_else():
    first, second = (instructions(name) for name in NAMES)
    assert len(first) == len(second)
    for line, other in zip(first, second, strict=True):
        told = [re.sub(r"--extra \w+ ?|image\.(title|description)=\"[^\"]*\"", "", text) for text in (line, other)]
        assert told[0] == told[1] or line.startswith("CMD"), line


@pytest.mark.parametrize("name", NAMES)
class TestEach:
    def test_the_legacy_builder_can_read_it(self, name):
        text = (ROOT / "images" / f"{name}.Dockerfile").read_text()
        assert not re.search(r"--mount|<<|^# ?syntax|--link|--chmod|--platform", text, re.MULTILINE)

    def test_base_and_ca_bundle_are_arguments_and_every_stage_is_of_the_base(self, name):
        told = instructions(name)
        assert told[0].startswith("ARG BASE=")
        stages = {"${BASE}"}
        for line in told:
            if line.startswith("FROM "):
                _, source, *rest = line.split()
                assert source in stages
                stages |= set(rest[1:])
        assert sum(line.startswith("ARG CA_BUNDLE=") for line in told) == 1
        default = next(line.split("=")[1] for line in told if line.startswith("ARG CA_BUNDLE="))
        assert (ROOT / default).read_text() == ""

    def test_it_runs_as_the_user_of_the_pods_and_installs_nothing_in_the_last_stage(self, name):
        told = final_stage(name)
        assert f"USER {USER}:{USER}" in told
        for line in told:
            if line.startswith("RUN"):
                assert not re.search(r"apt|pip|uv |curl|wget|gcc|make", line), line
            if line.startswith(("COPY", "ADD")):
                assert line.startswith("COPY --from="), line
        values = (ROOT / "charts/sluice/values.yaml").read_text()
        assert set(re.findall(r"runAs(?:User|Group): (\d+)", values)) == {str(USER)}

    def test_nothing_is_imported_from_a_folder_that_others_may_write_to(self, name):
        (environment,) = [line for line in final_stage(name) if line.startswith("ENV")]
        assert "PYTHONSAFEPATH=1" in environment.split()

    def test_the_code_is_the_last_layer_and_the_dependencies_follow_from_the_lock_alone(self, name):
        copies = [line for line in final_stage(name) if line.startswith("COPY")]
        assert [re.search(r"--from=(\w+)", line)[1] for line in copies] == ["dependencies", "code"]
        text = "\n".join(instructions(name))
        stage = text.split("AS dependencies\n")[1].split("FROM ")[0]
        assert "--require-hashes" in stage
        assert re.findall(r"^COPY .*$", stage, re.MULTILINE) == ["COPY --from=wanted /wanted.txt /wanted.txt"]

    def test_it_says_what_it_is(self, name):
        told = " ".join(final_stage(name))
        for label in ("title", "description", "licenses", "version", "revision"):
            assert f"org.opencontainers.image.{label}=" in told
        assert f'"sluice-{name}"' in told
        assert f"ARG VERSION={PROJECT['project']['version']}" in final_stage(name)

    def test_its_tools_are_those_of_the_makefile(self, name):
        version = re.search(r"^UV_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert f"ARG UV_VERSION={version[1]}" in instructions(name)

    def test_extras_exist_and_nothing_of_the_tests_is_in_them(self, name):
        assert extras(name) <= PROJECT["project"]["optional-dependencies"].keys()
        assert not installed(name) & {"sluice-faults", "pytest", "hypothesis", "mypy", "ruff", "grpcio-tools", "openai"}


def test_control_has_no_torch_and_engines_have_what_the_operator_has_them_run():
    assert not installed("control") & {"torch", "nixl-cu13", "triton", "safetensors", "transformers"}
    assert {"kopf", "fastapi", "tokenizers", "prometheus-client", "cryptography"} <= installed("control")
    # `hf download` of render/model.py.
    assert {"torch", "nixl-cu13", "huggingface-hub", "prometheus-client"} <= installed("engine")


def in_context(path: str) -> bool:
    """As docker reads .dockerignore: the last line that matches the path, or a folder above it, rules."""
    told = True
    parts = path.split("/")
    above = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        names = parts if "**/" in line else above
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            told = line.startswith("!")
    return told


def test_the_context_has_what_the_wheel_is_made_of_and_no_more():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [f"{package}/__init__.py" for package in wheel["packages"]]
    needed += [*wheel["force-include"], "README.md", "LICENSE", "pyproject.toml", "uv.lock"]
    needed += ["images/no-ca-bundle.pem", "images/ca-bundle.pem", "images/with-ca.sh"]
    assert [path for path in needed if not in_context(path)] == []
    unwanted = [".git/HEAD", ".venv/bin/python", "tests/conftest.py", "tools/faults/sluice_faults/__init__.py"]
    unwanted += ["docs/figures.md", "models/recall-1m/heldout.jsonl", "images/base.sh", "charts/sluice/values.yaml"]
    unwanted += ["operator/sluice_operator/__pycache__/plan.cpython-311.pyc"]
    assert [path for path in unwanted if in_context(path)] == []


def test_a_bundle_from_elsewhere_is_never_committed():
    assert "images/ca-bundle.pem" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_helm_tests_pod_runs_what_the_control_image_has():
    rendered = yaml.safe_load_all((ROOT / "tests/cluster/golden/default.yaml").read_text())
    pod = next(item for item in rendered if item and item["kind"] == "Pod")["spec"]
    assert pod["containers"][0]["command"][0] == "python"
    assert pod["securityContext"]["runAsUser"] == USER
