"""docs/modeldeployment.md: every field with type, default and bounds, and every reason with its remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, get_origin

from sluice_operator.api.field import ApiField, RawObject, fields_of, item_type, rules_of
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.api.value import to_json
from sluice_operator.decide.reasons import render_table

_HEADER = """\
# ModelDeployment: reference

<!-- Generated from operator/sluice_operator by tools/house/generate.py (`make proto`). -->

How to use it: [kubernetes.md](kubernetes.md). `kubectl explain mdep.spec --recursive` says the same.
"""


def render_markdown() -> str:
    parts = [
        _HEADER,
        "## spec\n",
        *_table(ModelDeploymentSpec),
        "\n## What admission refuses\n",
        *(f"- `{path}`: {message}" for path, message in _rules(ModelDeploymentSpec, "spec")),
        "\n## status\n",
        *_table(ModelDeploymentStatus),
        "\n## Reasons, and what to do\n",
        render_table(),
    ]
    return "\n".join(parts)


def _table(owner: type[Any]) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for path, field in _walk(owner, ""):
        yield f"| `{path}` | {_type(field)} | {_default(field)} | {field.about.description.replace('|', '/')} |"


def _walk(owner: type[Any], path: str) -> Iterator[tuple[str, ApiField]]:
    for field in fields_of(owner):
        here = f"{path}{field.json_name}"
        yield here, field
        item = item_type(field.type)
        inner = field.type if item is None else item
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from _walk(inner, f"{here}." if item is None else f"{here}[].")


def _rules(owner: type[Any], path: str) -> Iterator[tuple[str, str]]:
    yield from ((path, rule.message) for rule in rules_of(owner))
    for field in fields_of(owner):
        here = f"{path}.{field.json_name}"
        yield from ((here, rule.message) for rule in field.about.rules)
        inner = item_type(field.type) or field.type
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from _rules(inner, here)


def _type(field: ApiField) -> str:
    kind, about = field.type, field.about
    if kind == RawObject or dataclasses.is_dataclass(kind):
        return "object"
    if (item := item_type(kind)) is not None:
        name = "object" if dataclasses.is_dataclass(item) else item.__name__
        return f"list of {name}, at most {about.max_size}"
    if get_origin(kind) is not None and issubclass(get_origin(kind), Mapping):
        return f"map of str, at most {about.max_size}"
    if issubclass(kind, StrEnum):
        return " / ".join(member.value for member in kind)
    if kind is int and about.maximum is not None:
        return f"int, {about.minimum}-{about.maximum}"
    return str(kind.__name__)


def _default(field: ApiField) -> str:
    if field.required:
        return "required"
    if field.default is None:
        return "-"
    told = to_json(field.default, defaults=False)
    return "" if told in ({}, []) else f"`{str(told).lower() if isinstance(told, bool) else told}`"
