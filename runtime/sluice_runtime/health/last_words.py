"""What a dead child's stderr says of its death, short enough for one line of cause and with nothing secret in it.

Some processes hold prompts, and the text of an exception may quote one. Of these only the exception's type is reported,
except for ImportError and OSError, whose text is about files and modules.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection, Sequence

from sluice_runtime.health.secrets import NOT_TOLD, without_secrets

MAX_BYTES = 400
# Of a child's last lines, for evidence and for the cause.
KEPT_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_TOKENS = re.compile(r"\b(Bearer\s+)\S+|\bhf_\w+", re.IGNORECASE)
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_FATAL = "Fatal Python error: "


def cause_of_death(lines: Sequence[str], secrets: Collection[str] = (), *, holds_prompts: bool) -> str:
    """At most MAX_BYTES bytes on one line; empty where the lines say nothing that may be told."""
    told = _exception(lines) if holds_prompts else _exception(lines, told_whole=True) or _last(lines)
    return shorten(clean(told, secrets))


def clean(text: str, secrets: Collection[str] = ()) -> str:
    """Without the given secrets, bearer and hub tokens, and what URLs have of users and queries; printable."""
    for secret in sorted((secret for secret in secrets if secret), key=len, reverse=True):
        text = text.replace(secret, NOT_TOLD)
    text = _TOKENS.sub(lambda found: f"{found[1] or ''}{NOT_TOLD}", without_secrets(text))
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shorten(text: str) -> str:
    """The beginning, if it is too long in UTF-8."""
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= MAX_BYTES else data[: MAX_BYTES - 3].decode(errors="ignore") + "..."


def _exception(lines: Sequence[str], *, told_whole: bool = False) -> str:
    """Of the last traceback, or of the interpreter's own fatal error; empty where there is neither."""
    for line in reversed(lines):
        if line.startswith(_FATAL):
            return line
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return ""
    after = [line for line in lines[starts[-1] + 1 :] if line and not line[0].isspace()]
    found = _EXCEPTION.match(after[0]) if after else None
    if found is None:
        return ""
    return after[0] if told_whole or _is_about_files(found["type"]) else found["type"]


def _is_about_files(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, (ImportError, OSError))


def _last(lines: Sequence[str]) -> str:
    """As many of the last lines as there is room for; the very last one in any case."""
    kept: list[str] = []
    for line in reversed([line.strip() for line in lines if line.strip()]):
        if kept and len(" | ".join([line, *kept]).encode()) > MAX_BYTES:
            break
        kept.insert(0, line)
    return " | ".join(kept)
