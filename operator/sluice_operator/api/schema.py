"""OpenAPI v3 structural schema of an API dataclass. Every string, list and map is bounded, which bounds CEL's cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_origin

from sluice_operator.api.field import About, ApiField, RawObject, Rule, fields_of, item_type, rules_of
from sluice_operator.api.value import to_json

Schema = dict[str, Any]


def object_schema(owner: type[Any], description: str = "") -> Schema:
    """Raises TypeError for a field without a bound that CEL's cost would need."""
    fields = fields_of(owner)
    schema: Schema = {"type": "object"}
    if description:
        schema["description"] = description
    if required := [field.json_name for field in fields if field.required]:
        schema["required"] = required
    if rules := rules_of(owner):
        schema["x-kubernetes-validations"] = _validations(rules)
    schema["properties"] = {field.json_name: field_schema(field) for field in fields}
    return schema


def field_schema(field: ApiField) -> Schema:
    schema: Schema = {"description": field.about.description} | _typed(field.type, field.about, field.name)
    if field.about.rules:
        schema["x-kubernetes-validations"] = _validations(field.about.rules)
    if not field.required and field.default is not None:
        # The API server holds a default against the rules before it fills in the members' own defaults.
        has_rules = dataclasses.is_dataclass(field.type) and bool(rules_of(_class(field.type)))
        schema["default"] = to_json(field.default, defaults=has_rules)
    return schema


def _validations(rules: tuple[Rule, ...]) -> list[Schema]:
    return [{"rule": rule.rule, "message": rule.message} for rule in rules]


def _typed(kind: Any, about: About, name: str) -> Schema:
    if kind == RawObject:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if dataclasses.is_dataclass(kind):
        return {key: value for key, value in object_schema(_class(kind)).items() if key != "description"}
    if (item := item_type(kind)) is not None:
        return _list(item, about, name)
    if get_origin(kind) is not None and issubclass(get_origin(kind), Mapping):
        return _map(about, name)
    return _scalar(kind, about, name)


def _scalar(kind: Any, about: About, name: str) -> Schema:
    if kind is bool:
        return {"type": "boolean"}
    if kind is int:
        bounds = {"minimum": about.minimum, "maximum": about.maximum}
        return {"type": "integer"} | {key: value for key, value in bounds.items() if value is not None}
    if issubclass(kind, StrEnum):
        return {"type": "string", "enum": [member.value for member in kind]}
    if kind is not str:
        raise TypeError(f"{name}: the schema knows no {kind}")
    sizes: Schema = {"minLength": about.min_size, "maxLength": about.max_size, "pattern": about.pattern or None}
    if about.max_size is None:
        raise TypeError(f"{name}: a string needs max_size")
    return {"type": "string"} | {key: value for key, value in sizes.items() if value is not None}


def _list(item: Any, about: About, name: str) -> Schema:
    if about.max_size is None:
        raise TypeError(f"{name}: a list needs max_size")
    schema: Schema = {"type": "array", "maxItems": about.max_size}
    if about.list_keys:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(about.list_keys)}
    else:
        schema["x-kubernetes-list-type"] = "atomic" if about.atomic else "set"
    each = dataclasses.replace(about, min_size=None, max_size=about.item_max, pattern=about.item_pattern, list_keys=())
    return schema | {"items": _typed(item, each, name)}


def _map(about: About, name: str) -> Schema:
    if about.max_size is None:
        raise TypeError(f"{name}: a map needs max_size")
    values = {"type": "string", "maxLength": about.item_max}
    return {"type": "object", "maxProperties": about.max_size, "additionalProperties": values}


def _class(kind: Any) -> type[Any]:
    assert isinstance(kind, type)
    return kind
