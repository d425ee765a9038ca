"""What must never be told of a process's settings. Keys are in files, whose names may be told; URLs may
have a user, a password, or a token in the query."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NOT_TOLD = "(not told)"
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<rest>\S+)")
# As HTTP libraries tell what they asked a host for.
_QUERY = re.compile(r"(?P<path>(?<!\S)/[^\s?#]*)[?#](?!\(not told\))\S+")


def without_secrets(text: str) -> str:
    """Of each URL in it scheme, host, port and path are told; only the scheme where it is not clear which part is
    which."""
    if "/" not in text:  # nearly all of what is logged, and neither a URL nor a path
        return text
    return _QUERY.sub(rf"\g<path>?{NOT_TOLD}", _URL.sub(_told, text))


def _told(url: re.Match[str]) -> str:
    head, at, place = url["rest"].rpartition("@")
    if re.search(r"[?#]", head):  # the @ may be of a password or of the query
        return url["scheme"] + NOT_TOLD
    user = f"{NOT_TOLD}@" if at else ""
    place, mark, _ = re.sub("#", "?", place, count=1).partition("?")
    return f"{url['scheme']}{user}{place}" + (f"?{NOT_TOLD}" if mark else "")


def values_without_secrets(value: Any) -> Any:
    """The same plain value with every text in it without secrets."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: values_without_secrets(item) for key, item in value.items()}
    return [values_without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value
