"""v1alpha1 only grows: today's CRD against every one that people may have stored objects under."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from operator_growth import broken_definition, broken_promises

from sluice_operator.api import crd

ROOT = Path(__file__).resolve().parents[2]
RELEASES = sorted((ROOT / "tests" / "cluster" / "releases").glob("*.yaml"))
CHARTED = "charts/sluice-crds/templates/modeldeployments.yaml"


def test_there_is_an_earlier_one():
    assert RELEASES


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem[:7])
def test_nothing_was_taken_away_since(release):
    assert list(broken_definition(yaml.safe_load(release.read_text()), crd.crd())) == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem[:7])
def test_what_was_kept_is_what_that_commit_had(release):
    """Where the history is there: a shallow clone has what was kept, and nothing to hold it against."""
    told = subprocess.run(
        ["git", "cat-file", "blob", f"{release.stem}:{CHARTED}"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    if told.returncode:
        pytest.skip(f"this clone does not reach back to {release.stem[:7]}")
    assert told.stdout == release.read_text()


SMALL = {
    "type": "object",
    "required": ["a"],
    "properties": {
        "a": {"type": "string", "maxLength": 5, "enum": ["x", "y"], "pattern": "^."},
        "b": {"type": "integer", "minimum": 1, "default": 2},
        "c": {
            "type": "array",
            "maxItems": 4,
            "x-kubernetes-list-type": "set",
            "items": {"type": "string", "maxLength": 3},
        },
        "d": {"type": "object", "default": {"e": 1}, "properties": {"e": {"type": "integer", "default": 1}}},
        "f": {"type": "object", "maxProperties": 3, "additionalProperties": {"type": "string"}},
        "g": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}


def altered(path, **changes):
    """SMALL with changes at `path`; None takes a key away."""
    schema = json.loads(json.dumps(SMALL))
    there = schema
    for name in path:
        there = there[name]
    there.update({key: value for key, value in changes.items() if value is not None})
    for key in [key for key, value in changes.items() if value is None]:
        del there[key]
    return schema


FIELD = "properties"


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        # Removed.
        ((FIELD,), {"b": None}, "b: is gone"),
        ((FIELD, "d", FIELD), {"e": None}, "d.e: is gone"),
        ((FIELD, "g"), {"x-kubernetes-preserve-unknown-fields": None}, "preserve"),
        # Retyped.
        ((FIELD, "b"), {"type": "string"}, "type was 'integer'"),
        ((FIELD, "c", "items"), {"type": "integer"}, "type was 'string'"),
        ((FIELD, "c"), {"x-kubernetes-list-type": "atomic"}, "list-type"),
        ((FIELD, "f"), {"additionalProperties": None}, "additionalProperties came or went"),
        # Required.
        ((), {"required": ["a", "b"]}, "b: is required now"),
        ((FIELD, "d"), {"required": ["e"]}, "e: is required now"),
        # Defaults.
        ((FIELD, "b"), {"default": 3}, "default was 2"),
        ((FIELD, "b"), {"default": None}, "default was 2"),
        ((FIELD, "a"), {"default": "x"}, "default was None"),
        ((FIELD, "d"), {"default": {"e": 2}}, "default was"),
        # Tightened.
        ((), {"x-kubernetes-validations": [{"rule": "false"}]}, "new rule"),
        ((FIELD, "a"), {"maxLength": 4}, "maxLength"),
        ((FIELD, "a"), {"minLength": 1}, "minLength"),
        ((FIELD, "a"), {"pattern": "^x"}, "pattern"),
        ((FIELD, "a"), {"enum": ["x"]}, "'y' is no value"),
        ((FIELD, "b"), {"minimum": 2}, "minimum"),
        ((FIELD, "b"), {"maximum": 9}, "maximum"),
        ((FIELD, "b"), {"enum": [1]}, "has an enum now"),
        ((FIELD, "c"), {"maxItems": 3}, "maxItems"),
        ((FIELD, "c", "items"), {"maxLength": 2}, "maxLength"),
        ((FIELD, "f"), {"maxProperties": 2}, "maxProperties"),
        # What this check does not know.
        ((FIELD, "b"), {"multipleOf": 2}, "nobody has said"),
    ],
)  # fmt: skip
def test_whatever_breaks_a_stored_object_is_noticed(path, changes, words):
    told = list(broken_promises(SMALL, altered(path, **changes)))
    assert len(told) == 1
    assert words in told[0]


def test_growing_breaks_no_promise():
    grown = altered((FIELD, "a"), maxLength=9, enum=["x", "y", "z"], description="Longer now.")
    grown[FIELD]["h"] = {"type": "string", "default": "", "x-kubernetes-validations": [{"rule": "true"}]}
    grown[FIELD]["i"] = {"type": "object", "required": ["j"], "properties": {"j": {"type": "string"}}}
    grown[FIELD]["d"]["default"] = {"e": 1, "k": 2}
    del grown["required"]
    assert list(broken_promises(SMALL, grown)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it["spec"].update(scope="Cluster"), "scope"),
        (lambda it: it["spec"]["names"].update(shortNames=[]), "names"),
        (lambda it: it["spec"]["versions"][0].update(name="v1"), "v1alpha1: is not served"),
        (lambda it: it["spec"]["versions"][0].update(served=False), "v1alpha1: is not served"),
        (lambda it: it["spec"]["versions"][0]["subresources"].pop("scale"), "subresources"),
        (lambda it: spec_of(it)["properties"].pop("drain"), "v1alpha1.spec.drain: is gone"),
        (lambda it: spec_of(it)["required"].append("drain"), "v1alpha1.spec.drain: is required now"),
    ],
)
def test_so_is_what_changes_in_the_definition_around_it(change, words):
    changed = copy.deepcopy(crd.crd())
    change(changed)
    assert any(words in line for line in broken_definition(crd.crd(), changed))


def spec_of(definition):
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
