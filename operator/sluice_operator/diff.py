"""Whether an object in the cluster already says what we want to say."""

from __future__ import annotations

from typing import Any


def covers(live: Any, wanted: Any) -> bool:
    """Everything in `wanted` is so in `live`, which may say more (defaults, status). Lists are of one length.

    Both as JSON has them: dicts, lists, scalars.
    """
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(_has(live, key, value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and len(live) == len(wanted) and all(covers(a, b) for a, b in zip(live, wanted))
    return bool(live == wanted)


def _has(live: dict[str, Any], key: str, wanted: Any) -> bool:
    """The API server drops what is empty."""
    if key not in live:
        return wanted in ({}, [], None, "")
    return covers(live[key], wanted)
