"""Checks of single JSON values: each takes the field's name and returns the value or raises a 400 that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sluice_gateway.openai.errors import ApiError, invalid, quoted
from sluice_protocol.sampling import BIAS

Json = Any
MAX_ENTRIES = 65_536
T = TypeVar("T")
D = TypeVar("D")
Check = Callable[[str, Json], T]

_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def type_name(value: Json) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def wrong_type(field: str, expected: str, value: Json) -> ApiError:
    return invalid(
        field, f"Invalid type for '{field}': expected {expected}, but got {type_name(value)}.", "invalid_type"
    )


def wrong_value(field: str, message: str) -> ApiError:
    return invalid(field, f"Invalid value for '{field}': {message}", "invalid_value")


def boolean(field: str, value: Json) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(field, "a boolean", value)
    return value


def string(field: str, value: Json) -> str:
    if not isinstance(value, str):
        raise wrong_type(field, "a string", value)
    return value


def mapping(field: str, value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise wrong_type(field, "an object", value)
    return value


def array(field: str, value: Json, most: int = MAX_ENTRIES) -> list[Json]:
    """Of `most` entries at most: more than any conversation has, and no more than can be looked at."""
    if not isinstance(value, list):
        raise wrong_type(field, "an array", value)
    if len(value) > most:
        raise wrong_value(field, f"may have at most {most} entries, but has {len(value)}.")
    return value


def integer(low: int, high: int) -> Check[int]:
    """A whole number in low..high. A float is refused, whole or not, as is a boolean."""

    def check(field: str, value: Json) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            if isinstance(value, float) and abs(value) >= 2**64:
                raise wrong_value(field, f"must be between {low} and {high}.")
            raise wrong_type(field, "an integer", value)
        if not low <= value <= high:
            raise wrong_value(field, f"must be between {low} and {high}, but got {value}.")
        return value

    return check


def number(low: float, high: float) -> Check[float]:
    """A finite number in low..high."""

    def check(field: str, value: Json) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(field, "a number", value)
        if not low <= value <= high:  # no number is none of them
            raise wrong_value(field, f"must be at least {low:g} and at most {high:g}.")
        return float(value)

    return check


def one_of(*allowed: str) -> Check[str]:
    def check(field: str, value: Json) -> str:
        if string(field, value) not in allowed:
            raise wrong_value(
                field, f"must be one of {', '.join(quoted(str(one)) for one in allowed)}, but got {quoted(value)}."
            )
        return str(value)

    return check


def stop_strings(field: str, value: Json) -> tuple[str, ...]:
    """At most four non-empty strings of at most 1024 characters."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise wrong_type(field, "a string or an array of strings", value)
    if len(entries) > 4:
        raise wrong_value(field, f"at most 4 stop strings are allowed, but got {len(entries)}.")
    for index, entry in enumerate(entries):
        place = field if isinstance(value, str) else f"{field}[{index}]"
        if not 1 <= len(string(place, entry)) <= 1024:
            raise wrong_value(place, "a stop string has 1 to 1024 characters.")
    return tuple(entries)


def token_ids(vocab_size: int, most: int) -> Check[tuple[int, ...]]:
    def check(field: str, value: Json) -> tuple[int, ...]:
        entries = array(field, value, max(most, MAX_ENTRIES))
        if len(entries) > most:
            raise wrong_value(field, f"at most {most} token ids are allowed, but got {len(entries)}.")
        for index, entry in enumerate(entries):
            if type(entry) is not int:
                raise wrong_type(f"{field}[{index}]", "an integer", entry)
            if not 0 <= entry < vocab_size:
                raise wrong_value(
                    f"{field}[{index}]", f"token ids are between 0 and {vocab_size - 1}, but got {entry}."
                )
        return tuple(entries)

    return check


def logit_bias(vocab_size: int) -> Check[tuple[tuple[int, float], ...]]:
    """Object of token id (as a string) to a number in -100..100; sorted by id."""
    value_check = number(*BIAS)

    def check(field: str, value: Json) -> tuple[tuple[int, float], ...]:
        entries: dict[int, float] = {}
        for key, bias in mapping(field, value).items():
            place = f"{field}.{key[:32]}"
            if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
                raise wrong_value(place, f"keys are token ids between 0 and {vocab_size - 1}.")
            entries[int(key)] = value_check(place, bias)
        return tuple(sorted(entries.items()))

    return check


def take(body: Mapping[str, Json], name: str, check: Check[T], default: D) -> T | D:
    """Absent and null mean `default`."""
    value = body.get(name)
    return default if value is None else check(name, value)


def only_keys(field: str, value: Mapping[str, Json], allowed: frozenset[str]) -> None:
    """A null is absent, also where the name is not known."""
    for key, told in value.items():
        if told is not None and key not in allowed:
            place = f"{field}.{key[:64]}" if field else key[:64]
            raise invalid(place, f"Unrecognized request argument supplied: {place}", "unknown_parameter")
