"""What a dataclass field of the API says about itself, beyond its type: one definition for schema, parser and docs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

# Anything that Kubernetes itself defines: kept as it is, checked by a server-side dry run of the child.
RawObject = Mapping[str, Any]
_KEY = "sluice.api"


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule and what is said when it fails, with the remedy."""

    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class About:
    """`min_size`, `max_size`: of a string in characters, of a list in items, of a map in entries.

    `item_max`: characters of a list's strings. `minimum`, `maximum`: of a number, or of a list's numbers.
    `pattern_remedy`: what is said instead of the pattern where a string does not match it.
    `list_keys`: a list of objects is a map with these keys; without it a list of scalars is a set.
    """

    description: str
    minimum: int | None = None
    maximum: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    item_max: int = 253
    pattern: str = ""
    pattern_remedy: str = ""
    item_pattern: str = ""
    list_keys: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    format: str = ""
    atomic: bool = False


def api(description: str, default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """A field. A default that is a class is an object with all of that class's defaults."""
    metadata = {_KEY: About(description, **bounds)}
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ApiField:
    """`type`: the bare one, without None. `default`: MISSING for a required field, a value else."""

    name: str
    json_name: str
    type: Any
    optional: bool
    default: Any
    about: About

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def camel(name: str) -> str:
    """max_surge -> maxSurge."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def snake(name: str) -> str:
    """maxSurge -> max_surge."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)


# Looking at annotations is slow, and every parse of every object asks.
_KNOWN: dict[type[Any], tuple[ApiField, ...]] = {}


def fields_of(owner: type[Any]) -> tuple[ApiField, ...]:
    """In the order of definition. Raises TypeError for a field that was not made by `api`."""
    if owner not in _KNOWN:
        hints = get_type_hints(owner)
        _KNOWN[owner] = tuple(_field(owner, field, hints[field.name]) for field in dataclasses.fields(owner))
    return _KNOWN[owner]


def rules_of(owner: type[Any]) -> tuple[Rule, ...]:
    """CEL rules over the object as a whole."""
    rules: tuple[Rule, ...] = getattr(owner, "RULES", ())
    return rules


def item_type(kind: Any) -> Any:
    """T of tuple[T, ...]; None for anything else."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _field(owner: type[Any], field: dataclasses.Field[Any], hint: Any) -> ApiField:
    about = field.metadata.get(_KEY)
    if about is None:
        raise TypeError(f"{owner.__name__}.{field.name} says nothing about itself: define it with api(...)")
    kind, optional = _without_none(hint)
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return ApiField(field.name, camel(field.name), kind, optional, default, about)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (kind,) = [part for part in get_args(hint) if part is not type(None)]
    return kind, True
