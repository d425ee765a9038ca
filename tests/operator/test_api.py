"""The API: one definition, read, written and refused alike everywhere."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_cluster import manifest
from operator_invalid import INVALID, changed, good

from sluice_operator.api import crd, reference
from sluice_operator.api.field import api, camel, fields_of, item_type, snake
from sluice_operator.api.schema import object_schema
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.api.value import from_json, to_json
from sluice_operator.decide.accept import parse
from sluice_operator.decide.reasons import REASONS, Reason, render_troubleshooting

MINIMAL = {
    "model": {"uri": "pvc://models/tiny"},
    "image": {"repository": "registry.local/sluice-engine", "tag": "1"},
    "accelerator": {"type": "CPU"},
}


def schemas(node, path=""):
    if isinstance(node, dict):
        if "type" in node and isinstance(node["type"], str):
            yield path, node
        for key, value in node.items():
            if key not in ("default", "enum"):
                yield from schemas(value, f"{path}.{key}")


def test_the_crd_is_small_enough_for_a_plain_apply_and_holds_no_template_markers():
    text = crd.render_yaml()
    assert len(json.dumps(yaml.safe_load(text))) < 256 * 1024 / 4
    assert "{{" not in text
    assert yaml.safe_load(text) == crd.crd()


def test_everything_is_bounded_so_that_cel_costs_little():
    for path, schema in schemas(crd.root_schema()["properties"]["spec"]):
        if schema["type"] == "string":
            assert "enum" in schema or schema["maxLength"] <= 1024, path
        if schema["type"] == "array":
            assert schema["maxItems"] <= 64, path
            assert "x-kubernetes-list-type" in schema, path
        if "additionalProperties" in schema:
            assert schema["maxProperties"] <= 64, path


def test_every_field_has_a_description_and_every_number_bounds():
    def walk(owner, path):
        for field in fields_of(owner):
            here = f"{path}.{field.json_name}"
            assert field.about.description.endswith("."), here
            if field.type is int and owner.__module__.endswith("spec"):
                assert field.about.minimum is not None, here
                assert field.about.maximum is not None, here
            inner = item_type(field.type) or field.type
            if dataclasses.is_dataclass(inner):
                walk(inner, here)

    walk(ModelDeploymentSpec, "spec")
    walk(ModelDeploymentStatus, "status")


def test_nothing_is_structural_by_accident():
    """The rules of a structural schema: a type everywhere, defaults that are valid, no default beside `required`."""
    for path, schema in schemas(crd.root_schema()):
        for name in schema.get("required", ()):
            assert "default" not in schema["properties"][name], f"{path}.{name}"
        if "default" in schema and schema["type"] == "object":
            assert set(schema["default"]) <= set(schema.get("properties", schema["default"])), path
        assert "oneOf" not in schema, path
        assert "nullable" not in schema, path


def fill(schema, value):
    """What the API server makes of `value`: its defaulting, in a few lines."""
    for name, member in schema.get("properties", {}).items():
        if name not in value and "default" in member:
            value[name] = json.loads(json.dumps(member["default"]))
        if name in value and member["type"] == "object":
            fill(member, value[name])
    return value


def test_the_servers_defaults_are_the_parsers():
    for raw in (MINIMAL, good()):
        filled = fill(object_schema(ModelDeploymentSpec), json.loads(json.dumps(raw)))
        assert filled != raw
        assert from_json(ModelDeploymentSpec, filled, "spec") == from_json(ModelDeploymentSpec, raw, "spec")


def test_what_is_written_is_read_again():
    spec = parse("m", good())
    assert from_json(ModelDeploymentSpec, to_json(spec), "spec") == spec
    assert from_json(ModelDeploymentSpec, to_json(spec, defaults=False), "spec") == spec
    status = ModelDeploymentStatus(revision="r")
    assert from_json(ModelDeploymentStatus, to_json(status), "status") == status


def test_a_good_spec_is_accepted():
    assert isinstance(parse("m", good()), ModelDeploymentSpec)
    assert isinstance(parse("m", manifest()), ModelDeploymentSpec)


@pytest.mark.parametrize(("changes", "path"), INVALID, ids=[f"{n}:{path}" for n, (_, path) in enumerate(INVALID)])
def test_what_is_wrong_is_named_with_a_remedy(changes, path):
    problems = parse("m", changed(changes))
    assert isinstance(problems, tuple)
    reason, problem = problems[0]
    assert path in problem.path
    assert problem.problem
    assert problem.remedy
    assert reason in REASONS


@pytest.mark.parametrize("name", ["", "A", "1a", "a" * 41, "a.b", "a-", "ä", "a_b"])
def test_a_name_that_children_could_not_carry_is_refused(name):
    problems = parse(name, good())
    assert problems[0][1].path == "metadata.name"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
paths = st.sampled_from(sorted({path for changes, _ in INVALID for path in changes}))


@settings(derandomize=True, deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(paths, junk, min_size=1, max_size=3))
def test_nothing_that_somebody_writes_crashes_the_parser(changes):
    try:
        raw = changed(changes)
    except (AttributeError, TypeError):
        return  # the changes do not fit into each other
    told = parse("m", raw)
    assert isinstance(told, ModelDeploymentSpec | tuple)


def test_rules_are_those_of_cel():
    """Each rule of the CRD on an object as a whole has its twin in accept, by a spec that breaks it."""
    rules = [
        rule["message"]
        for path, schema in schemas(crd.root_schema()["properties"]["spec"])
        for rule in schema.get("x-kubernetes-validations", ())
        if "oldSelf" not in rule["rule"]
    ]
    breaking = (
        {"model.hub": {}},
        {"image.digest": "sha256:" + "a" * 64},
        {"precision": {"indexKeys": "FP8"}},
        {"accelerator.type": "CPU"},
        {"decode.scaling.auto": None, "decode.scaling.mode": "Auto"},
        {"decode.scaling.auto.minReplicas": 9},
        {"rollout": {"maxSurge": 0, "maxUnavailable": 0}},
    )
    assert len(rules) == len(breaking)
    assert all(isinstance(parse("m", changed(changes)), tuple) for changes in breaking)


def test_scale_and_columns_point_at_fields_that_exist():
    version = crd.crd()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    paths = [path for _, path, _, _ in crd.COLUMNS if "[?" not in path and "metadata" not in path]
    for path in [*version["subresources"]["scale"].values(), *paths]:
        there = schema
        for name in path.strip(".").split("."):
            there = there["properties"][name]


def test_names_go_both_ways():
    for name in ("max_surge", "inter_token_p95_milliseconds", "uri"):
        assert snake(camel(name)) == name
    assert camel("inter_token_p95_milliseconds") == "interTokenP95Milliseconds"


def test_a_field_without_its_description_or_bound_is_no_field():
    @dataclass(frozen=True)
    class Bare:
        x: int = 3

    @dataclass(frozen=True)
    class Endless:
        x: str = api("A string.")

    with pytest.raises(TypeError, match="says nothing about itself"):
        object_schema(Bare)
    with pytest.raises(TypeError, match="max_size"):
        object_schema(Endless)


def test_every_reason_has_a_meaning_and_the_docs_have_all():
    assert set(REASONS) == set(Reason)
    text = reference.render_markdown()
    assert all(f"| `{reason}` |" in text for reason in Reason)
    trouble = render_troubleshooting()
    assert all(trouble.count(f"| `{reason}` |") == 1 for reason in Reason)
    assert "`decode.scaling.auto.behavior.scaleUp.policies[].periodSeconds`" in text


def test_an_operator_that_is_older_than_the_crd_reads_what_it_knows():
    """A field that a newer CRD fills in was a mistake in every ModelDeployment, from the moment that the CRD came."""
    newer = manifest()
    newer["telepathy"] = {"on": True}
    newer["decode"] = {**newer.get("decode", {}), "mood": "good"}
    assert parse("m", newer, is_newer=True) == parse("m", manifest())
    assert isinstance(parse("m", newer), tuple)
    status = {"telepathy": "on", "reason": "Starting"}
    assert from_json(ModelDeploymentStatus, status, "status", is_newer=True).reason == "Starting"
