"""API dataclasses from and to JSON, as the API server has them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_origin

from sluice_operator.api.field import About, ApiField, RawObject, fields_of, item_type

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """`path`: as kubectl writes it, spec.image.tag. `remedy`: what to do, an imperative; empty where the
    reason that goes with it says so."""

    path: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.path, self.problem, self.remedy) if part)


class Invalid(ValueError):
    """Raised by `from_json`. The API server lets none of this in; a file offline may hold it."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


def from_json(owner: type[T], raw: object, path: str, *, is_newer: bool = False) -> T:
    """Defaults are filled in. Raises Invalid with all that is wrong, never anything else. `is_newer`: it may come from
    an API server whose CRD is newer than we are, so a field that we do not know is none of ours, and no mistake."""
    reader = _Reader(is_newer)
    value: T = reader.read_object(owner, raw, path)
    if reader.problems:
        raise Invalid(tuple(reader.problems))
    return value


def to_json(value: Any, *, defaults: bool = True) -> Any:
    """`defaults` False leaves out what the schema would fill in again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_members(value, defaults))
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [to_json(item, defaults=defaults) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _members(value: Any, defaults: bool) -> Iterator[tuple[str, Any]]:
    for field in fields_of(type(value)):
        member = getattr(value, field.name)
        if member is not None and (defaults or field.required or member != field.default):
            yield field.json_name, to_json(member, defaults=defaults)


class _Reader:
    def __init__(self, is_newer: bool) -> None:
        self.is_newer = is_newer
        self.problems: list[Problem] = []

    def bad(self, path: str, problem: str, remedy: str) -> None:
        self.problems.append(Problem(path, problem, remedy))

    def read_object(self, owner: type[Any], raw: object, path: str) -> Any:
        if not isinstance(raw, Mapping):
            self.bad(path, f"is {_kind(raw)}, not an object", "give an object")
            return None
        fields = fields_of(owner)
        known = {field.json_name for field in fields}
        for name in sorted(str(key) for key in raw if key not in known and not self.is_newer):
            self.bad(f"{path}.{name}", "is no field", f"remove it; {path} has {', '.join(sorted(known))}")
        values = {field.name: self.member(field, raw, f"{path}.{field.json_name}") for field in fields}
        return None if self.problems else owner(**values)

    def member(self, field: ApiField, raw: Mapping[str, Any], path: str) -> Any:
        found: Any = raw.get(field.json_name)
        if found is not None:
            return self.value(field.type, found, path, field)
        if field.required:
            self.bad(path, "is missing", "set it")
            return None
        return field.default

    def value(self, kind: Any, raw: Any, path: str, field: ApiField) -> Any:
        about = field.about
        if kind == RawObject:
            return self.mapping(raw, path)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self.read_object(kind, raw, path)
        if (item := item_type(kind)) is not None:
            return self.read_list(item, raw, path, field)
        if get_origin(kind) is not None:
            return self.mapping(raw, path)
        if kind is bool or kind is int:
            return self.number(kind, raw, path, field)
        return self.string(kind, raw, path, about.min_size or 0, about.max_size or 0, about)

    def mapping(self, raw: object, path: str) -> Any:
        if not isinstance(raw, Mapping):
            self.bad(path, f"is {_kind(raw)}, not an object", "give an object")
            return None
        return dict(raw)

    def read_list(self, item: Any, raw: object, path: str, field: ApiField) -> Any:
        most = field.about.max_size or 0
        if not isinstance(raw, list | tuple):
            self.bad(path, f"is {_kind(raw)}, not a list", "give a list")
            return None
        if len(raw) > most:
            self.bad(path, f"has {len(raw)} items", f"leave at most {most}")
        about = dataclasses.replace(field.about, min_size=None, max_size=field.about.item_max)
        each = dataclasses.replace(field, about=dataclasses.replace(about, pattern=field.about.item_pattern))
        return tuple(self.value(item, found, f"{path}[{number}]", each) for number, found in enumerate(raw))

    def number(self, kind: type, raw: object, path: str, field: ApiField) -> Any:
        if type(raw) is not kind:
            wanted = "true or false" if kind is bool else "a whole number"
            self.bad(path, f"is {_kind(raw)}", f"give {wanted}")
            return None
        low, high = field.about.minimum, field.about.maximum
        if kind is int and isinstance(raw, int):
            if low is not None and raw < low:
                self.bad(path, f"is {raw}", f"give {low} or more")
            if high is not None and raw > high:
                self.bad(path, f"is {raw}", f"give {high} or less")
        return raw

    def string(self, kind: Any, raw: object, path: str, low: int, high: int, about: About) -> Any:
        if not isinstance(raw, str):
            self.bad(path, f"is {_kind(raw)}", "give a string")
            return None
        if issubclass(kind, StrEnum):
            if raw not in [member.value for member in kind]:
                self.bad(path, f"is {raw[:40]!r}", f"give one of {', '.join(member.value for member in kind)}")
                return None
            return kind(raw)
        if not low <= len(raw) <= high:
            self.bad(path, f"has {len(raw)} characters", f"give {low} to {high}")
        elif about.pattern and re.search(about.pattern, raw) is None:
            self.bad(path, f"is {raw[:80]!r}", about.pattern_remedy or f"give what matches {about.pattern}")
        return raw


def _kind(raw: object) -> str:
    names = {str: "a string", bool: "a truth value", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(raw), "a list" if isinstance(raw, list | tuple) else "an object")
