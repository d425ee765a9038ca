"""Whether an object in the cluster already says what we want to say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# What is added to such a map is no addition: it selects less.
EXACT = frozenset({"selector", "matchLabels"})
# Of these the API server takes one only, so that ours cannot be applied while another one is there.
EXCLUSIVE = {"minAvailable": "maxUnavailable", "maxUnavailable": "minAvailable"}


def covers(live: Any, wanted: Any) -> bool:
    """Everything in `wanted` is so in `live`, which may say more (defaults, status). Lists are of one length, and maps
    that select have the same keys.

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
    if key in EXACT and isinstance(wanted, dict) and isinstance(live[key], dict) and live[key].keys() - wanted.keys():
        return False
    return covers(live[key], wanted)


def additions(live: Any, wanted: Any) -> dict[str, Any]:
    """A merge patch that takes away what others have added to maps that select, or have put in the place of a field of
    ours. Not inside of lists: those are replaced whole by whoever applies them."""
    patch: dict[str, Any] = {}
    if not (isinstance(live, dict) and isinstance(wanted, dict)):
        return patch
    for key, value in wanted.items():
        inner = additions(live.get(key), value)
        if key in EXACT and isinstance(value, dict) and isinstance(live.get(key), dict):
            inner |= dict.fromkeys(live[key].keys() - value.keys())
        if inner:
            patch[key] = inner
        if EXCLUSIVE.get(key) in live:
            patch[EXCLUSIVE[key]] = None
    return patch


def leftovers(live: Mapping[str, Any], wanted: Mapping[str, Any], manager: str) -> bool:
    """Whether `manager` still owns what is not in `wanted`: it wanted that once, and an Apply takes it away. What it
    has created has the defaults among its fields, so of that only labels and annotations count."""
    for entry in live["metadata"].get("managedFields", ()):
        if entry.get("manager") != manager or "subresource" in entry:
            continue
        owned = entry.get("fieldsV1", {})
        if entry.get("operation") != "Apply":
            meta = owned.get("f:metadata", {})
            owned = {"f:metadata": {key: meta[key] for key in ("f:labels", "f:annotations") if key in meta}}
        if any(_beyond(owned, wanted)):
            return True
    return False


def _beyond(owned: Mapping[str, Any], wanted: Any) -> Iterator[bool]:
    """For each field of a fieldsV1 tree, whether `wanted` lacks it."""
    for key, inner in owned.items():
        kind, _, name = key.partition(":")
        if kind == "f":
            there = isinstance(wanted, Mapping) and name in wanted
            yield not there
            if there:
                yield from _beyond(inner, wanted[name])
        elif kind == "k":
            keys = json.loads(name)
            items = wanted if isinstance(wanted, list) else []
            found = next((i for i in items if isinstance(i, Mapping) and keys.items() <= {**_PORT, **i}.items()), None)
            yield found is None
            if found is not None:
                yield from _beyond(inner, found)
        elif kind == "v":
            yield not (isinstance(wanted, list) and json.loads(name) in wanted)


# Part of the key of a port, and a default.
_PORT = {"protocol": "TCP"}
