"""Arguments of a tool call, as a model once wrote them and a client sends them back: a text that is JSON, or not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

MAX_NESTING = 100
"""Of objects and arrays in each other. Far below what ends the interpreter's stack, wherever it stands."""


class BadArguments(ValueError):
    """They are JSON that cannot be written into a prompt; the message says why, and what would do."""


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """The object that they are; None: they are none, and stay text. What comes out can be written as JSON and encoded
    as UTF-8. Raises BadArguments."""
    try:
        parsed = json.loads(arguments or "{}")
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    if _is_deeper(parsed, MAX_NESTING):
        raise _too_deep()
    try:
        write_json(parsed).encode()
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(error.object[error.start]):04x}"
        raise BadArguments(
            f"{lone} is half of a surrogate pair, which is no character; send \\ufffd for it."
        ) from error
    return parsed


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _too_deep() -> BadArguments:
    return BadArguments(f"may be nested {MAX_NESTING} levels deep, and is deeper; flatten it.")


def _is_deeper(value: Any, most: int) -> bool:
    """Whether objects and arrays stand more than `most` deep in each other."""
    layer = [value]
    for _ in range(most + 1):
        layer = list(chain.from_iterable(_inner(entry) for entry in layer if isinstance(entry, dict | list)))
        if not layer:
            return False
    return True


def _inner(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
